"""The three interfaces of retrievers, none of which depends on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from infembed_ray.evaluation.metrics import Run
from infembed_ray.evaluation.tasks.task import Query, Task


@runtime_checkable
class TextEncoder(Protocol):
    """Embeds queries and passages; documents are ranked by inner product."""

    def encode_queries(self, queries: Sequence[Query]) -> np.ndarray:
        """Embed queries with their instructions: (n, d) float32."""
        ...

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Embed passages: (n, d) float32."""
        ...


@runtime_checkable
class PairReranker(Protocol):
    """Scores pairs of a query and a passage, which it reads together."""

    def score(self, pairs: Sequence[tuple[Query, str]]) -> np.ndarray:
        """Score pairs: (n) float32, higher is more relevant."""
        ...


@runtime_checkable
class Ranker(Protocol):
    """Ranks a whole task in one process: BM25, or a given run."""

    def rank(self, task: Task, depth: int) -> Run:
        """Rank the top `depth` documents of every query, within its candidates and without its excluded documents."""
        ...


Retriever = TextEncoder | PairReranker | Ranker
