"""Replicas of the Serve deployments: encoder, shard search, reranker and ingress.

Only replicas with a model import torch and transformers. A replica without them uses half the memory and starts in half the
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from ray import serve
from ray.serve.handle import DeploymentHandle

from infembed_ray.config.serving import DEFAULT_COLLECTION
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.retrieval.answers import ScoreQuery, ShardAnswer, ShardQuery
from infembed_ray.retrieval.filters import FilterError
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.milvus import Milvus, MilvusAddress, StoreFault
from infembed_ray.retrieval.shards import Shard
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.updates.write_ahead_log import Change, ChangeError, LogFault
from infembed_ray.retrieval.versions import change_log
from infembed_ray.serving import startup
from infembed_ray.serving.encoder.batching import BatchingEngine, DeadlineExceeded, Embedded, QueueFull
from infembed_ray.serving.http.app import create_app
from infembed_ray.serving.http.auth import ApiKeys
from infembed_ray.serving.metrics import PUSH_S, readings, snapshot
from infembed_ray.serving.release import (
    APPLICATION,
    SUPERVISOR,
    ApiArguments,
    EncoderArguments,
    IndexArguments,
    ReleaseSpec,
    RerankerArguments,
)
from infembed_ray.serving.routing.blue_green import Release, open_release
from infembed_ray.serving.routing.encoder_calls import EncoderInputs
from infembed_ray.serving.routing.remote import RemoteDeployment
from infembed_ray.serving.routing.reranking import OUTCOMES
from infembed_ray.serving.service import Document, ReplicaLost, ShardState

if TYPE_CHECKING:
    from infembed_ray.serving.encoder.engine import EncodingEngine

POLL_S = 0.1
"""Seconds between two reads of the write-ahead log by a shard, and between two probes of a new release."""
SLOW_POLL_S = 1.0
"""Seconds between two reads of a damaged log, and of one in an object store, which bills each request."""
SEARCHES = 8
"""Calls of a replica to an external engine at a time."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class MetricsReporter:
    """Sends a replica's metrics, which `collect` yields as a collector of `prometheus_client`, to the supervisor."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self.collect = collect
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start at the first call; call it from the replica's event loop."""
        if self._task is None:
            # In the context of the first request, Serve would cancel it together with that.
            self._task = contextvars.Context().run(asyncio.get_running_loop().create_task, self._report())

    async def _report(self) -> None:
        context = serve.get_replica_context()
        replica = f"{context.app_name}/{context.deployment}/{context.replica_tag}"
        page = RemoteDeployment.named(SUPERVISOR, APPLICATION)
        while True:
            with contextlib.suppress(Exception):  # the page may be starting or restarting
                await asyncio.wait_for(page("keep", replica, snapshot(self.registry)), PUSH_S)
            await asyncio.sleep(PUSH_S)


class Reporting:
    """A replica whose metrics the supervisor gets."""

    _metrics: MetricsReporter

    async def ready(self) -> bool:
        """Return True once the replica has loaded what it serves."""
        self._metrics.start()
        return True


def _totals(part: str, batching: BatchingEngine, **more: int) -> dict[str, tuple[str, float]]:
    totals = {**asdict(batching.counters), **more}
    return {f"infembed_{part}_{name}_total": (f"{name.replace('_', ' ')} so far", n) for name, n in totals.items()}


class EncoderReplica(Reporting):
    """A replica of the encoder."""

    def __init__(self, arguments: EncoderArguments) -> None:
        from infembed_ray.modeling.checkpoint import local
        from infembed_ray.serving.encoder.engine import EncodingEngine

        model = startup.in_background(lambda: local(arguments.model))
        self._engine = EncodingEngine.load(model, arguments.settings, arguments.dimensions, arguments.fingerprint)
        self._metrics = MetricsReporter(lambda: encoder_metrics(self._engine))

    async def embed_many(self, items: Sequence[EncoderInputs], timeout_s: float) -> list[Embedded | Exception]:
        """Embed the texts of several requests; return the vectors or the exception of each."""
        self._metrics.start()
        calls = (self._engine.embed(item.texts, item.instructions, timeout_s, item.chunks) for item in items)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        sent = (Embedded, QueueFull, DeadlineExceeded, ChangeError)  # the API reports these errors as they are
        return [answer if isinstance(answer, sent) else _readable_error(answer) for answer in answers]


