"""Blue/green releases: one encoder and one version of the index, which answer together. No Ray.

The API switches from one release to the next in one step, and a request stays with the release it began with. So no
answer mixes the vectors of one model with the passages of another model's index.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from infembed_ray.places import place_of
from infembed_ray.retrieval import filters
from infembed_ray.retrieval.shards import merge, shard_of
from infembed_ray.retrieval.updates.live_shard import ShardAnswer, ShardQuery
from infembed_ray.retrieval.updates.write_ahead_log import Change, ChangeLog, Delete, Put
from infembed_ray.serving import schema
from infembed_ray.serving.encoder.batching import Embedded, QueueFull
from infembed_ray.serving.routing.hedging import HedgedCalls
from infembed_ray.serving.routing.micro_batching import MicroBatcher
from infembed_ray.serving.routing.outcomes import Outcomes
from infembed_ray.serving.service import Document, Found, Query, ReadOnly, ReplicaLost, Stuck

MAX_BATCH_CHARACTERS = 4_096
"""Characters of the texts in one call to the encoder: one or two batches of its engine. Larger calls would return all their
answers at once and leave the encoder idle. A larger request gets a call of its own, so that short ones do not wait for it.
"""
CALLS_PER_ENCODER = 4
"""Calls in flight per encoder replica: it works on one or two, and the next are there when those are done."""
MAX_BATCH_QUERIES = 64
"""Queries in one call to a shard."""
CALLS_PER_SHARD = 2
"""Calls in flight per replica of a shard."""
DEADLINE_SHARE = 0.9
"""Calls end at this share of the request time-out, so that the loss of a replica is reported as such (503, not 504)."""
PROBE_TIMEOUT_S = 2.0
FAULT_MAX_AGE_S = 1.0
"""Age after which a change of documents asks the shards for their faults again."""
MAX_WAIT_S = 2.0
"""Longest wait in a micro-batch queue, at most half of the request time-out; a longer one is rejected with 429."""
PARTIAL_PATIENCE_S = 1.0
"""How long a search that may be partial waits for the other shards after the first has answered."""


class ReleaseSpec(BaseModel):
    """The parts of a release, in plain JSON: the `user_config` of the ingress."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: str
    """Changes with anything that changes what is served, or how."""
    encoder: str
    """Serve application of the encoder."""
    index: str
    """Serve application of the index."""
    shards: tuple[str, ...]
    """Deployments of the shards in that application, in order."""
    changes: str | None
    """Directory of the index's write-ahead log; None: the only shard takes changes itself, as an external engine does."""
    card: schema.Model

    canary: Canary | None = None
    """Another release that answers a share of the queries."""


