"""Query cache: the vectors of recent queries under their instructions; the least recently used one leaves first.

Identical concurrent queries share one encoding (single flight). A release has one encoder, so its cache needs no
invalidation: the next release starts with an empty one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from infembed_ray.modeling.lru_cache import LruCache
from infembed_ray.serving import tracing
from infembed_ray.serving.encoder.batching import Embedded
from infembed_ray.serving.service import Query

ENTRY_BYTES = 512
"""Memory of an entry besides its vector and its characters: objects of Python and numpy, and its place in the cache."""


@dataclass
class _Flight:
    """An encoding of one query that is under way, and the number of callers that wait for it."""

    vector: asyncio.Task[np.ndarray]
    callers: int = 0


class QueryCache:
    """Embeds queries, and keeps their vectors. All calls come from one event loop.

    Args:
        embed: embeds queries by a deadline (the event loop's time).
        max_bytes: limit of the memory of all entries; 0: every query is encoded.

    Attributes:
        hits: queries that were not sent to the encoder.
        misses: queries that were sent to it.
    """

    def __init__(self, embed: Callable[[list[Query], float], Awaitable[Embedded]], max_bytes: int) -> None:
        self._embed = embed
        self._vectors = LruCache[Query, np.ndarray](max_bytes, _size)
        self._flights: dict[Query, _Flight] = {}
        self.hits = self.misses = 0

    @property
    def bytes(self) -> int:
        """Memory of the entries."""
        return self._vectors.size

    async def __call__(self, queries: Sequence[Query], deadline: float) -> np.ndarray:
        """Return (len(queries), d) vectors, in order. Queries that are not cached go to the encoder in one call."""
        found = {query: vector for query in queries if (vector := self._vectors.get(query)) is not None}
        missing = [query for query in dict.fromkeys(queries) if query not in found]
        self.hits += len(queries) - len(missing)
        if len(missing) == 1 and self._vectors.max_size:
            found[missing[0]] = await self._shared(missing[0], deadline)
        elif missing:
            found |= zip(missing, await self._encode(missing, deadline), strict=True)
        return np.stack([found[query] for query in queries])

    async def _shared(self, query: Query, deadline: float) -> np.ndarray:
        """Wait for the encoding of a query, which starts unless it is under way."""
        flight = self._flights.get(query)
        if flight is None:
            start = asyncio.get_running_loop().create_task
            flight = _Flight(tracing.detached().run(start, self._first(query, deadline)))
            self._flights[query] = flight
        else:
            self.hits += 1
        flight.callers += 1
        try:
            return await asyncio.shield(flight.vector)
        finally:
            flight.callers -= 1
            if not flight.callers:
                del self._flights[query]
                flight.vector.cancel()  # without effect unless every caller was cancelled

    async def _first(self, query: Query, deadline: float) -> np.ndarray:
        vector: np.ndarray = (await self._encode([query], deadline))[0]
        return vector

    async def _encode(self, queries: list[Query], deadline: float) -> np.ndarray:
        self.misses += len(queries)
        vectors, tokens = await self._embed(queries, deadline)
        tracing.note(tokens=tokens)
        for query, vector in zip(queries, vectors, strict=True):
            self._vectors.put(query, vector.copy())  # a view would keep the vectors of the whole call
        return vectors


def _size(query: Query, vector: np.ndarray) -> int:
    """Return the memory of an entry; a character takes up to four bytes."""
    return vector.nbytes + 4 * (len(query.text) + len(query.instruction or "")) + ENTRY_BYTES
