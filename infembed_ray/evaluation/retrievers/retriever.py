"""The three interfaces of retrievers, none of which depends on Ray, and the formats of their inputs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from infembed_ray.config.evaluation import (
    ApiSettings,
    Bm25Settings,
    EncoderSettings,
    RerankerSettings,
    SentenceTransformersSettings,
)
from infembed_ray.evaluation.metrics import Run
from infembed_ray.evaluation.tasks.task import Query, Task

FormattedSettings = EncoderSettings | SentenceTransformersSettings | ApiSettings | Bm25Settings | RerankerSettings
"""Settings with formats for queries."""


@runtime_checkable
class Encoder(Protocol):
    """Embeds queries and passages; documents are ranked by inner product."""

    identity: str
    """Hash of all that decides the embeddings: weights, prompts, template, pooling, lengths. Names them in the store."""

    def encode_queries(self, queries: Sequence[Query]) -> np.ndarray:
        """Embed queries with their instructions: (n, d) float32."""
        ...

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Embed passages: (n, d) float32."""
        ...


@runtime_checkable
class Reranker(Protocol):
    """Scores pairs of a query and a passage, which it reads together."""

    identity: str
    """Hash of all that decides the scores."""

    def score(self, pairs: Sequence[tuple[Query, str]]) -> np.ndarray:
        """Score pairs: (n) float32, higher is more relevant."""
        ...


@runtime_checkable
class Ranker(Protocol):
    """Ranks a whole task in one process: BM25."""

    identity: str
    """Hash of all that decides the rankings."""

    def rank(self, task: Task, depth: int) -> Run:
        """Rank the top `depth` documents of every query, within its candidates and without its excluded documents."""
        ...


Retriever = Encoder | Reranker | Ranker


def fill(text_format: str, **values: str) -> str:
    """Fill in a format's placeholders. Braces inside the values are plain text."""
    return re.sub(r"\{(\w+)\}", lambda placeholder: values[placeholder[1]], text_format)


def split(text_format: str, placeholder: str, **values: str) -> tuple[str, str]:
    """Return the filled-in text before a format's placeholder and the text after it."""
    before, after = text_format.split(f"{{{placeholder}}}", 1)
    return fill(before, **values), fill(after, **values)


def query_format(settings: FormattedSettings, query: Query) -> str:
    """Return the format for a query with or without an instruction; `{query}` if the settings have none."""
    return (settings.instructed_query if query.instruction else settings.plain_query) or "{query}"


def query_text(settings: FormattedSettings, query: Query) -> str:
    """Format a query and its instruction, if it has one."""
    return fill(query_format(settings, query), query=query.query, instruction=query.instruction or "")


def passage_text(passage_format: str | None, text: str) -> str:
    """Format a passage; without a format it stays as it is."""
    return fill(passage_format or "{passage}", passage=text)
