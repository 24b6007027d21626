"""The scoring channels of a search besides the query's vector: what its instructions exclude, and words."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from infembed_ray.config.serving import RankingSettings
from infembed_ray.retrieval.answers import ShardQuery
from infembed_ray.retrieval.fusion import Fusion
from infembed_ray.retrieval.instruction_parts import Parts, split
from infembed_ray.serving.service import Query, Search


@dataclass(frozen=True)
class Channels:
    """The channels of one search.

    Attributes:
        parts: of the instruction of each query; without exclusion they are empty.
        fusion: scores the candidates; None: the search has the query's vector only.
        depth: candidates of each channel and shard.
    """

    parts: list[Parts]
    fusion: Fusion | None
    depth: int

    @classmethod
    def of(cls, search: Search, defaults: RankingSettings) -> Channels:
        """The channels that a search asks for, or the server's defaults.

        An exclusion is no channel where no instruction excludes anything.
        """
        exclude = defaults.exclude if search.exclude is None else search.exclude
        hybrid = defaults.hybrid if search.hybrid is None else search.hybrid
        parts = [split(query.instruction or "") if exclude else NOTHING for query in search.queries]
        if not hybrid and not any(part.unwanted for part in parts):
            return cls(parts, None, 0)
        fusion = Fusion(defaults.exclusion_weight if exclude else 0.0, hybrid)
        return cls(parts, fusion, max(defaults.depth, search.top_k))

    @property
    def texts(self) -> list[Query]:
        """The further texts to embed, in the same call as the queries."""
        return [Query(part.unwanted) for part in self.parts if part.unwanted]

    def of_shards(self, query: ShardQuery, unwanted: np.ndarray, search: Search) -> ShardQuery:
        """The request to the shards.

        Args:
            query: without channels.
            unwanted: vectors of `texts`.
        """
        if self.fusion is None:
            return query
        vectors = None
        if len(unwanted):
            vectors = np.zeros_like(query.vectors)
            vectors[[bool(part.unwanted) for part in self.parts]] = unwanted
        words = (
            [words_of(*both) for both in zip(search.queries, self.parts, strict=True)] if self.fusion.hybrid else None
        )
        return replace(query, unwanted=vectors, texts=words, depth=self.depth)


NOTHING = Parts("", "", ())


def words_of(query: Query, parts: Parts) -> str:
    """The text of the lexical channel: the query, and what its instruction wants."""
    wanted = parts.wanted if parts.unwanted else query.instruction
    return f"{wanted} {query.text}" if wanted else query.text
