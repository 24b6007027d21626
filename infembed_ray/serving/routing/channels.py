"""What a search encodes and asks of the shards, with what its instructions exclude and with words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from infembed_ray.config.serving import RankingSettings
from infembed_ray.retrieval.answers import ShardQuery
from infembed_ray.retrieval.fusion import away
from infembed_ray.retrieval.instruction_parts import Parts, split
from infembed_ray.serving.service import Query, Search

HYBRID_DEPTH = 100
"""Candidates by vector, and as many by words, from every shard; at least `top_k`."""


@dataclass(frozen=True)
class Channels:
    """The channels of one search: those that it asks for, or else the server's.

    Attributes:
        queries: of the search.
        parts: of the instruction of each query, if it excludes something or words are searched.
        exclusion: weight of the unwanted parts; 0: none.
        whole: encode queries under their whole instruction, also where it excludes something.
        hybrid: weight of words.
        depth: candidates by vector and by words.
    """

    queries: Sequence[Query]
    parts: Sequence[Parts]
    exclusion: float
    whole: bool
    hybrid: float
    depth: int

    @classmethod
    def of(cls, search: Search, defaults: RankingSettings) -> Channels:
        """Choose the channels of a search."""
        exclude = defaults.exclude if search.exclude is None else search.exclude
        hybrid = defaults.hybrid if search.hybrid is None else search.hybrid
        parts = [split(query.instruction or "") for query in search.queries] if exclude or hybrid else []
        weight = defaults.exclusion_weight if exclude else 0.0
        whole = defaults.exclusion_keeps_instruction
        return cls(search.queries, parts, weight, whole, hybrid, max(HYBRID_DEPTH, search.top_k))

    @property
    def texts(self) -> list[Query]:
        """What to encode: the queries, unless `whole` under what their instructions want, and then the unwanted parts."""
        if not self._excluding:
            return list(self.queries)
        wanted = [
            Query(query.text, parts.wanted or None) if parts.unwanted and not self.whole else query
            for query, parts in zip(self.queries, self.parts, strict=True)
        ]
        return wanted + [Query(self.parts[number].unwanted) for number in self._excluding]

    def vectors(self, encoded: np.ndarray) -> np.ndarray:
        """The vectors to search with, (queries, d) unit vectors, from those of `texts`."""
        vectors, unwanted = np.split(encoded, [len(self.queries)])
        if self._excluding:
            vectors = vectors.copy()
            vectors[self._excluding] = away(vectors[self._excluding], unwanted, self.exclusion)
        return vectors

    def query(self, query: ShardQuery) -> ShardQuery:
        """The request to the shards, with words if the search has them: the query, and what its instruction wants.

        A bag of words cannot negate, so the unwanted part is left out also where `exclude` is false.
        """
        if not self.hybrid:
            return query
        both = zip(self.queries, self.parts, strict=True)
        return replace(query, texts=[f"{parts.wanted} {query.text}".strip() for query, parts in both], depth=self.depth)

    @property
    def _excluding(self) -> list[int]:
        """The queries whose instruction excludes something."""
        return [number for number, parts in enumerate(self.parts) if parts.unwanted] if self.exclusion else []
