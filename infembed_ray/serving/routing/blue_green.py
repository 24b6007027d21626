"""Blue/green releases: one encoder and one version of the index, which answer together. No Ray.

The API switches from one release to the next in one step, and a request stays with the release it began with. So no
answer mixes the vectors of one model with the passages of another model's index.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from infembed_ray.config.serving import RankingSettings
from infembed_ray.places import place_of
from infembed_ray.retrieval import filters
from infembed_ray.retrieval.answers import ShardQuery
from infembed_ray.retrieval.shards import shard_of
from infembed_ray.retrieval.updates.write_ahead_log import Change, ChangeLog, Delete, LogFault, Put
from infembed_ray.serving import schema, tracing
from infembed_ray.serving.encoder.batching import Embedded, QueueFull
from infembed_ray.serving.routing.channels import Channels
from infembed_ray.serving.routing.fan_out import Deployment, FanOut, is_lost, now
from infembed_ray.serving.routing.hedging import HedgedCalls
from infembed_ray.serving.routing.micro_batching import MicroBatcher
from infembed_ray.serving.routing.outcomes import Outcomes
from infembed_ray.serving.routing.query_cache import QueryCache
from infembed_ray.serving.service import (
    Document,
    Found,
    Query,
    ReadOnly,
    ReplicaLost,
    Search,
    ShardState,
    Stuck,
    TooManyChanges,
)

MAX_BATCH_CHARACTERS = 4_096
"""Characters of the texts in one call to the encoder: one or two batches of its engine. Larger calls would return all their
answers at once and leave the encoder idle. A larger request gets a call of its own, so that short ones do not wait for it.
"""
CALLS_PER_ENCODER = 4
"""Calls in flight per encoder replica: it works on one or two, and the next are there when those are done."""
DEADLINE_SHARE = 0.9
"""Calls end at this share of the request time-out, so that the loss of a replica is reported as such (503, not 504)."""
PROBE_TIMEOUT_S = 2.0
STATE_MAX_AGE_S = 1.0
"""Age after which a change of documents asks the shards for their states again."""
MAX_WAIT_S = 2.0
"""Longest wait in a micro-batch queue, at most half of the request time-out; a longer one is rejected with 429."""
NO_CHANNELS = RankingSettings()
ALMOST_FULL = 0.5
"""Share of `max_changed_documents` from which a warning is logged."""

log = logging.getLogger(__name__)


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
    """Another release that answers a share of the searches."""


class Canary(BaseModel):
    """A new release that answers a share of the searches before the API is switched to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: ReleaseSpec
    share: float
    until: float
    """Unix time from which the current release answers all searches again, whatever became of the driver."""


class Inputs(NamedTuple):
    """Texts or token arrays of one request."""

    inputs: list[str] | list[list[int]]
    input_type: schema.InputType
    instruction: str | None


