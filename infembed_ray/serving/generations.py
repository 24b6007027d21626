"""A generation: one encoder and one version of the index, which answer together. No Ray.

What is served changes from one generation to the next in one step, and a request stays with the one it began with: so
no answer ever mixes the vectors of one model with the passages of another's index.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from infembed_ray.retrieval import filters
from infembed_ray.retrieval.changes import Change, ChangeLog, Delete, Put
from infembed_ray.retrieval.live import ShardAnswer, ShardQuery
from infembed_ray.retrieval.shards import merge, shard_of
from infembed_ray.serving import schema
from infembed_ray.serving.coalescing import Coalescer
from infembed_ray.serving.engine import Embedded, QueueFull
from infembed_ray.serving.redundancy import Redundancy
from infembed_ray.serving.service import Document, Found, Query, ReadOnly, ReplicaLost, Stuck

TOGETHER_CHARACTERS = 4_096
"""Of texts that travel to the encoder together: a batch or two of its engine. Were it all that waits, all of it would come
back at once, and the encoder idle until there is more. A request of more goes alone, so that short ones do not wait for it.
"""
ENCODER_CALLS = 4
"""Under way for each replica of the encoder: one or two are worked on, and the next are there when those are done."""
TOGETHER_QUERIES = 64
"""That travel to a shard together."""
SHARD_CALLS = 2
"""Under way for each replica of a shard."""
LOSS_TOLD_AT = 0.9
"""Of the longest time for an answer, a call ends: so that what was lost is told as that, and not as a time-out."""
PROBE_TIMEOUT_S = 2.0
FAULT_S = 1.0
"""Age of what is known of the shards' faults, after which a change of documents asks the shards again."""
PATIENCE_S = 2.0
"""Longest wait in a micro-batch queue, at most half of the request time-out; a longer one is rejected with 429."""
PARTIAL_PATIENCE_S = 1.0
"""How long a search that may be partial waits for shards when others have answered."""


class Blueprint(BaseModel):
    """What a generation is made of, in plain JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: str
    """Changes with anything that changes what is served, or how."""
    encoder: str
    """Serve application of the encoder."""
    index: str
    """Serve application of the index."""
    shards: tuple[str, ...]
    """Their deployments in it, in order."""
    changes: str
    """Directory of the index' change log."""
    card: schema.Model


class Inputs(NamedTuple):
    """Texts or token arrays of one request."""

    inputs: list[str] | list[list[int]]
    input_type: schema.InputType
    instruction: str | None


class Deployment(Protocol):
    """The replicas of a deployment: calls a method of one of them.

    Raises `ReplicaLost` if it is gone, `QueueFull` if all are full, else what the method raised.
    """

    def __call__(self, method: str, *arguments: Any) -> Awaitable[Any]: ...


