"""Blue/green releases: one encoder and one version of the index of each collection, which answer together. No Ray.

The API switches all collections from one release to the next in one step, and a request stays with the release it began with. So no
answer mixes the vectors of one model with the passages of another model's index.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from infembed_ray.config.serving import RankingSettings
from infembed_ray.retrieval import filters
from infembed_ray.retrieval.answers import ShardQuery
from infembed_ray.retrieval.shards import shard_of
from infembed_ray.retrieval.updates.write_ahead_log import Change, ChangeLog, Delete, LogFault, Put
from infembed_ray.serving import explaining, schema
from infembed_ray.serving.encoder.batching import Embedded
from infembed_ray.serving.release import CollectionSpec
from infembed_ray.serving.routing.channels import Channels
from infembed_ray.serving.routing.encoder_calls import DEADLINE_SHARE, EncoderCalls, EncoderInputs
from infembed_ray.serving.routing.fan_out import Deployment, FanOut, now
from infembed_ray.serving.routing.reranking import Reranked, RerankStage
from infembed_ray.serving.routing.retries import RetriedCalls
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
from infembed_ray.storage.places import place_of

PROBE_TIMEOUT_S = 2.0
STATE_MAX_AGE_S = 1.0
"""Age after which a change of documents asks the shards for their states again."""
NO_CHANNELS = RankingSettings()
ALMOST_FULL = 0.5
"""Share of `max_changed_documents` from which a warning is logged."""

log = logging.getLogger(__name__)


class Release:
    """A `service.Service` of one collection: one encoder and one index version. All calls come from one event loop.

    Args:
        spec: its parts.
        encoder: may be shared with the releases of other collections.
        shards: as `FanOut` takes them; each has besides `document(id)`, `state() -> ShardState` and `ready()`.
        metrics: has `metrics() -> bytes`.
        timeout_s: request time-out.
        shard_replicas: largest number of replicas.
        max_changed_documents: documents that may differ from the index version per shard.
        ranking: how searches that do not say are scored; without `hybrid` if the index has no words.
        reranker: re-orders the first hits; None: there is none.

    Attributes:
        reranker: as above.
    """

    def __init__(
        self,
        spec: CollectionSpec,
        encoder: EncoderCalls,
        shards: Sequence[Deployment],
        metrics: Deployment,
        *,
        timeout_s: float,
        shard_replicas: int = 1,
        max_changed_documents: int = 50_000,
        ranking: RankingSettings = NO_CHANNELS,
        reranker: RerankStage | None = None,
    ) -> None:
        self.spec = spec
        self.reranker = reranker
        self._encoder = encoder
        # The settings are the API's, and a roll-back may lead to an index without words.
        self._ranking = ranking if spec.card.lexical else ranking.model_copy(update={"hybrid": 0.0})
        self._shards = shards
        self._metrics = metrics
        self._timeout_s = DEADLINE_SHARE * timeout_s
        self._log = spec.changes and ChangeLog(
            place_of(spec.changes), spec.card.metadata, spec.card.dimension, len(shards)
        )
        self._max_changed = max_changed_documents * len(shards)
        self._warned = False
        self._states = [ShardState()] * len(shards)
        self._state_query: asyncio.Future[None] | None = None
        self._states_known_at = 0.0
        self._fan_out = FanOut(dict(zip(spec.shards, shards, strict=True)), replicas=shard_replicas)

    @property
    def card(self) -> schema.Model:
        """The served model and index."""
        return self.spec.card

    async def embed(
        self, inputs: list[str] | list[list[int]], input_type: schema.InputType, instruction: str | None
    ) -> Embedded:
        """As `Service.embed`."""
        embedded = await self._encoder.embed(EncoderInputs(inputs, input_type, instruction), self._deadline())
        return embedded

    async def search(self, search: Search) -> Found:
        """As `Service.search`: asks all shards at once and merges their hits."""
        filters.parse(search.filter, self.card.metadata)  # raises before any work is done
        start, deadline = time.perf_counter(), self._deadline()
        channels = Channels.of(search, self._ranking)
        asked = Channels.of(_leave_one_out(search), self._ranking) if search.explain else channels
        vectors = asked.vectors(await self._encoder.query_cache(asked.texts, deadline))
        encoded = time.perf_counter()
        reranker = self.reranker if self.reranker and self.reranker.asked(search.rerank) else None
        depth = max(search.top_k, reranker.settings.depth) if reranker else search.top_k
        own = vectors[: len(search.queries)]
        query = channels.query(ShardQuery(own, depth, search.filter, search.min_sequence))
        ranked = await self._fan_out.search(query, deadline, search.allow_partial, channels.hybrid)
        searched = time.perf_counter()
        reranked = Reranked(ranked.results, None, 0.0)
        if reranker:
            reranked = await reranker(search.queries, ranked.results, deadline)
        found = Found(
            results=[hits[: search.top_k] for hits in reranked.results],
            model=self.card.id,
            index_version=self.card.index_version,
            sequence=ranked.sequence,
            timings=schema.Timings(
                encode_ms=round(1e3 * (encoded - start), 3),
                search_ms=round(1e3 * (searched - encoded), 3),
                rerank_ms=round(reranked.ms, 3) if reranker else None,
            ),
            missing_shards=ranked.missing,
            notes=[reranked.note] if reranked.note else [],
        )
        if search.explain:
            found = await self._explained(search, found, vectors, deadline)
        return found

    async def _explained(self, search: Search, found: Found, vectors: np.ndarray, deadline: float) -> Found:
        """Add the explanation of its hits to the answer to one query.

        Args:
            vectors: (2 + phrases, d), of the queries of `_leave_one_out`.
        """
        (hits,), (query,) = found.results, search.queries
        plain = await self.search(
            replace(search, queries=[Query(query.text)], top_k=explaining.EXPLAINED_DEPTH, explain=False)
        )
        ids, plain_ids = [hit.id for hit in hits], [hit.id for hit in plain.results[0]]
        wanted = explaining.explained_ids(ids, plain_ids, search.top_k)
        scores = await self._fan_out.scores(wanted, vectors, deadline, search.allow_partial)
        phrases = explaining.phrases_of(query.instruction or "")
        explanation = explaining.explanation(phrases, ids, plain_ids, search.top_k, scores)
        notes = list(found.notes)
        if plain.missing_shards:
            notes.append(f"explain: ranks without the instruction leave out {', '.join(plain.missing_shards)}.")
        if lost := len(wanted) - len(scores):
            notes.append(f"explain: passages that changed meanwhile or whose shard did not answer: {lost}.")
        return found._replace(explanation=explanation, notes=notes)

    async def put(self, documents: Sequence[Document]) -> int:
        """As `Service.put`."""
        await self._require_writable()
        self._require_room()
        embedded = await self._encoder.embed(
            EncoderInputs([d.text for d in documents], "passage", None), self._deadline()
        )
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
        found: Document | None = await RetriedCalls()(lambda: shard("document", id), self._timeout_s)
        return found

    async def ready(self, with_reranker: bool = False) -> bool:
        """Return whether the encoder and every shard answer, and the reranker if asked for: searches do without it."""
        stages = [self.reranker.ready()] if with_reranker and self.reranker else []
        probes = asyncio.gather(self._encoder.ready(), *(shard("ready") for shard in self._shards), *stages)
        try:
            return all(await asyncio.wait_for(probes, PROBE_TIMEOUT_S))
        except (asyncio.TimeoutError, ReplicaLost):
            return False

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
        page: bytes = await self._metrics("metrics")
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
        """Raise TooManyChanges if the limit of changed documents is reached. Puts within a second can exceed it."""
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
            sequence: int = await RetriedCalls()(lambda: store("change", changes), self._timeout_s)
            return sequence
        try:  # in a thread, because it waits for the disk
            return await asyncio.get_running_loop().run_in_executor(None, self._log.append, changes)
        except LogFault as fault:
            log.error("%s", fault)
            raise Stuck(fault.without_directory) from fault

    def _deadline(self) -> float:
        """Return the deadline of a request that arrives now, by the event loop's time."""
        return now() + self._timeout_s


def _leave_one_out(search: Search) -> Search:
    """The search of its only query under the instructions whose scores explain its ranking, its own first."""
    (query,) = search.queries
    instruction = query.instruction or ""
    instructions = explaining.variants(instruction, explaining.phrases_of(instruction))
    return replace(search, queries=[Query(query.text, each) for each in instructions])
