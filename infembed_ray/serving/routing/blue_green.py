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

from infembed_ray.config.serving import ServeSettings
from infembed_ray.modeling.exclusions import split
from infembed_ray.modeling.formats import Question
from infembed_ray.retrieval.answers import ShardQuery
from infembed_ray.retrieval.shards import shard_of
from infembed_ray.retrieval.updates.write_ahead_log import Change, ChangeLog, Delete, LogFault, Put
from infembed_ray.serving import explaining, schema
from infembed_ray.serving.encoder.batching import Embedded
from infembed_ray.serving.release import ENCODER, RERANKER, CollectionSpec, ReleaseSpec
from infembed_ray.serving.routing.encoder_calls import DEADLINE_SHARE, EncoderCalls, EncoderInputs
from infembed_ray.serving.routing.fan_out import Deployment, FanOut, now
from infembed_ray.serving.routing.remote import RemoteDeployment
from infembed_ray.serving.routing.reranking import Reranked, RerankStage
from infembed_ray.serving.routing.retries import RetriedCalls
from infembed_ray.serving.service import Document, ReplicaLost, ShardState, Stuck, TooManyChanges
from infembed_ray.storage.places import place_of

PROBE_TIMEOUT_S = 2.0
STATE_MAX_AGE_S = 1.0
"""Age after which a change of documents asks the shards for their states again."""
HYBRID_DEPTH = 100
"""Candidates by vector, and as many by words, from every shard; at least `top_k`."""
COMPACT_AT = ServeSettings.model_fields["compact_at"].default
FULL = 5
"""Multiple of `compact_at` (of its default if it is null) from which documents are refused: compaction does not keep up."""

log = logging.getLogger(__name__)


def open_release(spec: ReleaseSpec, settings: ServeSettings) -> dict[str, Release]:
    """Return the service of each collection, the default one first.

    Their encoders and shards are the Serve deployments that the spec names. Collections with the same encoder share its calls
    and its query cache, and all share the re-ranking stage.
    """
    replicas = settings.max_encoder_replicas or settings.encoder_replicas
    remote = {name: RemoteDeployment.named(ENCODER, name) for name in spec.encoders}
    encoders = {name: EncoderCalls(encoder, replicas=replicas) for name, encoder in remote.items()}
    reranker = None
    if spec.rerank and spec.reranker:
        reranker = RerankStage(spec.rerank, RemoteDeployment.named(RERANKER, spec.reranker.application))
    return {
        name: Release(
            one,
            encoders[one.encoder.application],
            [RemoteDeployment.named(shard, one.index.application) for shard in one.shards],
            settings,
            reranker,
        )
        for name, one in spec.by_name.items()
    }


