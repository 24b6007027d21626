"""Calls of the ingress to one encoder: micro-batched, hedged, and with a query cache. No Ray.

The releases of all collections that one encoder serves share them. Vectors depend on the encoder alone, so a query that was
encoded for one collection need not be encoded again for another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from infembed_ray.serving import schema
from infembed_ray.serving.encoder.batching import Embedded, QueueFull
from infembed_ray.serving.routing.fan_out import Deployment, is_lost, now
from infembed_ray.serving.routing.hedging import HedgedCalls
from infembed_ray.serving.routing.micro_batching import MicroBatcher
from infembed_ray.serving.routing.query_cache import QueryCache
from infembed_ray.serving.service import Query

MAX_BATCH_CHARACTERS = 4_096
"""Characters of the texts in one call to the encoder: one or two batches of its engine. Larger calls would return all their
answers at once and leave the encoder idle. A larger request gets a call of its own, so that short ones do not wait for it.
"""
CALLS_PER_ENCODER = 4
"""Calls in flight per encoder replica: it works on one or two, and the next are there when those are done."""
DEADLINE_SHARE = 0.9
"""Calls end at this share of the request time-out, so that the loss of a replica is reported as such (503, not 504)."""
MAX_WAIT_S = 2.0
"""Longest wait in a micro-batch queue, at most half of the request time-out; a longer one is rejected with 429."""


class Inputs(NamedTuple):
    """Texts or token arrays of one request."""

    inputs: list[str] | list[list[int]]
    input_type: schema.InputType
    instruction: str | None


class EncoderCalls:
    """Calls to an encoder. All of them come from one event loop.

    Args:
        encoder: has `embed_many(list[Inputs | list[Query]], timeout_s) -> list[Embedded | Exception]` and `ready()`.
        timeout_s: request time-out.
        replicas: largest number of replicas; with two or more, slow calls are hedged.
        query_cache_bytes: size of the query cache; 0: none.

    Attributes:
        embed: embeds the inputs of a request by a deadline (the event loop's time).
        query_cache: embeds queries by a deadline, and keeps the vectors of recent ones.
    """

    def __init__(self, encoder: Deployment, *, timeout_s: float, replicas: int = 1, query_cache_bytes: int = 0) -> None:
        self._encoder = encoder
        # A lost machine stays silent for seconds before Ray notices it; hedged calls do not wait for it.
        self._calls = HedgedCalls(is_lost, hedged=replicas > 1, rejected=_has_rejection)
        self.embed = MicroBatcher(
            self._call,
            max_calls=CALLS_PER_ENCODER * replicas,
            max_weight=MAX_BATCH_CHARACTERS,
            weigh=_characters,
            max_wait_s=min(MAX_WAIT_S, DEADLINE_SHARE * timeout_s / 2),
        )
        self.query_cache = QueryCache(self.embed, query_cache_bytes)

    async def ready(self) -> bool:
        """Return whether the encoder answers; ReplicaLost if it has no replica."""
        return bool(await self._encoder("ready"))

    async def _call(self, items: Sequence[Inputs | list[Query]], deadline: float) -> Sequence[Embedded | Exception]:
        return await self._calls(lambda: self._encoder("embed_many", items, deadline - now()), deadline - now())


def _has_rejection(answers: Iterable[Embedded | Exception]) -> bool:
    return any(isinstance(answer, QueueFull) for answer in answers)


def _characters(item: Inputs | list[Query]) -> int:
    if isinstance(item, Inputs):
        return sum(map(len, item.inputs))
    return sum(len(query.text) + len(query.instruction or "") for query in item)
