"""Calls of the ingress to one encoder: micro-batched, retried, and with a query cache. No Ray.

The releases of all collections that one encoder serves share them. Vectors depend on the encoder alone, so a query that was
encoded for one collection need not be encoded again for another one.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from infembed_ray.modeling.lru_cache import LruCache
from infembed_ray.serving import schema
from infembed_ray.serving.encoder.batching import Embedded
from infembed_ray.serving.routing.fan_out import Deployment, now
from infembed_ray.serving.routing.micro_batching import MicroBatcher
from infembed_ray.serving.routing.retries import RetriedCalls
from infembed_ray.serving.service import Query

MAX_BATCH_CHARACTERS = 4_096
"""Characters of the texts in one call to the encoder: one or two batches of its engine. Larger calls would return all their
answers at once and leave the encoder idle. A larger request gets a call of its own, so that short ones do not wait for it.
"""
CALLS_PER_ENCODER = 4
"""Calls in flight per encoder replica: it works on one or two, and the next are there when those are done."""
DEADLINE_SHARE = 0.9
"""Calls end at this share of the request time-out, so that the loss of a replica is reported as such (503, not 504)."""
ENTRY_BYTES = 512
"""Memory of a cached query besides its vector and its characters: objects of Python and numpy, and its place in the cache."""


class EncoderInputs(NamedTuple):
    """Texts or token arrays of one request."""

    inputs: list[str] | list[list[int]]
    input_type: schema.InputType
    instruction: str | None


class EncoderCalls:
    """Calls to an encoder. All of them come from one event loop.

    Args:
        encoder: has `embed_many(list[EncoderInputs | list[Query]], timeout_s) -> list[Embedded | Exception]` and `ready()`.
        replicas: largest number of replicas.
        query_cache_bytes: size of the query cache; 0: none.

    Attributes:
        embed: embeds the inputs of a request by a deadline (the event loop's time).
        query_cache: embeds queries by a deadline, and keeps the vectors of recent ones.
    """

    def __init__(self, encoder: Deployment, *, replicas: int = 1, query_cache_bytes: int = 0) -> None:
        self._encoder = encoder
        self._calls = RetriedCalls(replicas)
        self.embed = MicroBatcher(
            self._call,
            max_calls=CALLS_PER_ENCODER * replicas,
            max_weight=MAX_BATCH_CHARACTERS,
            weigh=_characters,
        )
        self.query_cache = QueryCache(self.embed, query_cache_bytes)

    async def ready(self) -> bool:
        """Return whether the encoder answers; ReplicaLost if it has no replica."""
        return bool(await self._encoder("ready"))

    async def _call(
        self, items: Sequence[EncoderInputs | list[Query]], deadline: float
    ) -> Sequence[Embedded | Exception]:
        return await self._calls(lambda: self._encoder("embed_many", items, deadline - now()), deadline - now())


def _characters(item: EncoderInputs | list[Query]) -> int:
    if isinstance(item, EncoderInputs):
        return sum(map(len, item.inputs))
    return sum(len(query.text) + len(query.instruction or "") for query in item)


@dataclass
class _Flight:
    """An encoding of one query that is under way, and the number of callers that wait for it."""

    vector: asyncio.Task[np.ndarray]
    callers: int = 0


class QueryCache:
    """Embeds queries, and keeps the vectors of recent ones under their instructions. All calls come from one event loop.

    Identical concurrent queries share one encoding (single flight).

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
        vectors = {query: vector for query in queries if (vector := self._vectors.get(query)) is not None}
        missing = [query for query in dict.fromkeys(queries) if query not in vectors]
        self.hits += len(queries) - len(missing)
        if len(missing) == 1 and self._vectors.max_size:
            vectors[missing[0]] = await self._shared(missing[0], deadline)
        elif missing:
            vectors |= zip(missing, await self._encode(missing, deadline), strict=True)
        return np.stack([vectors[query] for query in queries])

    async def _shared(self, query: Query, deadline: float) -> np.ndarray:
        """Wait for the encoding of a query, which starts unless it is under way."""
        flight = self._flights.get(query)
        if flight is None:
            start = asyncio.get_running_loop().create_task
            flight = _Flight(contextvars.Context().run(start, self._first(query, deadline)))
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
        vectors = (await self._embed(queries, deadline)).vectors
        for query, vector in zip(queries, vectors, strict=True):
            self._vectors.put(query, vector.copy())  # a view would keep the vectors of the whole call
        return vectors


def _size(query: Query, vector: np.ndarray) -> int:
    """Return the memory of an entry; a character takes up to four bytes."""
    return vector.nbytes + 4 * (len(query.text) + len(query.instruction or "")) + ENTRY_BYTES