class Release:
    """The service of one collection: one encoder and one index version. All calls come from one event loop.

    The calls raise `QueueFull`, `DeadlineExceeded`, `FilterError`, `ReplicaLost`, `Stuck`, `TooManyChanges` and `NotApplied`;
    any other exception is an internal error.

    Args:
        encoder, reranker: may be shared with the releases of other collections.
        shards: as `FanOut` takes them; each also has `document(id)`, `state() -> ShardState` and `ready()`.
    """

    def __init__(
        self,
        spec: CollectionSpec,
        encoder: EncoderCalls,
        shards: Sequence[Deployment],
        settings: ServeSettings,
        reranker: RerankStage | None = None,
    ) -> None:
        self.spec = spec
        self.card = spec.card
        self.reranker = reranker
        self.encoder = encoder
        # The settings are the API's, and a roll-back may lead to an index without words.
        self._hybrid = settings.ranking.hybrid if spec.card.lexical else 0.0
        self._shards = shards
        self._timeout_s = DEADLINE_SHARE * settings.request_timeout_s
        chunk_tokens = spec.card.chunk_tokens
        self._chunks = None if chunk_tokens is None else (chunk_tokens, spec.card.chunk_overlap)
        self._log = spec.changes and ChangeLog(
            place_of(spec.changes), spec.card.metadata, spec.card.dimension, len(shards), self._chunks is not None
        )
        self._max_changed = FULL * (settings.compact_at or COMPACT_AT) * len(shards)
        self._states = [ShardState()] * len(shards)
        self._asking = asyncio.Lock()
        self._states_known_at = float("-inf")
        self._fan_out = FanOut(dict(zip(spec.shards, shards, strict=True)), replicas=settings.shard_replicas)

    async def embed(self, texts: list[str], instructions: list[str | None] | None) -> Embedded:
        """Embed texts: queries, each with its instruction or None, or passages, if `instructions` is None."""
        return await self.encoder.embed(EncoderInputs(texts, instructions), self._deadline())

    async def search(self, search: schema.SearchRequest) -> schema.SearchResponse:
        """Ask all shards at once and merge their hits: up to `top_k` passages that satisfy the filter.

        All of the answer comes from this release. Its sequence number is the smallest of all shards.
        """
        start, deadline = time.perf_counter(), self._deadline()
        text, instruction = search.query, search.instruction or ""
        hybrid = self._hybrid if search.hybrid is None else search.hybrid
        phrases = explaining.phrases_of(instruction) if search.explain else []
        asked = [question := Question(text, search.instruction or None)]
        if search.explain:
            asked = [Question(text, variant) for variant in explaining.variants(instruction, phrases)]
        vectors = await self.encoder.query_cache(asked, deadline)
        encoded = time.perf_counter()
        reranker = None if search.rerank is False else self.reranker
        depth = max(search.top_k, reranker.settings.depth) if reranker else search.top_k
        query = ShardQuery(vectors[:1], depth, search.filter, search.min_sequence)
        if hybrid:
            # A bag of words cannot negate, so the unwanted part is left out.
            words = f"{split(instruction).wanted} {text}".strip()
            query = replace(query, texts=[words], depth=max(HYBRID_DEPTH, search.top_k))
        ranked = await self._fan_out.search(query, deadline, hybrid)
        searched = time.perf_counter()
        reranked = Reranked(ranked.results[0], None, 0.0)
        if reranker:
            reranked = await reranker(question, ranked.results[0], deadline)
        hits, notes, explanation = reranked.hits[: search.top_k], [reranked.note] if reranked.note else [], None
        if search.explain:
            unexplained = {"instruction": None, "top_k": explaining.EXPLAINED_DEPTH, "explain": False}
            plain = search.model_copy(update=unexplained)
            ids, plain_ids = ([hit.id for hit in each] for each in (hits, (await self.search(plain)).hits))
            wanted = explaining.explained_ids(ids, plain_ids, search.top_k)
            scores = await self._fan_out.scores(wanted, vectors, deadline)
            explanation = explaining.explanation(phrases, ids, plain_ids, search.top_k, scores)
            if self.card.exclusion_weight:
                explanation.excluded = split(instruction).unwanted
            if changed := len(wanted) - len(scores):
                notes.append(f"explain: passages that changed meanwhile: {changed}.")
        return schema.SearchResponse(
            hits=hits,
            model=self.card.id,
            index_version=self.card.index_version,
            sequence=ranked.sequence,
            timings=schema.Timings(
                encode_ms=round(1e3 * (encoded - start), 3),
                search_ms=round(1e3 * (searched - encoded), 3),
                rerank_ms=round(reranked.ms, 3) if reranker else None,
            ),
            notes=notes,
            explanation=explanation,
        )

    async def rerank(self, query: Question, texts: Sequence[str]) -> np.ndarray:
        """Score passages by the reranker, which `card` must name: (len(texts)) float32."""
        assert self.reranker is not None
        ends, score = self._deadline(), self.reranker.score
        return await RetriedCalls()(lambda: score(query, texts, ends - now()), self._timeout_s)

    async def put(self, documents: Sequence[Document]) -> int:
        """Add documents with distinct ids, or replace those with the same ids. Their metadata matches the card's fields.

        The change is durable when the call returns the sequence number from which searches find them.
        """
        await self._require_no_fault()
        if self._changed >= self._max_changed:  # puts within a second can exceed it
            raise TooManyChanges(self._changed, self._max_changed)
        inputs = EncoderInputs([d.text for d in documents], None, self._chunks)
        embedded = await self.encoder.embed(inputs, self._deadline())
        if (chunks := embedded.chunks) is None:
            put = [Put(d.id, d.text, vector, d.metadata) for d, vector in zip(documents, embedded.vectors, strict=True)]
        else:
            vectors = np.split(embedded.vectors, np.cumsum([len(bounds) // 2 for bounds in chunks])[:-1])
            of_each = zip(documents, vectors, chunks, strict=True)
            put = [Put(d.id, d.text, vector, d.metadata, bounds) for d, vector, bounds in of_each]
        return await self._append(put)

    async def delete(self, ids: Sequence[str]) -> int:
        """Delete documents; unknown ids are ignored. Returns the sequence number from which searches omit them."""
        await self._require_no_fault()
        return await self._append(list(map(Delete, ids)))

    async def document(self, id: str) -> Document | None:
        """Return the current document; None if there is none."""
        shard = self._shards[shard_of(id, len(self._shards))]
        return await RetriedCalls()(lambda: shard("document", id), self._timeout_s)

    async def ready(self, with_reranker: bool = False) -> bool:
        """Return whether the encoder and every shard answer, and the reranker if asked for: searches do without it."""
        stages = [self.reranker.ready()] if with_reranker and self.reranker else []
        probes = asyncio.gather(self.encoder.ready(), *(shard("ready") for shard in self._shards), *stages)
        try:
            return all(await asyncio.wait_for(probes, PROBE_TIMEOUT_S))
        except (asyncio.TimeoutError, ReplicaLost):
            return False

    async def fault(self) -> str | None:
        """Return why changes of documents are not applied, in one line; None: they are applied.

        A shard that does not answer keeps the fault that it reported last.
        """
        await self._know_states()
        states = zip(self.spec.shards, self._states, strict=True)
        return next((f"{shard}: {state.fault}" for shard, state in states if state.fault), None)

    async def changed_documents(self) -> float:
        """Documents that differ from the index version, on average per shard."""
        await self._know_states()
        return self._changed / len(self._shards)

    @property
    def _changed(self) -> int:
        return sum(state.changed for state in self._states)

    async def _know_states(self) -> None:
        """Ask the shards for their states, unless they are known. A shard that does not answer keeps its last state."""
        async with self._asking:
            if now() >= self._states_known_at + STATE_MAX_AGE_S:
                await asyncio.gather(*map(self._ask_state, range(len(self._shards))))
                self._states_known_at = now()

    async def _ask_state(self, number: int) -> None:
        with contextlib.suppress(Exception):  # lost or full: /readyz still answers
            self._states[number] = await asyncio.wait_for(self._shards[number]("state"), PROBE_TIMEOUT_S)

    async def _require_no_fault(self) -> None:
        if fault := await self.fault():
            raise Stuck(fault)

    async def _append(self, changes: Sequence[Change]) -> int:
        if not self._log:
            (store,) = self._shards
            return await RetriedCalls()(lambda: store("change", changes), self._timeout_s)
        try:  # in a thread, because it waits for the disk
            return await asyncio.get_running_loop().run_in_executor(None, self._log.append, changes)
        except LogFault as fault:
            log.error("%s", fault)
            raise Stuck(fault.without_directory) from fault

    def _deadline(self) -> float:
        """Return the deadline of a request that arrives now, by the event loop's time."""
        return now() + self._timeout_s