def _readable_error(error: BaseException) -> Exception:
    """Log an error in full; return one that the ingress can unpickle without the model's libraries."""
    log.error("a text could not be read by the model", exc_info=error)
    return RuntimeError(in_one_line(error))


def encoder_metrics(engine: EncodingEngine) -> Iterator[Metric]:
    """Yield the metrics of an encoding engine."""
    cache = engine.prefixes
    hits, misses, size = (cache.hits, cache.misses, cache.bytes) if cache else (0, 0, 0)
    yield from readings(
        {
            "infembed_encoder_waiting": ("Texts in the queue.", engine.batching.waiting),
            "infembed_encoder_prefix_bytes": ("Memory of cached instructions.", size),
            **_totals("encoder", engine.batching, prefix_hits=hits, prefix_misses=misses),
        }
    )
    chosen = GaugeMetricFamily("infembed_encoder_dtype", "1 for the precision of the encoder.", labels=["dtype"])
    chosen.add_metric([engine.dtype], 1)
    yield chosen


class RerankerReplica(Reporting):
    """A replica of the reranker."""

    def __init__(self, arguments: RerankerArguments) -> None:
        from infembed_ray.serving.reranking import RerankEngine, load

        self._engine = RerankEngine(startup.in_background(lambda: load(arguments)))
        self._metrics = MetricsReporter(self._collect)

    def _collect(self) -> Iterator[Metric]:
        batching = self._engine.batching
        waiting = {"infembed_reranker_waiting": ("Passages in the queue.", batching.waiting)}
        yield from readings({**waiting, **_totals("reranker", batching)})

    async def score(self, query: str, instruction: str | None, texts: list[str], timeout_s: float) -> np.ndarray:
        """Score the passages of a search: (passages) float32.

        Raises:
            QueueFull, DeadlineExceeded: as the engine.
            RuntimeError: the model raised; the log has the details.
        """
        self._metrics.start()
        try:
            return await self._engine.score(query, instruction, texts, timeout_s)
        except (QueueFull, DeadlineExceeded):
            raise
        except Exception as error:
            raise _readable_error(error) from None


class ShardSearch(Reporting):
    """A replica of one shard. `others` are the other shards of its application, which it does not call."""

    def __init__(self, arguments: IndexArguments, number: int, *others: DeploymentHandle) -> None:
        described = Index.describe(arguments.index)
        if described.version != arguments.version:
            fault = f"holds version {described.version} now, `serve` was started with {arguments.version}"
            raise InputError.of("index", arguments.index, fault, "start `serve` again")
        facts = described.facts
        base = Shard.open(described.path, facts.shards[number], gpu=arguments.settings.gpus_per_shard > 0)
        changes = change_log(described.path, facts)
        self._shard = LiveShard(base, changes, number, facts.folded)
        self._changes = changes.directory
        self._fault: str | None = None
        self._threads = ThreadPoolExecutor(max(1, int(arguments.settings.cpus_per_shard)), "search")
        self._metrics = MetricsReporter(self._collect)
        threading.Thread(target=self._follow_log, name="follow-log", daemon=True).start()

    def _collect(self) -> Iterator[Metric]:
        shard = self._shard
        yield from readings(
            {
                "infembed_shard_documents": ("Documents that searches see.", len(shard)),
                "infembed_shard_sequence": ("Last change that searches see.", shard.sequence),
                "infembed_log_sequence": ("Last change in the log.", shard.head),
                "infembed_shard_lag": ("Changes in the log that searches do not see.", shard.head - shard.sequence),
                "infembed_shard_stuck": ("1: a damaged log stops the shard's changes.", self._fault is not None),
                "infembed_shard_delta": ("Documents that differ from the index version.", shard.changed),
            }
        )

    async def search_many(self, queries: Sequence[ShardQuery]) -> list[ShardAnswer | Exception]:
        """As `LiveShard.search_many`."""
        self._metrics.start()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._shard.search_many, queries)

    async def scores_many(self, queries: Sequence[ScoreQuery]) -> list[np.ndarray]:
        """Return the scores of the passages of several requests, each as `LiveShard.scores`."""
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._threads, lambda: [self._shard.scores(query) for query in queries])

    async def document(self, id: str) -> Document | None:
        """Return the document with an id, after all changes in the log."""
        with contextlib.suppress(Exception):  # the thread that follows the log reports it
            await asyncio.get_running_loop().run_in_executor(self._threads, self._shard.refresh)
        content = self._shard.get(id)
        return None if content is None else Document(content.id, content.text, content.metadata)

    async def state(self) -> ShardState:
        """Return the state of the shard's changes."""
        return ShardState(self._fault, self._shard.changed)

    def _follow_log(self) -> None:
        """Apply changes as they are appended to the log. A damaged change blocks those after it; it is logged once."""
        logged = ""
        poll_s = POLL_S if isinstance(self._changes, Path) else SLOW_POLL_S
        while True:
            try:
                self._shard.refresh()
                self._fault, logged = None, ""
            except Exception as error:  # any: without this thread the shard would become stale unnoticed
                self._fault = error.without_directory if isinstance(error, LogFault) else "see the server's log"
                if str(error) != logged:
                    logged = str(error)
                    log.error("the shard applies no further changes and serves its current documents: %s", logged)
            time.sleep(poll_s if self._fault is None else SLOW_POLL_S)


