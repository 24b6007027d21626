"""The three kinds of retrievers. Nothing here knows of Ray: an evaluation calls them in one process or in many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from infembed_ray.evaluation.metrics import Run
from infembed_ray.evaluation.tasks.task import Query, Task


@runtime_checkable
class Encoder(Protocol):
    """Embeds queries and passages; documents rank by inner product."""

    identity: str
    """Hash of all that decides its embeddings: weights, prompts, template, pooling, lengths. They are re-used by it."""

    def encode_queries(self, queries: Sequence[Query]) -> np.ndarray:
        """(n, d) float32."""
        ...

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """(n, d) float32."""
        ...


@runtime_checkable
class Reranker(Protocol):
    """Scores pairs of a query and a passage, read together."""

    identity: str
    """Hash of all that decides its scores."""

    def score(self, pairs: Sequence[tuple[Query, str]]) -> np.ndarray:
        """(n) float32, higher is better."""
        ...


@runtime_checkable
class Ranker(Protocol):
    """Ranks a whole task by itself, in one process: BM25."""

    identity: str
    """Hash of all that decides its rankings."""

    def rank(self, task: Task, depth: int) -> Run:
        """The best `depth` documents of every query: among its candidates, where the task has them; never excluded ones."""
        ...
