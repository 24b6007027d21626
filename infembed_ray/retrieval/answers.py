"""Requests to shards, their answers, and the merge of the answers."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from infembed_ray.retrieval.shards import Hit


@dataclass(frozen=True)
class ShardQuery:
    """A search request to a shard.

    Attributes:
        vectors: (n, d) float32 unit vectors.
        k: most hits per vector.
        filter: metadata filter, as in JSON.
        min_sequence: least sequence of the answer; a shard that is behind answers `Behind`.
        texts: words for the lexical index, a text per vector; None: search by vectors only.
        depth: with texts, the shard answers the best `depth` passages by vector and the best `depth` by words, instead of `k`.
    """

    vectors: np.ndarray
    k: int
    filter: Mapping[str, Any] | None = None
    min_sequence: int = 0
    texts: Sequence[str] | None = None
    depth: int = 0

    @classmethod
    def together(cls, queries: Sequence[ShardQuery]) -> ShardQuery:
        """One request for all vectors of queries that are equal otherwise; all have texts, or none has."""
        first = queries[0]
        if len(queries) == 1:
            return first
        return replace(
            first,
            vectors=np.concatenate([query.vectors for query in queries]),
            texts=None if first.texts is None else [text for query in queries for text in query.texts or ()],
        )


@dataclass(frozen=True)
class ShardAnswer:
    """The answer of a shard to one request.

    Attributes:
        hits: for each vector, by (score, id), descending; with texts, its candidates by vector and by words, in any order.
        sequence: the answer includes all changes up to this one, and none after it.
        lexical: with texts, float32 BM25 of the hits of each vector.
    """

    hits: list[list[Hit]]
    sequence: int
    lexical: list[np.ndarray] | None = None

    def part(self, start: int, end: int) -> ShardAnswer:
        """The answer to the vectors from `start` to `end`."""
        return ShardAnswer(self.hits[start:end], self.sequence, self.lexical and self.lexical[start:end])


class ScoreQuery(NamedTuple):
    """A request to a shard for the scores of some passages, as they are stored now.

    Attributes:
        ids: of m passages.
        vectors: (n, d) float32 unit vectors.
    """

    ids: Sequence[str]
    vectors: np.ndarray


class Behind(Exception):
    """A shard has not applied the changes that a search asks for; the argument is its sequence."""


def merge(answers: Sequence[ShardAnswer], vector: int, k: int, hybrid: float = 0.0) -> list[Hit]:
    """Merge the hits of several shards for one vector: the best `k` by (score, id), descending.

    Args:
        hybrid: weight of words; above 0, the scores are those that `fuse` gives the candidates.
    """
    hits = [hit for answer in answers for hit in answer.hits[vector]]
    if hybrid:
        lexical = np.concatenate([answer.lexical[vector] for answer in answers if answer.lexical is not None])
        fused = fuse(np.array([hit.score for hit in hits], np.float32), lexical, hybrid)
        hits = [hit._replace(score=score) for hit, score in zip(hits, fused.tolist(), strict=True)]
    return nearest(hits, k)


def nearest(hits: Iterable[Hit], k: int) -> list[Hit]:
    """The best `k` hits by (score, id), descending."""
    return heapq.nlargest(k, hits, key=lambda hit: (hit.score, hit.id))


def fuse(dense: np.ndarray, lexical: np.ndarray, weight: float) -> np.ndarray:
    """Score candidates by the weighted mean of their cosine and their BM25, which is divided by the largest of all candidates.

    Args:
        dense: (m,) cosines of the query with all candidates.
        lexical: (m,) BM25, 0 or more.
        weight: share of BM25 in the score, 0 to 1.

    Returns:
        (m,) float32.
    """
    largest = lexical.max(initial=0)
    relative = lexical / largest if largest > 0 else lexical
    return ((1 - weight) * dense + weight * relative).astype(np.float32)
