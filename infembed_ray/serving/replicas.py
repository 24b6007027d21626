"""Replicas of the Serve deployments: encoder, shard search and ingress.

Only an encoder replica imports torch and transformers, and only if no earlier start has left its graph. A replica without
them uses half the memory and starts in half the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from ray import serve
from ray.serve.handle import DeploymentHandle

from infembed_ray.config.serving import DEFAULT_COLLECTION
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.retrieval.answers import Key, ScoreQuery, ShardAnswer, ShardQuery, ShardRanking
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.shards import Content, Shard
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.updates.write_ahead_log import LogFault
from infembed_ray.retrieval.versions import change_log
from infembed_ray.serving import startup
from infembed_ray.serving.encoder.batching import DeadlineExceeded, Embedded, EmptySequence, QueueFull
from infembed_ray.serving.http.app import RequestLimits, create_app
from infembed_ray.serving.http.auth import ApiKeys
from infembed_ray.serving.http.body import LIMIT_VARIABLE
from infembed_ray.serving.metrics import PUSH_S, snapshot
from infembed_ray.serving.release import (
    APPLICATION,
    SUPERVISOR,
    ApiArguments,
    EncoderArguments,
    IndexArguments,
    ReleaseSpec,
)
from infembed_ray.serving.routing.encoder_calls import EncoderInputs
from infembed_ray.serving.routing.remote import RETRY_AFTER_S, RemoteDeployment
from infembed_ray.serving.served import Served, ServedMetrics
from infembed_ray.serving.service import Document, Query, ReplicaLost, ShardState
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.steps import resolve_input

if TYPE_CHECKING:
    from infembed_ray.serving.encoder.engine import EncodingEngine, Facts

OPEN_TIMEOUT_S = 60.0
"""Time for a new release to answer; after it, `reconfigure` returns and the replica keeps waiting in the background."""
POLL_S = 0.1
"""Seconds between two reads of the write-ahead log by a shard, and between two probes of a new release."""
STORE_POLL_S = 1.0
"""Seconds between two reads of a log in an object store, which bills each request."""
STUCK_POLL_S = 1.0
"""Seconds between two reads of a damaged log."""
CLIENT_ERRORS = (QueueFull, DeadlineExceeded, EmptySequence)
"""Errors of the encoding engine that the API reports to its client as they are."""

log = logging.getLogger(__name__)


class EncoderReplica:
    """A replica of the encoder."""

    def __init__(self, arguments: EncoderArguments) -> None:
        from infembed_ray.serving.encoder.engine import EncodingEngine
        from infembed_ray.serving.encoder.known import describe

        model = str(resolve_input(arguments.model, "model")) if is_uri(arguments.model) else arguments.model
        description = startup.in_background(lambda: describe(model, arguments.dimensions))
        if description.fingerprint != arguments.fingerprint:
            raise RuntimeError(
                f"model={arguments.model}: its fingerprint is {description.fingerprint} on this node and "
                f"{arguments.fingerprint} where `serve` was started; put the same checkpoint on all nodes"
            )
        self._engine = EncodingEngine.load(model, arguments.settings, arguments.dimensions, description)
        registry = CollectorRegistry()
        registry.register(EngineMetrics(self._engine))
        self._metrics = MetricsReporter(registry)

    async def embed_many(
        self, items: Sequence[EncoderInputs | list[Query]], timeout_s: float
    ) -> list[Embedded | Exception]:
        """Embed the texts of several requests; return the vectors or the exception of each."""
        self._metrics.start()
        answers = await asyncio.gather(*(self._embed(item, timeout_s) for item in items), return_exceptions=True)
        return [
            answer if isinstance(answer, (Embedded, *CLIENT_ERRORS)) else _readable_error(answer) for answer in answers
        ]

    def _embed(self, item: EncoderInputs | list[Query], timeout_s: float) -> Coroutine[Any, Any, Embedded]:
        if isinstance(item, EncoderInputs):
            return self._engine.embed(*item, timeout_s)
        texts, instructions = zip(*item, strict=True)
        return self._engine.embed_queries(texts, instructions, timeout_s)

    async def ready(self) -> bool:
        """Return True once the model is loaded."""
        self._metrics.start()
        return True


def _readable_error(error: BaseException) -> Exception:
    """Log an error in full; return one that the ingress can unpickle without the encoder's libraries."""
    log.error("a text could not be embedded", exc_info=error)
    return RuntimeError(in_one_line(error))


