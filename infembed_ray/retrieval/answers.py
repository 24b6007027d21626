"""Answers of shards to a search, and their merge.

A shard answers hits with their texts, or a ranking in arrays; then the texts of the winners are fetched by key. A key names one
state of a document for ever, so the text that is fetched is the one that was scored.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.retrieval.fusion import fuse
from infembed_ray.retrieval.shards import Hit

Key = tuple[int, str]
"""One state of a document in a shard of one version: its place and its id. The place is its row in the base; or, negative,
minus the sequence of the change that put it.
"""
_BEST_FIRST = [("score", "descending"), ("id", "descending")]


@dataclass(frozen=True)
class ShardQuery:
    """A search request to a shard.

    Attributes:
        vectors: (n, d) float32 unit vectors.
        k: most hits per vector.
        filter: metadata filter, as in JSON.
        min_sequence: least sequence of the answer; a shard that is behind answers `Behind`.
        ranking: answer a `ShardRanking` instead of a `ShardAnswer`.
        texts: words for the lexical index, a text per vector; None: search by vectors only.
        depth: with texts, the shard ranks the best `depth` passages by vector and the best `depth` by words, instead of `k`.
    """

    vectors: np.ndarray
    k: int
    filter: Mapping[str, Any] | None = None
    min_sequence: int = 0
    ranking: bool = False
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
        hits: for each vector, by (score, id), descending.
        sequence: the answer includes all changes up to this one, and none after it.
    """

    hits: list[list[Hit]]
    sequence: int

    def part(self, start: int, end: int) -> ShardAnswer:
        """The answer to the vectors from `start` to `end`."""
        return ShardAnswer(self.hits[start:end], self.sequence)


@dataclass(frozen=True)
class ShardRanking:
    """The answer of a shard to one request, without texts: m hits, those of each vector by (score, id), descending.

    With texts, the hits of a vector are its candidates by vector and by words, in any order.

    Attributes:
        ends: end of the hits of each vector.
        ids: m ids.
        scores: (m,) float32.
        places: (m,) int64, as in `Key`.
        sequence: as in `ShardAnswer`.
        lexical: with texts, (m,) float32 BM25.
    """

    ends: Sequence[int]
    ids: pa.Array
    scores: np.ndarray
    places: np.ndarray
    sequence: int
    lexical: np.ndarray | None = None

    def hits_of(self, vector: int) -> slice:
        """The hits of a vector."""
        return slice(self.ends[vector - 1] if vector else 0, self.ends[vector])

    def part(self, start: int, end: int) -> ShardRanking:
        """The answer to the vectors from `start` to `end`."""
        first = self.ends[start - 1] if start else 0
        ends = [last - first for last in self.ends[start:end]]
        hits = np.arange(first, first + (ends[-1] if ends else 0))
        ids = self.ids.take(pa.array(hits))  # a slice would be pickled with the rest
        lexical = None if self.lexical is None else self.lexical[hits]
        return ShardRanking(ends, ids, self.scores[hits], self.places[hits], self.sequence, lexical)


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


class MergedRanking(NamedTuple):
    """The best hits of one vector over several rankings, by (score, id), descending.

    Attributes:
        ids, scores: of k hits.
        rankings, places: the ranking of each hit, and its place, as in `Key`.
    """

    ids: list[str]
    scores: list[float]
    rankings: list[int]
    places: list[int]


def merge(results: Iterable[Sequence[Hit]], k: int) -> list[Hit]:
    """Merge the hits of several shards for one vector: the best `k` by (score, id), descending."""
    return heapq.nlargest(k, (hit for hits in results for hit in hits), key=lambda hit: (hit.score, hit.id))


def merge_rankings(rankings: Sequence[ShardRanking], vector: int, k: int, hybrid: float = 0.0) -> MergedRanking:
    """As `merge`, of rankings; with a weight `hybrid` of words, by the scores that `fuse` gives their candidates."""
    parts = [ranking.hits_of(vector) for ranking in rankings]
    both = list(zip(rankings, parts, strict=True))
    scores = np.concatenate([ranking.scores[part] for ranking, part in both])
    places = np.concatenate([ranking.places[part] for ranking, part in both])
    ids = pa.concat_arrays([ranking.ids[part] for ranking, part in both])
    if hybrid:
        scores = fuse(scores, np.concatenate([ranking.lexical[part] for ranking, part in both]), hybrid)  # type: ignore[index]
    chosen = best(scores, k, ids)
    ends = np.cumsum([part.stop - part.start for part in parts])
    numbers = np.searchsorted(ends, chosen, side="right")
    names = ids.take(pa.array(chosen)).to_pylist()
    return MergedRanking(names, scores[chosen].tolist(), numbers.tolist(), places[chosen].tolist())


def best(scores: np.ndarray, k: int, ids: pa.Array) -> np.ndarray:
    """Positions of the best `k` by (score, id), descending.

    Args:
        scores: (m,) finite numbers.
    """
    chosen = np.arange(len(scores))
    if len(scores) > k:
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        chosen = np.flatnonzero(scores >= least)
    chosen = chosen[np.argsort(-scores[chosen], kind="stable")]
    ordered = scores[chosen]
    if (ordered[1:] == ordered[:-1]).any():
        table = pa.table({"score": ordered, "id": ids.take(pa.array(chosen))})
        chosen = chosen[pc.sort_indices(table, sort_keys=_BEST_FIRST).to_numpy()]
    return chosen[:k]