class Generation:
    """Answers requests; all calls come from one event loop.

    Args:
        blueprint: what it is made of.
        encoder: has `embed_many(list[Inputs | list[Query]], timeout_s) -> list[Embedded | Exception]` and `ready()`.
        shards: each has `search_many(list[ShardQuery]) -> list[ShardAnswer | Exception]`, `document(id)` and `ready()`.
        timeout_s: longest time for an answer.
        encoder_replicas, shard_replicas: how many there are at most; of several, a lost or slow one is replaced by
            another.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        encoder: Deployment,
        shards: Sequence[Deployment],
        *,
        timeout_s: float,
        encoder_replicas: int = 1,
        shard_replicas: int = 1,
    ) -> None:
        self.blueprint = blueprint
        self._encoder = encoder
        self._shards = shards
        self._timeout_s = LOSS_TOLD_AT * timeout_s
        self._log = ChangeLog(Path(blueprint.changes), blueprint.card.metadata, blueprint.card.dimension)
        self._faults: list[str | None] = [None] * len(shards)
        self._faults_asked: asyncio.Future[None] | None = None
        self._faults_at = 0.0
        # A machine that is lost stays silent for seconds before Ray knows of it; calls to it would hold all others up.
        self._encoder_calls = Redundancy(_lost, hedged=encoder_replicas > 1, refused=_refused)
        self._embed = Coalescer(
            self._send_texts,
            calls=ENCODER_CALLS * encoder_replicas,
            most=TOGETHER_CHARACTERS,
            weigh=_characters,
            patience_s=min(PATIENCE_S, self._timeout_s / 2),
        )
        self._search = [
            Coalescer(
                partial(self._send_queries, shard, Redundancy(_lost, hedged=shard_replicas > 1)),
                calls=SHARD_CALLS * shard_replicas,
                most=TOGETHER_QUERIES,
                weigh=lambda query: len(query.vectors),
                patience_s=min(PATIENCE_S, self._timeout_s / 2),
            )
            for shard in shards
        ]

    @property
    def card(self) -> schema.Model:
        """The model and the index it is."""
        return self.blueprint.card

    async def embed(
        self, inputs: list[str] | list[list[int]], input_type: schema.InputType, instruction: str | None
    ) -> Embedded:
        """As `Service.embed`."""
        return await self._embed(Inputs(inputs, input_type, instruction), self._deadline())

    async def search(
        self, queries: Sequence[Query], top_k: int, filter: Mapping[str, Any] | None, allow_partial: bool
    ) -> Found:
        """As `Service.search`: all shards are asked at once and their hits merged."""
        filters.parse(filter, self.card.metadata)  # refused here, before anything is done
        start, deadline = time.perf_counter(), self._deadline()
        vectors = (await self._embed(list(queries), deadline)).vectors
        encoded = time.perf_counter()
        answers = await self._ask_shards(ShardQuery(vectors, top_k, filter), deadline, allow_partial)
        there = [answer for answer in answers if answer is not None]
        results = [merge(hits, top_k) for hits in zip(*(answer.hits for answer in there), strict=True)]
        return Found(
            results=[
                [schema.SearchHit(id=h.id, score=h.score, text=h.text, metadata=h.metadata) for h in hits]
                for hits in results
            ],
            model=self.card.id,
            index_version=self.card.index_version,
            sequence=min(answer.sequence for answer in there),
            timings=schema.Timings(
                encode_ms=round(1e3 * (encoded - start), 3),
                search_ms=round(1e3 * (time.perf_counter() - encoded), 3),
            ),
            missing_shards=[name for name, a in zip(self.blueprint.shards, answers, strict=True) if a is None],
        )

    async def put(self, documents: Sequence[Document]) -> int:
        """As `Service.put`."""
        await self._require_writable()
        embedded = await self._embed(Inputs([d.text for d in documents], "passage", None), self._deadline())
        return await self._append(
            Put(d.id, d.text, vector, d.metadata) for d, vector in zip(documents, embedded.vectors, strict=True)
        )

    async def delete(self, ids: Sequence[str]) -> int:
        """As `Service.delete`."""
        await self._require_writable()
        return await self._append(map(Delete, ids))

    async def document(self, id: str) -> Document | None:
        """As `Service.document`."""
        shard = self._shards[shard_of(id, len(self._shards))]
        found: Document | None = await Redundancy(_lost)(lambda: shard("document", id), self._timeout_s)
        return found

    async def ready(self) -> bool:
        """Do the encoder and every shard answer?"""
        probes = asyncio.gather(*(deployment("ready") for deployment in (self._encoder, *self._shards)))
        try:
            await asyncio.wait_for(probes, PROBE_TIMEOUT_S)
        except (asyncio.TimeoutError, ReplicaLost):
            return False
        return True

    async def fault(self) -> str | None:
        """As `Service.fault`. A shard that does not answer keeps the fault that it reported last."""
        if self._faults_asked is None or (self._faults_asked.done() and _now() >= self._faults_at + FAULT_S):
            self._faults_asked = asyncio.ensure_future(self._ask_faults())
        await asyncio.shield(self._faults_asked)  # shared: a caller that leaves cancels it for no other
        known = zip(self.blueprint.shards, self._faults, strict=True)
        return next((f"{shard}: {fault}" for shard, fault in known if fault), None)

    async def _ask_faults(self) -> None:
        await asyncio.gather(*map(self._ask_fault, range(len(self._shards))))
        self._faults_at = _now()

    async def _ask_fault(self, number: int) -> None:
        with contextlib.suppress(Exception):  # lost, full, or of a release that cannot tell: /readyz still answers
            self._faults[number] = await asyncio.wait_for(self._shards[number]("fault"), PROBE_TIMEOUT_S)

    async def _require_writable(self) -> None:
        if not self.card.writable:
            raise ReadOnly
        if fault := await self.fault():
            raise Stuck(fault)

    async def _append(self, changes: Iterable[Change]) -> int:
        # In a thread: it waits for the disk.
        return await asyncio.get_running_loop().run_in_executor(None, self._log.append, list(changes))

    def _deadline(self) -> float:
        """Of a request that comes now, by the event loop's time."""
        return _now() + self._timeout_s

    async def _send_texts(
        self, items: Sequence[Inputs | list[Query]], deadline: float
    ) -> Sequence[Embedded | Exception]:
        return await self._encoder_calls(lambda: self._encoder("embed_many", items, _until(deadline)), _until(deadline))

    async def _send_queries(
        self, shard: Deployment, calls: Redundancy, items: Sequence[ShardQuery], deadline: float
    ) -> Sequence[ShardAnswer | Exception]:
        return await calls(lambda: shard("search_many", items), _until(deadline))

    async def _ask_shards(self, query: ShardQuery, deadline: float, allow_partial: bool) -> list[ShardAnswer | None]:
        """The answer of every shard; None for one that has none, if that is allowed and another has."""
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
    """The event loop's time."""
    return asyncio.get_running_loop().time()


def _until(deadline: float) -> float:
    """Seconds."""
    return deadline - _now()


def _succeeded(task: asyncio.Future[ShardAnswer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _lost(error: BaseException) -> bool:
    return isinstance(error, ReplicaLost)


def _refused(answers: Iterable[Embedded | Exception]) -> bool:
    return any(isinstance(answer, QueueFull) for answer in answers)


def _characters(item: Inputs | list[Query]) -> int:
    if isinstance(item, Inputs):
        return sum(map(len, item.inputs))
    return sum(len(query.text) + len(query.instruction or "") for query in item)