class EngineMetrics:
    """Metrics of an encoding engine, as a collector of `prometheus_client`."""

    def __init__(self, engine: EncodingEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        facts = self._engine.facts
        yield GaugeMetricFamily("infembed_encoder_waiting", "Texts in the queue.", facts.waiting)
        yield GaugeMetricFamily("infembed_encoder_prefix_bytes", "Memory of cached instructions.", facts.prefix_bytes)
        yield from _calibration(facts)
        totals = {**asdict(facts.counters), "prefix_hits": facts.prefix_hits, "prefix_misses": facts.prefix_misses}
        for name, total in totals.items():
            description = f"{name.replace('_', ' ')} so far".capitalize()
            yield CounterMetricFamily(f"infembed_encoder_{name}", description, total)


def _calibration(facts: Facts) -> Iterator[Metric]:
    """Yield which runtime and precision run the encoder, and what its calibration measured."""
    labels = ["runtime", "dtype"]
    chosen = GaugeMetricFamily("infembed_encoder_runtime", "1 for what runs the encoder.", labels=labels)
    chosen.add_metric(facts.candidate, 1)
    yield chosen
    gauges = {
        "infembed_encoder_calibration_seconds": ("Time of each candidate for the calibration's texts.", "seconds"),
        "infembed_encoder_calibration_cosine": ("Smallest cosine of each candidate with float32.", "cosine"),
    }
    for name, (description, figure) in gauges.items():
        gauge = GaugeMetricFamily(name, description, labels=labels)
        for candidate, measured in facts.measured.items():
            gauge.add_metric(candidate, getattr(measured, figure))
        yield gauge


class ShardSearch:
    """A replica of one shard. `others` are the other shards of its application, which it does not call."""

    def __init__(self, arguments: IndexArguments, number: int, *others: DeploymentHandle) -> None:
        described = Index.describe(arguments.index)
        if described.version != arguments.version:
            raise InputError(
                f"index={arguments.index}: holds version {described.version} now, `serve` was started with "
                f"{arguments.version}; start `serve` again"
            )
        facts = described.facts
        base = Shard.open(
            described.path,
            facts.shards[number],
            gpu=arguments.settings.gpus_per_shard > 0,
        )
        changes = change_log(described.path, facts)
        self._shard = LiveShard(base, changes, number, facts.folded)
        self._changes = changes.directory
        self._fault: str | None = None
        self._threads = ThreadPoolExecutor(max(1, int(arguments.settings.cpus_per_shard)), "search")
        self._metrics = MetricsReporter(self._registry())
        threading.Thread(target=self._follow_log, name="follow-log", daemon=True).start()

    def _registry(self) -> CollectorRegistry:
        shard, registry = self._shard, CollectorRegistry()
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "infembed_shard_documents": ("Documents that searches see.", shard.__len__),
            "infembed_shard_sequence": ("Last change that searches see.", lambda: shard.sequence),
            "infembed_log_sequence": ("Last change in the log.", lambda: shard.head),
            "infembed_shard_lag": ("Changes in the log that searches do not see.", lambda: shard.head - shard.sequence),
            "infembed_shard_stuck": ("1: a damaged log stops the shard's changes.", lambda: self._fault is not None),
            "infembed_shard_delta": ("Documents that differ from the index version.", lambda: shard.changed),
        }
        for name, (description, value) in gauges.items():
            Gauge(name, description, registry=registry).set_function(value)
        return registry

    async def search_many(self, queries: Sequence[ShardQuery]) -> list[ShardAnswer | ShardRanking | Exception]:
        """As `LiveShard.search_many`."""
        self._metrics.start()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._shard.search_many, queries)

    async def contents_many(self, items: Sequence[Sequence[Key]]) -> list[list[Content]]:
        """Return texts and metadata of the hits of several requests, as `LiveShard.contents`."""
        contents = iter(
            await asyncio.get_running_loop().run_in_executor(
                self._threads, self._shard.contents, [key for keys in items for key in keys]
            )
        )
        return [[next(contents) for _ in keys] for keys in items]

    async def scores_many(self, queries: Sequence[ScoreQuery]) -> list[np.ndarray]:
        """Return the scores of the passages of several requests, each as `LiveShard.scores`."""
        scores = self._shard.scores
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._threads, lambda: [scores(query) for query in queries])

    async def document(self, id: str) -> Document | None:
        """Return the document with an id."""
        content = self._shard.get(id)
        return None if content is None else Document(content.id, content.text, content.metadata)

    async def ready(self) -> bool:
        """Return True once the shard is open."""
        self._metrics.start()
        return True

    async def state(self) -> ShardState:
        """Return the state of the shard's changes."""
        return ShardState(self._fault, self._shard.changed)

    def _follow_log(self) -> None:
        """Apply changes as they are appended to the log. A damaged change blocks those after it; it is logged once."""
        logged = ""
        poll_s = POLL_S if isinstance(self._changes, Path) else STORE_POLL_S
        while True:
            try:
                self._shard.refresh()
                self._fault, logged = None, ""
            except Exception as error:  # any: without this thread the shard would become stale unnoticed
                self._fault = error.without_directory if isinstance(error, LogFault) else "see the server's log"
                if str(error) != logged:
                    logged = str(error)
                    log.error("the shard applies no further changes and serves its current documents: %s", logged)
            time.sleep(poll_s if self._fault is None else STUCK_POLL_S)