class Release:
    """A `service.Service` from one encoder and one index version. All calls come from one event loop.

    Args:
        spec: its parts.
        encoder: has `embed_many(list[Inputs | list[Query]], timeout_s) -> list[Embedded | Exception]` and `ready()`.
        shards: as `FanOut` takes them; each has besides `document(id)`, `state() -> ShardState` and `ready()`.
        metrics: has `page() -> bytes`.
        timeout_s: request time-out.
        encoder_replicas, shard_replicas: largest number of replicas; with two or more, slow calls are hedged.
        query_cache_bytes: size of the query cache; 0: none.
        max_changed_documents: documents that may differ from the index version per shard; None: any number.
        ranking: how searches that do not say are scored; without `hybrid` if the index has no words.
        outcomes: counts the searches.

    Attributes:
        query_cache: vectors of recent searches.
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
        query_cache_bytes: int = 0,
        max_changed_documents: int | None = None,
        ranking: RankingSettings = NO_CHANNELS,
        outcomes: Outcomes | None = None,
    ) -> None:
        self.spec = spec
        self._counted = partial(outcomes.counted, spec.fingerprint) if outcomes else contextlib.nullcontext
        self._encoder = encoder
        # A release that a canary or a roll-back serves beside the new one may have no words.
        self._ranking = ranking if spec.card.lexical else ranking.model_copy(update={"hybrid": 0.0})
        self._shards = shards
        self._metrics = metrics
        self._timeout_s = DEADLINE_SHARE * timeout_s
        self._log = spec.changes and ChangeLog(
            place_of(spec.changes), spec.card.metadata, spec.card.dimension, len(shards)
        )
        self._max_changed = None if max_changed_documents is None else max_changed_documents * len(shards)
        self._warned = False
        self._states = [ShardState()] * len(shards)
        self._state_query: asyncio.Future[None] | None = None
        self._states_known_at = 0.0
        # A lost machine stays silent for seconds before Ray notices it; hedged calls do not wait for it.
        self._encoder_calls = HedgedCalls(is_lost, hedged=encoder_replicas > 1, rejected=_has_rejection)
        self._embed = MicroBatcher(
            self._call_encoder,
            max_calls=CALLS_PER_ENCODER * encoder_replicas,
            max_weight=MAX_BATCH_CHARACTERS,
            weigh=_characters,
            max_wait_s=min(MAX_WAIT_S, self._timeout_s / 2),
        )
        self.query_cache = QueryCache(self._embed, query_cache_bytes)
        self._fan_out = FanOut(
            dict(zip(spec.shards, shards, strict=True)),
            replicas=shard_replicas,
            max_wait_s=min(MAX_WAIT_S, self._timeout_s / 2),
        )

    @property
    def card(self) -> schema.Model:
        """The served model and index."""
        return self.spec.card

    async def embed(
        self, inputs: list[str] | list[list[int]], input_type: schema.InputType, instruction: str | None
    ) -> Embedded:
        """As `Service.embed`."""
        with tracing.span("encode", texts=len(inputs)):
            embedded = await self._embed(Inputs(inputs, input_type, instruction), self._deadline())
            tracing.note(tokens=embedded.tokens)
            return embedded

    async def search(self, search: Search) -> Found:
        """As `Service.search`: asks all shards at once and merges their hits."""
        with self._counted():
            filters.parse(search.filter, self.card.metadata)  # raises before any work is done
            start, deadline = time.perf_counter(), self._deadline()
            channels = Channels.of(search, self._ranking)
            with tracing.span("encode", queries=len(search.queries)):
                vectors = channels.vectors(await self.query_cache(channels.texts, deadline))
            encoded = time.perf_counter()
            query = channels.query(ShardQuery(vectors, search.top_k, search.filter, search.min_sequence))
            ranked = await self._fan_out.search(query, deadline, search.allow_partial, channels.hybrid)
            return Found(
                results=ranked.results,
                model=self.card.id,
                index_version=self.card.index_version,
                sequence=ranked.sequence,
                timings=schema.Timings(
                    encode_ms=round(1e3 * (encoded - start), 3),
                    search_ms=round(1e3 * (time.perf_counter() - encoded), 3),
                ),
                missing_shards=ranked.missing,
            )

    async def put(self, documents: Sequence[Document]) -> int:
        """As `Service.put`."""
        await self._require_writable()
        self._require_room()
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
        found: Document | None = await HedgedCalls(is_lost)(lambda: shard("document", id), self._timeout_s)
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
        await self._know_states()
        known = zip(self.spec.shards, self._states, strict=True)
        return next((f"{shard}: {state.fault}" for shard, state in known if state.fault), None)

    async def changed_documents(self) -> float:
        """Documents that differ from the index version, on average per shard."""
        await self._know_states()
        return self._changed / len(self._shards)

    async def metrics(self) -> bytes:
        """As `Service.metrics`."""
        page: bytes = await self._metrics("page")
        return page

    @property
    def _changed(self) -> int:
        return sum(state.changed for state in self._states)

    async def _know_states(self) -> None:
        """Ask the shards for their states, unless they are known. A shard that does not answer keeps its last state."""
        if self._state_query is None or (self._state_query.done() and now() >= self._states_known_at + STATE_MAX_AGE_S):
            self._state_query = asyncio.ensure_future(self._ask_states())
        await asyncio.shield(self._state_query)  # shared: a cancelled caller must not cancel it for the others

    async def _ask_states(self) -> None:
        await asyncio.gather(*map(self._ask_state, range(len(self._shards))))
        self._states_known_at = now()

    async def _ask_state(self, number: int) -> None:
        with contextlib.suppress(Exception):  # lost or full: /readyz still answers
            self._states[number] = await asyncio.wait_for(self._shards[number]("state"), PROBE_TIMEOUT_S)

    async def _require_writable(self) -> None:
        if not self.card.writable:
            raise ReadOnly
        if fault := await self.fault():
            raise Stuck(fault)

    def _require_room(self) -> None:
        """Raise TooManyChanges if as many documents differ from the index version as may. Puts of a second can exceed that."""
        if self._max_changed is None:
            return
        if self._changed >= self._max_changed:
            raise TooManyChanges(self._changed, self._max_changed)
        if self._changed > ALMOST_FULL * self._max_changed and not self._warned:
            self._warned = True
            log.warning(
                "%d documents differ from index version %s, and from %d on documents are refused: compact the index",
                *(self._changed, self.card.index_version, self._max_changed),
            )

    async def _append(self, changes: Sequence[Change]) -> int:
        if not self._log:
            (store,) = self._shards
            sequence: int = await HedgedCalls(is_lost)(lambda: store("change", changes), self._timeout_s)
            return sequence
        try:  # in a thread, because it waits for the disk
            return await asyncio.get_running_loop().run_in_executor(None, self._log.append, changes)
        except LogFault as fault:
            log.error("%s", fault)
            # Clients read the reason, so it must not name the directory.
            raise Stuck(str(fault).removeprefix(f"changes={self._log.directory}: ")) from fault

    def _deadline(self) -> float:
        """Return the deadline of a request that arrives now, by the event loop's time."""
        return now() + self._timeout_s

    async def _call_encoder(
        self, items: Sequence[Inputs | list[Query]], deadline: float
    ) -> Sequence[Embedded | Exception]:
        return await self._encoder_calls(lambda: self._encoder("embed_many", items, deadline - now()), deadline - now())


def _has_rejection(answers: Iterable[Embedded | Exception]) -> bool:
    return any(isinstance(answer, QueueFull) for answer in answers)


def _characters(item: Inputs | list[Query]) -> int:
    if isinstance(item, Inputs):
        return sum(map(len, item.inputs))
    return sum(len(query.text) + len(query.instruction or "") for query in item)
