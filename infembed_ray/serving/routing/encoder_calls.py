"""Calls of the ingress to one encoder, which all its collections share: micro-batched, retried, and with a query cache. No Ray."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from cachetools import LRUCache

from infembed_ray.modeling.formats import Question
from infembed_ray.serving.encoder.batching import Embedded
from infembed_ray.serving.routing.fan_out import Deployment, now
from infembed_ray.serving.routing.micro_batching import MicroBatcher
from infembed_ray.serving.routing.retries import RetriedCalls

MAX_BATCH_CHARACTERS = 4_096
"""Characters of the texts in one call to the encoder: one or two batches of its engine. Larger calls would return all their
answers at once and leave the encoder idle. A larger request gets a call of its own, so that short ones do not wait for it.
"""
CALLS_PER_ENCODER = 4
"""Calls in flight per encoder replica: it works on one or two, and the next are there when those are done."""
DEADLINE_SHARE = 0.9
"""Calls end at this share of the request time-out, so that the loss of a replica is reported as such (503, not 504)."""
CACHE_BYTES = 64 * 2**20
"""Memory of the query cache."""
ENTRY_BYTES = 512
"""Memory of a cached query besides its vector and its characters: objects of Python and numpy, and its place in the cache."""


class EncoderInputs(NamedTuple):
    """Texts of one request."""

    texts: list[str]
    instructions: list[str | None] | None
    """One per query; None: the texts are passages."""
    chunks: tuple[int, int] | None = None
    """Maximum and shared tokens of the chunks into which passages are cut; None: they are not."""

    @property
    def characters(self) -> int:
        """Characters of texts and instructions."""
        return sum(map(len, self.texts)) + sum(len(i or "") for i in self.instructions or ())


class EncoderCalls:
    """Calls to an encoder, each by a deadline (the event loop's time). All of them come from one event loop.

    Args:
        encoder: has `embed_many(list[EncoderInputs], timeout_s) -> list[Embedded | Exception]` and `ready()`.
        replicas: largest number of replicas.
    """

    def __init__(self, encoder: Deployment, *, replicas: int = 1) -> None:
        self._encoder = encoder
        self._calls = RetriedCalls(replicas)
        self.embed: MicroBatcher[EncoderInputs, Embedded] = MicroBatcher(
            self._call,
            max_calls=CALLS_PER_ENCODER * replicas,
            max_weight=MAX_BATCH_CHARACTERS,
            weigh=lambda inputs: inputs.characters,
        )
        self.query_cache = QueryCache(self.embed)

    async def ready(self) -> bool:
        """Return whether the encoder answers; ReplicaLost if it has no replica."""
        return bool(await self._encoder("ready"))

    async def _call(self, items: Sequence[EncoderInputs], deadline: float) -> Sequence[Embedded | Exception]:
        return await self._calls(lambda: self._encoder("embed_many", items, deadline - now()), deadline - now())


class QueryCache:
    """Embeds queries, and keeps the vectors of recent ones under their instructions, up to `max_bytes` of memory.

    All calls come from one event loop. `hits` counts the queries that were not sent to the encoder, `misses` the others.
    """

    def __init__(
        self, embed: Callable[[EncoderInputs, float], Awaitable[Embedded]], max_bytes: int = CACHE_BYTES
    ) -> None:
        self._embed = embed
        self._vectors = LRUCache[Question, tuple[Question, np.ndarray]](max_bytes, _size)
        self.hits = self.misses = 0

    @property
    def bytes(self) -> int:
        """Memory of the entries."""
        return int(self._vectors.currsize)

    async def __call__(self, queries: Sequence[Question], deadline: float) -> np.ndarray:
        """Return (len(queries), d) vectors, in order. Queries that are not cached go to the encoder in one call."""
        vectors = {query: entry[1] for query in queries if (entry := self._vectors.get(query)) is not None}
        missing = [query for query in dict.fromkeys(queries) if query not in vectors]
        self.hits += len(queries) - len(missing)
        self.misses += len(missing)
        if missing:
            inputs = EncoderInputs([query.query for query in missing], [query.instruction for query in missing])
            embedded = await self._embed(inputs, deadline)
            for query, vector in zip(missing, embedded.vectors, strict=True):
                vectors[query] = vector.copy()  # a view would keep the vectors of the whole call
                with suppress(ValueError):  # larger than the cache
                    self._vectors[query] = query, vectors[query]
        return np.stack([vectors[query] for query in queries])


def _size(entry: tuple[Question, np.ndarray]) -> int:
    """Return the memory of an entry; a character takes up to four bytes."""
    query, vector = entry
    return vector.nbytes + 4 * (len(query.query) + len(query.instruction or "")) + ENTRY_BYTES