class MetricsReporter:
    """Sends a replica's metrics to the supervisor."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start at the first call; call it from the replica's event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._report())

    async def _report(self) -> None:
        context = serve.get_replica_context()
        replica = f"{context.app_name}/{context.deployment}/{context.replica_tag}"
        page = RemoteDeployment.named(SUPERVISOR, APPLICATION)
        while True:
            # The page may be starting or restarting.
            with contextlib.suppress(asyncio.TimeoutError, ReplicaLost):
                await asyncio.wait_for(page("keep", replica, snapshot(self._registry)), PUSH_S)
            await asyncio.sleep(PUSH_S)


@serve.ingress()
class Ingress:
    """A replica of the HTTP API, which answers each request from the current release."""

    def __init__(self, arguments: ApiArguments, supervisor: DeploymentHandle) -> None:
        settings = arguments.settings
        self._arguments = arguments
        self._supervisor = RemoteDeployment(supervisor)
        self._keys = ApiKeys.load(settings.api_keys_env, settings.api_keys_file, settings.ingress_replicas)
        if arguments.locked and not self._keys:
            raise RuntimeError(
                f"api_keys_env={settings.api_keys_env}: set where `serve` was started but not on the node of the "
                "ingress, which would be open; set it in the environment of all nodes"
            )
        proxy_limit = float(os.environ.get(LIMIT_VARIABLE, "inf"))
        if settings.max_body_mib > proxy_limit:
            raise InputError(
                f"max_body_mib={settings.max_body_mib:g}: Serve's proxies were started with {proxy_limit:g} and keep it; "
                f"end Serve with `serve shutdown` first, or set max_body_mib={proxy_limit:g} or less"
            )
        self._registry = CollectorRegistry()
        self._reporter = MetricsReporter(self._registry)
        self._served: Served | None = None
        self._registry.register(ServedMetrics(lambda: self._served))
        self._switching: asyncio.Task[None] | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        settings = self._arguments.settings
        return create_app(
            lambda: self._now.releases[DEFAULT_COLLECTION],
            lambda: self._now.fingerprint,
            self._keys,
            RequestLimits(max_body_mib=settings.max_body_mib, request_timeout_s=settings.request_timeout_s),
            registry=self._registry,
            request_ids=settings.ha_proxy,  # Serve's own proxy adds them
            collections=lambda: self._now.releases,
        )

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Switch to another release once it answers; Serve calls this method with the `user_config`.

        Until the new release answers, this replica keeps its current one. A replica that cannot open its first one fails.
        """
        self._reporter.start()
        if self._switching is not None:
            self._switching.cancel()
        spec = ReleaseSpec.model_validate(user_config)
        new = Served.open(spec, self._arguments.settings, self._supervisor)
        self._switching = asyncio.get_running_loop().create_task(self._switch_to(new))
        await asyncio.wait([self._switching], timeout=OPEN_TIMEOUT_S)
        if self._served is None:
            raise RuntimeError(f"{' and '.join(sorted(spec.parts))} do not answer")

    async def _switch_to(self, new: Served) -> None:
        for release in new.releases.values():
            # A replica without a release does not wait for the reranker: searches do without it.
            while not await release.ready(with_reranker=self._served is not None):
                await asyncio.sleep(POLL_S)
        if self._served is not None and (fault := await self._verdict(self._served.spec, new.spec)):
            log.error("the new release is not served: %s", fault)
            return
        self._served = new

    async def _verdict(self, current: ReleaseSpec, new: ReleaseSpec) -> str | None:
        """As `Supervisor.verdict`; wait for the supervisor, which may be starting."""
        while True:
            with contextlib.suppress(ReplicaLost, QueueFull):
                fault: str | None = await self._supervisor("verdict", current, new)
                return fault
            await asyncio.sleep(POLL_S)

    @property
    def _now(self) -> Served:
        if self._served is None:
            raise ReplicaLost(RETRY_AFTER_S)
        return self._served

    async def served(self) -> tuple[ApiArguments, ReleaseSpec | None]:
        """Return the arguments of this replica and the release that it answers from; None: it has none yet."""
        return self._arguments, self._served.spec if self._served else None

    async def changed_documents(self) -> dict[str, float]:
        """As `Release.changed_documents`, by collection."""
        releases = self._now.releases
        changed = await asyncio.gather(*(release.changed_documents() for release in releases.values()))
        return dict(zip(releases, changed, strict=True))