class Canary(BaseModel):
    """A new release that answers a share of the queries before the API is switched to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: ReleaseSpec
    share: float
    until: float
    """Unix time from which the current release answers all queries again, whatever became of the driver."""


class Inputs(NamedTuple):
    """Texts or token arrays of one request."""

    inputs: list[str] | list[list[int]]
    input_type: schema.InputType
    instruction: str | None


class Deployment(Protocol):
    """Calls a method of one of a deployment's replicas.

    Raises `ReplicaLost` if the replica is lost, `QueueFull` if all replicas are full, else what the method raised.
    """

    def __call__(self, method: str, *arguments: Any) -> Awaitable[Any]: ...


class Release:
    """A `service.Service` from one encoder and one index version. All calls come from one event loop.

    Args:
        spec: its parts.
        encoder: has `embed_many(list[Inputs | list[Query]], timeout_s) -> list[Embedded | Exception]` and `ready()`.
        shards: each has `search_many(list[ShardQuery]) -> list[ShardAnswer | Exception]`, `document(id)` and `ready()`.
        metrics: has `page() -> bytes`.
        timeout_s: request time-out.
        encoder_replicas, shard_replicas: largest number of replicas; with two or more, slow calls are hedged.
        outcomes: counts the queries.
    """

    def __init__(
        self,
        spec: ReleaseSpec,
        encoder: Deployment,
        shards: Sequence[Deployment],
        metrics: Deployment,
        *,
        timeout_s: float,
        encoder_replicas: int = 1,
        shard_replicas: int = 1,
        outcomes: Outcomes | None = None,
    ) -> None:
        self.spec = spec
        self._counted = partial(outcomes.counted, spec.fingerprint) if outcomes else contextlib.nullcontext
        self._encoder = encoder
        self._shards = shards
        self._metrics = metrics
        self._timeout_s = DEADLINE_SHARE * timeout_s
        self._log = spec.changes and ChangeLog(place_of(spec.changes), spec.card.metadata, spec.card.dimension)
        self._faults: list[str | None] = [None] * len(shards)
        self._fault_query: asyncio.Future[None] | None = None
        self._faults_known_at = 0.0
        # A lost machine stays silent for seconds before Ray notices it; hedged calls do not wait for it.
        self._encoder_calls = HedgedCalls(_is_lost, hedged=encoder_replicas > 1, rejected=_has_rejection)
        self._embed = MicroBatcher(
            self._call_encoder,
            max_calls=CALLS_PER_ENCODER * encoder_replicas,
            max_weight=MAX_BATCH_CHARACTERS,
            weigh=_characters,
            max_wait_s=min(MAX_WAIT_S, self._timeout_s / 2),
        )
        self._search = [
            MicroBatcher(
                partial(self._call_shard, shard, HedgedCalls(_is_lost, hedged=shard_replicas > 1)),
                max_calls=CALLS_PER_SHARD * shard_replicas,
                max_weight=MAX_BATCH_QUERIES,
                weigh=lambda query: len(query.vectors),
                max_wait_s=min(MAX_WAIT_S, self._timeout_s / 2),
            )
            for shard in shards
        ]

    @property
    def card(self) -> schema.Model:
        """The served model and index."""
        return self.spec.card

    async def embed(
        self, inputs: list[str] | list[list[int]], input_type: schema.InputType, instruction: str | None
    ) -> Embedded:
        """As `Service.embed`."""
        with self._counted():
            return await self._embed(Inputs(inputs, input_type, instruction), self._deadline())

    async def search(
        self, queries: Sequence[Query], top_k: int, filter: Mapping[str, Any] | None, allow_partial: bool
    ) -> Found:
        """As `Service.search`: asks all shards at once and merges their hits."""
        with self._counted():
            return await self._searched(queries, top_k, filter, allow_partial)

    async def _searched(
        self, queries: Sequence[Query], top_k: int, filter: Mapping[str, Any] | None, allow_partial: bool
    ) -> Found:
        filters.parse(filter, self.card.metadata)  # raises before any work is done
        start, deadline = time.perf_counter(), self._deadline()
        vectors = (await self._embed(list(queries), deadline)).vectors
        encoded = time.perf_counter()
        answers = await self._ask_shards(ShardQuery(vectors, top_k, filter), deadline, allow_partial)
        present = [answer for answer in answers if answer is not None]
        results = [merge(hits, top_k) for hits in zip(*(answer.hits for answer in present), strict=True)]
        return Found(
            results=[
                [schema.SearchHit(id=h.id, score=h.score, text=h.text, metadata=h.metadata) for h in hits]
                for hits in results
            ],
            model=self.card.id,
            index_version=self.card.index_version,
            sequence=min(answer.sequence for answer in present),
            timings=schema.Timings(
                encode_ms=round(1e3 * (encoded - start), 3),
                search_ms=round(1e3 * (time.perf_counter() - encoded), 3),
            ),
            missing_shards=[name for name, a in zip(self.spec.shards, answers, strict=True) if a is None],
        )

    async def put(self, documents: Sequence[Document]) -> int:
        """As `Service.put`."""
        await self._require_writable()
        embedded = await self._embed(Inputs([d.text for d in documents], "passage", None), self._deadline())
        return await self._append(
            [Put(d.id, d.text, vector, d.metadata) for d, vector in zip(documents, embedded.vectors, strict=True)]
        )

    async def delete(self, ids: Sequence[str]) -> int:
        """As `Service.delete`."""
        await self._require_writable()
        return await self._append(list(map(Delete, ids)))

    async def document(self, id: str) -> Document | None:
        """As `Service.document`."""
        shard = self._shards[shard_of(id, len(self._shards))]
        found: Document | None = await HedgedCalls(_is_lost)(lambda: shard("document", id), self._timeout_s)
        return found

    async def ready(self) -> bool:
        """Return whether the encoder and every shard answer."""
        probes = asyncio.gather(*(deployment("ready") for deployment in (self._encoder, *self._shards)))
        try:
            await asyncio.wait_for(probes, PROBE_TIMEOUT_S)
        except (asyncio.TimeoutError, ReplicaLost):
            return False
        return True

    async def fault(self) -> str | None:
        """As `Service.fault`. A shard that does not answer keeps the fault that it reported last."""
        if self._fault_query is None or (
            self._fault_query.done() and _now() >= self._faults_known_at + FAULT_MAX_AGE_S
        ):
            self._fault_query = asyncio.ensure_future(self._ask_faults())
        await asyncio.shield(self._fault_query)  # shared: a cancelled caller must not cancel it for the others
        known = zip(self.spec.shards, self._faults, strict=True)
        return next((f"{shard}: {fault}" for shard, fault in known if fault), None)

    async def metrics(self) -> bytes:
        """As `Service.metrics`."""
        page: bytes = await self._metrics("page")
        return page

    async def _ask_faults(self) -> None:
        await asyncio.gather(*map(self._ask_fault, range(len(self._shards))))
        self._faults_known_at = _now()

    async def _ask_fault(self, number: int) -> None:
        with contextlib.suppress(Exception):  # lost, full, or an older version without `fault`: /readyz still answers
            self._faults[number] = await asyncio.wait_for(self._shards[number]("fault"), PROBE_TIMEOUT_S)

    async def _require_writable(self) -> None:
        if not self.card.writable:
            raise ReadOnly
        if fault := await self.fault():
            raise Stuck(fault)

    async def _append(self, changes: Sequence[Change]) -> int:
        if not self._log:
            (store,) = self._shards
            sequence: int = await HedgedCalls(_is_lost)(lambda: store("change", changes), self._timeout_s)
            return sequence
        # In a thread, because it waits for the disk.
        return await asyncio.get_running_loop().run_in_executor(None, self._log.append, changes)

    def _deadline(self) -> float:
        """Return the deadline of a request that arrives now, by the event loop's time."""
        return _now() + self._timeout_s

    async def _call_encoder(
        self, items: Sequence[Inputs | list[Query]], deadline: float
    ) -> Sequence[Embedded | Exception]:
        return await self._encoder_calls(
            lambda: self._encoder("embed_many", items, _seconds_to(deadline)), _seconds_to(deadline)
        )

    async def _call_shard(
        self, shard: Deployment, calls: HedgedCalls, items: Sequence[ShardQuery], deadline: float
    ) -> Sequence[ShardAnswer | Exception]:
        return await calls(lambda: shard("search_many", items), _seconds_to(deadline))

    async def _ask_shards(self, query: ShardQuery, deadline: float, allow_partial: bool) -> list[ShardAnswer | None]:
        """Return the answer of every shard; None for a missing one, if partial answers are allowed and another answered."""
        if not allow_partial:
            return list(await asyncio.gather(*(ask(query, deadline) for ask in self._search)))
        tasks = [asyncio.ensure_future(ask(query, deadline)) for ask in self._search]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(tasks, timeout=PARTIAL_PATIENCE_S)
            if not any(map(_succeeded, tasks)):
                await asyncio.gather(*tasks)
            return [task.result() if _succeeded(task) else None for task in tasks]
        finally:
            for task in tasks:
                task.cancel()


def _now() -> float:
    """Return the event loop's time."""
    return asyncio.get_running_loop().time()


def _seconds_to(deadline: float) -> float:
    return deadline - _now()


def _succeeded(task: asyncio.Future[ShardAnswer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _is_lost(error: BaseException) -> bool:
    return isinstance(error, ReplicaLost)


def _has_rejection(answers: Iterable[Embedded | Exception]) -> bool:
    return any(isinstance(answer, QueueFull) for answer in answers)


def _characters(item: Inputs | list[Query]) -> int:
    if isinstance(item, Inputs):
        return sum(map(len, item.inputs))
    return sum(len(query.text) + len(query.instruction or "") for query in item)