class StoreSearch:
    """A replica that forwards searches and changes to one version in an external engine. It searches as `ShardSearch` does."""

    def __init__(self, arguments: IndexArguments, number: int) -> None:
        address = MilvusAddress.parse(arguments.index, "index")
        self._store = Milvus(address, arguments.settings.request_timeout_s).open(arguments.version)
        self._threads = ThreadPoolExecutor(SEARCHES, "search")
        self._writer = ThreadPoolExecutor(1, "write")  # Milvus Lite takes one writer at a time

    async def search_many(self, queries: Sequence[ShardQuery]) -> list[ShardAnswer | Exception]:
        """As `ShardSearch.search_many`; each request is a call to the engine."""
        return list(await asyncio.gather(*(self._call(self._threads, self._answer, query) for query in queries)))

    async def scores_many(self, queries: Sequence[ScoreQuery]) -> list[np.ndarray]:
        """As `ShardSearch.scores_many`; each request is a call to the engine."""
        return list(await asyncio.gather(*(self._call(self._threads, self._store.scores, query) for query in queries)))

    async def document(self, id: str) -> Document | None:
        """Return the document with an id, after all changes."""
        hit = await self._call(self._threads, self._store.get, id)
        return None if hit is None else Document(hit.id, hit.text, hit.metadata)

    async def change(self, changes: Sequence[Change]) -> int:
        """Apply changes; return the sequence from which searches see them."""
        return await self._call(self._writer, self._store.change, changes)

    async def ready(self) -> bool:
        """Return whether the engine would answer."""
        return await self._call(self._threads, self._store.ready)

    async def state(self) -> ShardState:
        """Return a state without faults: an engine that answers applies changes."""
        return ShardState()

    def _answer(self, query: ShardQuery) -> ShardAnswer | Exception:
        try:
            hits, sequence = self._store.search(query.vectors, query.k, query.filter, query.min_sequence > 0)
            return ShardAnswer(hits, max(sequence, query.min_sequence))
        except FilterError as error:
            return error

    async def _call(self, threads: Executor, function: Callable[..., T], *arguments: object) -> T:
        """Call the engine in a thread; raises ReplicaLost if it does not answer, and logs why."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(threads, function, *arguments)
        except StoreFault as fault:
            log.error("the external engine does not answer: %s", fault)
            with contextlib.suppress(StoreFault):
                await loop.run_in_executor(self._threads, self._store.ready)  # a restarted engine may have to load
            raise ReplicaLost from fault


@serve.ingress()
class Ingress:
    """A replica of the HTTP API, which answers each request from the current release."""

    def __init__(self, arguments: ApiArguments, supervisor: DeploymentHandle) -> None:
        settings = arguments.settings
        self._arguments = arguments
        self._supervisor = RemoteDeployment(supervisor)
        self._keys = ApiKeys.load(settings.api_keys_env, settings.api_keys_file, settings.ingress_replicas)
        if arguments.locked and not self._keys:
            fault = "set where `serve` was started but not on the node of the ingress, which would be open"
            raise RuntimeError(f"api_keys_env={settings.api_keys_env}: {fault}; set it in the environment of all nodes")
        self._reporter = MetricsReporter(self._collect)
        self._served: tuple[ReleaseSpec, dict[str, Release]] | None = None
        self._wanted: ReleaseSpec | None = None
        self._switching: asyncio.Task[None] | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        settings = self._arguments.settings
        return create_app(
            lambda: self._now[1],
            lambda: self._now[0].fingerprint,
            self._keys,
            settings.request_timeout_s,
            metrics=lambda: self._supervisor("metrics"),
            registry=self._reporter.registry,
            request_ids=settings.ha_proxy,  # Serve's own proxy adds them
        )

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Switch to another release once the supervisor admits it; Serve calls this method with the `user_config`.

        Until then, this replica keeps its current one, and this method has returned: Serve routes no requests to a replica that
        it reconfigures. Its first one it also takes if all parts answer already, so it needs no supervisor; a first one that is
        not admitted is an error.
        """
        self._reporter.start()
        if self._switching is not None:
            self._switching.cancel()
        self._wanted = spec = ReleaseSpec.model_validate(user_config)
        new = open_release(spec, self._arguments.settings)
        self._switching = asyncio.get_running_loop().create_task(self._switch_to(spec, new))
        if self._served is None:
            await self._switching

    async def _switch_to(self, spec: ReleaseSpec, new: dict[str, Release]) -> None:
        current = self._served and self._served[0]
        answering = asyncio.ensure_future(self._answer(new, with_reranker=current is not None))
        try:
            while not await self._admitted(current, spec) and (current or not answering.done()):
                await asyncio.sleep(POLL_S)
            await answering
            self._served = spec, new
        except Exception as error:
            if current is None:
                raise
            log.error("the new release is not served: %s", error)
        finally:
            answering.cancel()

    async def _answer(self, new: dict[str, Release], with_reranker: bool) -> None:
        """Wait until a release answers. A replica without one does not wait for the reranker: searches do without it."""
        for release in new.values():
            while not await release.ready(with_reranker=with_reranker):
                await asyncio.sleep(POLL_S)

    async def _admitted(self, current: ReleaseSpec | None, new: ReleaseSpec) -> bool:
        """As `Supervisor.admit`; False if the supervisor is starting."""
        with contextlib.suppress(ReplicaLost, QueueFull):
            await self._supervisor("admit", current, new)
            return True
        return False

    @property
    def _now(self) -> tuple[ReleaseSpec, dict[str, Release]]:
        if self._served is None:
            raise ReplicaLost
        return self._served

    async def served(self) -> tuple[ReleaseSpec | None, ReleaseSpec | None]:
        """Return the release that this replica answers from, if any, and the one that it should."""
        return self._served and self._served[0], self._wanted

    async def changed_documents(self) -> dict[str, float]:
        """As `Release.changed_documents`, by collection."""
        releases = self._now[1]
        changed = await asyncio.gather(*(release.changed_documents() for release in releases.values()))
        return dict(zip(releases, changed, strict=True))

    def _collect(self) -> Iterator[Metric]:
        """Yield the metrics of the current release; those of the query caches start again with a new one."""
        if self._served is None:
            return
        spec, releases = self._served
        caches = {id(release.encoder): release.encoder.query_cache for release in releases.values()}.values()
        yield from readings(
            {
                "infembed_query_cache_bytes": ("Memory of cached queries.", sum(cache.bytes for cache in caches)),
                "infembed_query_cache_hits_total": ("Queries not encoded.", sum(cache.hits for cache in caches)),
                "infembed_query_cache_misses_total": ("Queries encoded.", sum(cache.misses for cache in caches)),
            }
        )
        if stage := releases[DEFAULT_COLLECTION].reranker:  # one for all collections
            what = "Searches to re-rank, by outcome."
            outcomes = CounterMetricFamily("infembed_rerank_searches", what, labels=["outcome"])
            for outcome in OUTCOMES:
                outcomes.add_metric([outcome], stage.counts[outcome])
            yield outcomes
        labels = ["collection", "release", "application", "index_version"]
        names = GaugeMetricFamily("infembed_collection_info", "1 for each collection.", labels=labels)
        for name, one in spec.by_name.items():
            names.add_metric([name, spec.fingerprint, one.index.application, one.card.index_version], 1)
        yield names
