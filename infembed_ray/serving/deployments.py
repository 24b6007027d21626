"""The Ray Serve applications: an encoder, the shards of an index, and the API over a generation of both.

`infembed-encoder-*` and `infembed-index-*` are named after what they hold, so several may be up at a time. `infembed` is the
HTTP API; which of the others it asks is its `user_config`, so that an upgrade restarts nothing of it (see `generations`).

Only the encoder's replicas import torch and transformers: a replica of a shard or of the ingress is half the size and
starts in half the time without.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve._private.constants import MAX_REPLICAS_PER_NODE_MAX_VALUE
from ray.serve.config import AutoscalingConfig, BackpressureConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from infembed_ray import __version__
from infembed_ray.config import ServeSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.object_store import is_uri
from infembed_ray.retrieval.changes import ChangeLog, LogFault
from infembed_ray.retrieval.index import Index, changes_of
from infembed_ray.retrieval.live import LiveShard, ShardAnswer, ShardQuery
from infembed_ray.retrieval.shards import Shard
from infembed_ray.serving import schema, startup
from infembed_ray.serving.app import Limits, create_app
from infembed_ray.serving.auth import ApiKeys
from infembed_ray.serving.body import LIMIT
from infembed_ray.serving.engine import DeadlineExceeded, Embedded, EmptySequence, QueueFull
from infembed_ray.serving.generations import Blueprint, Generation, Inputs
from infembed_ray.serving.service import Document, Found, Query, ReplicaLost
from infembed_ray.serving.snapshots import PUSH_S, Snapshots, snapshot
from infembed_ray.storage import MANIFEST, existing

if TYPE_CHECKING:
    from infembed_ray.serving.encoding import EncodingEngine

APPLICATION = "infembed"
ENCODER, INGRESS, METRICS = "encoder", "ingress", "metrics"
SMALL_CPUS = 0.1
"""CPUs asked for by a replica that mostly waits: that of the ingress."""
OPEN_TIMEOUT_S = 60.0
"""For a new generation to answer the ingress, before it stays with the one it has."""
CONSTRUCTOR_ATTEMPTS = 3
FOLLOW_S = 0.1
"""Between two looks of a shard at the log of changes."""
STUCK_S = 1.0
"""The same, while the log is damaged."""
INGRESS_ENVIRONMENT = {
    # One event loop for Serve's part of a request and ours: no hand-over between threads for each.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
RETRY_AFTER_S = 1.0
"""What a client is told to wait when a replica is full or lost, and nobody knows better."""
LONGEST_RETRY_AFTER_S = 10.0
"""The same, when none has been there for as long: the longer none is, the longer."""
LOOK_S = 0.25
"""Between two looks whether a deployment that is waited for has any replicas left."""

TOLD = (QueueFull, DeadlineExceeded, EmptySequence)
"""What an encoding engine raises by itself, and the API tells its client."""

log = logging.getLogger(__name__)


# -------------------------------------------------------------------------------------------------- arguments


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def digest(self) -> str:
        """8 hex digits that change with anything that changes the application."""
        decides = {**self.model_dump(mode="json"), "code_version": __version__}
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]


class EncoderArguments(_Arguments):
    """Of `encoder_application`."""

    model: str
    """Directory, URI in an object store, or hub name."""
    fingerprint: str
    """Of the encoder that the index needs."""
    dimensions: int | None = None
    """Of its embeddings, if fewer than the model's."""
    settings: ServeSettings

    @classmethod
    def of(
        cls, model: str, fingerprint: str, settings: ServeSettings, dimensions: int | None = None
    ) -> EncoderArguments:
        """With what concerns the encoder, so that another port starts no other one."""
        kept = {"model", "encoder_replicas", "max_encoder_replicas", "gpus_per_encoder", "cpus_per_encoder", "runtime"}
        kept |= {"dtype", "prefix_cache_mib", "batch_tokens", "max_queue", "request_timeout_s"}
        return cls(model=model, fingerprint=fingerprint, dimensions=dimensions, settings=_only(settings, kept))

    @property
    def application(self) -> str:
        """Its name."""
        return f"{APPLICATION}-encoder-{self.fingerprint[:8]}-{self.digest()}"


class IndexArguments(_Arguments):
    """Of `index_application`."""

    index: str
    """Directory of a version, or its URI in an object store."""
    version: str
    settings: ServeSettings

    @classmethod
    def of(cls, index: str, version: str, settings: ServeSettings) -> IndexArguments:
        """With what concerns the shards."""
        kept = {"shard_replicas", "gpus_per_shard", "cpus_per_shard", "max_queue", "request_timeout_s"}
        return cls(index=index, version=version, settings=_only(settings, kept))

    @property
    def application(self) -> str:
        """Its name."""
        return f"{APPLICATION}-index-{self.version[:8]}-{self.digest()}"


class ApiArguments(_Arguments):
    """Of `api_application`."""

    locked: bool
    """There are API keys; a replica that finds none does not start."""
    settings: ServeSettings

    @classmethod
    def of(cls, settings: ServeSettings, locked: bool) -> ApiArguments:
        """With what concerns the ingress."""
        kept = {"api_keys_env", "api_keys_file", "ingress_replicas", "encoder_replicas", "max_encoder_replicas"}
        kept |= {"shard_replicas", "max_queue", "request_timeout_s", "max_body_mib", "ha_proxy"}
        return cls(locked=locked, settings=_only(settings, kept))


def _only(settings: ServeSettings, kept: set[str]) -> ServeSettings:
    """The settings as if only these had been set, for what nothing else concerns."""
    return ServeSettings(index="", **settings.model_dump(include=kept))


# ----------------------------------------------------------------------------------------------- applications


def encoder_application(arguments: EncoderArguments | Mapping[str, Any]) -> serve.Application:
    """The encoder; `serve deploy` gives the arguments as a mapping."""
    arguments = EncoderArguments.model_validate(arguments)
    settings = arguments.settings
    most = settings.max_encoder_replicas
    return serve.deployment(
        Encoder,
        name=ENCODER,
        ray_actor_options={
            "num_cpus": settings.cpus_per_encoder,
            "num_gpus": settings.gpus_per_encoder,
            "runtime_env": {"env_vars": _environment(startup.import_encoder_modules, settings.cpus_per_encoder)},
        },
        max_replicas_per_node=spread(
            most or settings.encoder_replicas, CPU=settings.cpus_per_encoder, GPU=settings.gpus_per_encoder
        ),
        **_replicas(settings.encoder_replicas, most),
        **_bounds(settings),
    ).bind(arguments)


def index_application(arguments: IndexArguments | Mapping[str, Any]) -> serve.Application:
    """The shards of an index, one deployment each, behind a first one that only names them."""
    arguments = IndexArguments.model_validate(arguments)
    settings = arguments.settings
    per_node = spread(settings.shard_replicas, CPU=settings.cpus_per_shard, GPU=settings.gpus_per_shard)
    shards = [
        serve.deployment(
            ShardSearch,
            name=facts.name,
            ray_actor_options={
                "num_cpus": settings.cpus_per_shard,
                "num_gpus": settings.gpus_per_shard,
                "runtime_env": {"env_vars": _environment(startup.import_modules, settings.cpus_per_shard)},
            },
            max_replicas_per_node=per_node,
            **_replicas(settings.shard_replicas),
            **_bounds(settings),
        )
        for facts in Index.describe(arguments.index).facts.shards
    ]
    # An application is a graph with one root. The last shard is as good as any: each knows of the others nothing.
    *others, last = range(len(shards))
    return shards[last].bind(arguments, last, *(shards[other].bind(arguments, other) for other in others))


def api_application(arguments: ApiArguments | Mapping[str, Any]) -> serve.Application:
    """The API, whose deployment `ingress` gets its blueprint as `user_config`."""
    return api_over(ApiArguments.model_validate(arguments), None)


def api_over(arguments: ApiArguments, blueprint: Blueprint | None) -> serve.Application:
    """The API over a generation."""
    settings = arguments.settings
    metrics = serve.deployment(MetricsPage, name=METRICS, ray_actor_options={"num_cpus": 0}).options(
        version=arguments.digest(), _internal=True
    )
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        ray_actor_options={
            "num_cpus": SMALL_CPUS,
            "runtime_env": {"env_vars": INGRESS_ENVIRONMENT | _environment(startup.import_modules, SMALL_CPUS)},
        },
        user_config=blueprint and blueprint.model_dump(mode="json"),
        max_surge_percent=100,  # the old ones serve until the new ones do, so there has to be room for one more
        max_replicas_per_node=spread(settings.ingress_replicas, room=settings.ingress_replicas + 1, CPU=SMALL_CPUS),
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        **_replicas(settings.ingress_replicas),
        **_bounds(settings),
    ).options(version=arguments.digest(), _internal=True)  # the same one, so a new blueprint restarts nothing
    return ingress.bind(arguments, metrics.bind())


def spread(replicas: int, room: int | None = None, **each: float) -> int | None:
    """Most replicas of a deployment on a node: as few as there can be, so that a lost node takes few of them.

    None, for as many as come: on one node, or where there is room for all only if they are not spread. It goes by the
    nodes of this moment; Serve keeps to it for as long as the deployment is there, even if nodes go.

    Args:
        replicas: of the deployment.
        room: so many there must be room for; None: `replicas`.
        each: what a replica asks a node for, by Ray's name for it.
    """
    if replicas < 2 or not ray.is_initialized():
        return None
    room = room or replicas
    held = [held for node in ray.nodes() if node["Alive"] and (held := _held(node["Resources"], each))]
    for most in range(1, min(replicas, MAX_REPLICAS_PER_NODE_MAX_VALUE + 1)):
        if sum(min(most, there) for there in held) >= room:
            return most
    return None


def _environment(imports: Callable[[], None], cpus: float) -> dict[str, str]:
    """Variables of a replica's worker process, which calls a function of `startup` before it becomes a replica."""
    return {
        # Ray's public field for it, `worker_process_setup_hook`, has no effect for actors (2.60).
        WORKER_PROCESS_SETUP_HOOK_ENV_VAR: f"{imports.__module__}.{imports.__name__}",
        "OMP_NUM_THREADS": str(max(1, int(cpus))),  # Ray sets it too late for what is imported there
    }


def _held(node: Mapping[str, float], each: Mapping[str, float]) -> int:
    """Replicas that a node has room for."""
    return int(min((node.get(name, 0.0) + 1e-9) // amount for name, amount in each.items() if amount))


def _replicas(least: int, most: int | None = None) -> dict[str, Any]:
    if most is None or most <= least:
        return {"num_replicas": least}
    # Of the calls of the ingress, which are few and many texts each: with one and a half under way to a replica at all
    # times it is never idle.
    scaling = AutoscalingConfig(
        min_replicas=least, max_replicas=most, target_ongoing_requests=1.5, upscale_delay_s=10, downscale_delay_s=120
    )
    return {"autoscaling_config": scaling}


def _bounds(settings: ServeSettings) -> dict[str, Any]:
    # The engine's queue is what is bounded; these only keep Serve from queueing without bound before it.
    return {
        "max_ongoing_requests": 2 * settings.max_queue,
        "max_queued_requests": 2 * settings.max_queue,
        "max_constructor_retry_count": CONSTRUCTOR_ATTEMPTS,
        "health_check_period_s": 2,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": settings.request_timeout_s,
    }


# ------------------------------------------------------------------------------------------------- deployments


class Encoder:
    """A replica of the encoder."""

    def __init__(self, arguments: EncoderArguments) -> None:
        from infembed_ray.modeling.encoder import InstructionEncoder
        from infembed_ray.serving.encoding import EncodingEngine

        model = str(existing(arguments.model, "model")) if is_uri(arguments.model) else arguments.model
        described = InstructionEncoder.from_pretrained(model, dimensions=arguments.dimensions, device="meta")
        found = startup.in_background(described.fingerprint)
        if found != arguments.fingerprint:
            raise RuntimeError(
                f"model={arguments.model}: its fingerprint on this node is {found}, where `serve` was started it was "
                f"{arguments.fingerprint}; give all nodes the same checkpoint"
            )
        self._engine = EncodingEngine.load(model, arguments.settings, arguments.dimensions)
        registry = CollectorRegistry()
        registry.register(EngineMetrics(self._engine))
        self._metrics = Reporter(registry)

    async def embed_many(self, items: Sequence[Inputs | list[Query]], timeout_s: float) -> list[Embedded | Exception]:
        """Embeds for several requests: each gets its vectors, or the exception that is its own."""
        self._metrics.start()
        answers = await asyncio.gather(*(self._embed(item, timeout_s) for item in items), return_exceptions=True)
        return [answer if isinstance(answer, (Embedded, *TOLD)) else _told(answer) for answer in answers]

    def _embed(self, item: Inputs | list[Query], timeout_s: float) -> Coroutine[Any, Any, Embedded]:
        if isinstance(item, Inputs):
            return self._engine.embed(*item, timeout_s)
        texts, instructions = zip(*item, strict=True)
        return self._engine.embed_queries(texts, instructions, timeout_s)

    async def ready(self) -> bool:
        """Answers once the model is loaded."""
        self._metrics.start()
        return True


def _told(fault: BaseException) -> Exception:
    """A fault of one item as the ingress can read it, whatever libraries it lacks; in full it is logged here."""
    log.error("a text could not be embedded", exc_info=fault)
    return RuntimeError(in_one_line(fault))


class EngineMetrics:
    """What an encoding engine has done, as `prometheus_client` collects it."""

    def __init__(self, engine: EncodingEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The facts of this moment."""
        facts = self._engine.facts
        yield GaugeMetricFamily("infembed_encoder_waiting", "Texts in the queue.", facts.waiting)
        yield GaugeMetricFamily("infembed_encoder_prefix_bytes", "Memory of cached instructions.", facts.prefix_bytes)
        counted = {**asdict(facts.counters), "prefix_hits": facts.prefix_hits, "prefix_misses": facts.prefix_misses}
        for name, count in counted.items():
            yield CounterMetricFamily(
                f"infembed_encoder_{name}", f"{name.replace('_', ' ')} so far".capitalize(), count
            )


class ShardSearch:
    """A replica of one shard. `others` are the shards that its application has besides."""

    def __init__(self, arguments: IndexArguments, number: int, *others: DeploymentHandle) -> None:
        described = Index.describe(arguments.index)
        if described.version != arguments.version:
            raise InputError(
                f"index={arguments.index}: holds version {described.version} now, `serve` was started with "
                f"{arguments.version}; start `serve` again"
            )
        facts = described.facts
        root = existing(arguments.index, "index", [MANIFEST, facts.shards[number].name])
        changes = ChangeLog(changes_of(root, facts), facts.metadata, facts.dimension)
        base = Shard.open(root, facts.shards[number], gpu=arguments.settings.gpus_per_shard > 0)
        self._shard = LiveShard(base, changes, number, len(facts.shards), facts.folded)
        self._changes = changes.directory
        self._fault: str | None = None
        self._threads = ThreadPoolExecutor(max(1, int(arguments.settings.cpus_per_shard)), "search")
        registry = CollectorRegistry()
        Gauge("infembed_shard_documents", "Documents that searches see.", registry=registry).set_function(
            self._shard.__len__
        )
        Gauge("infembed_shard_sequence", "The last change that searches see.", registry=registry).set_function(
            lambda: self._shard.sequence
        )
        Gauge("infembed_log_sequence", "The last change in the log.", registry=registry).set_function(
            lambda: self._shard.head
        )
        Gauge("infembed_shard_lag", "Changes in the log that searches do not see.", registry=registry).set_function(
            lambda: self._shard.head - self._shard.sequence
        )
        Gauge("infembed_shard_stuck", "1: a damaged log stops this shard's changes.", registry=registry).set_function(
            lambda: self._fault is not None
        )
        Gauge("infembed_shard_delta", "Rows that compaction would save.", registry=registry).set_function(
            lambda: self._shard.delta
        )
        self._metrics = Reporter(registry)
        threading.Thread(target=self._follow, name="follow", daemon=True).start()

    async def search_many(self, queries: Sequence[ShardQuery]) -> list[ShardAnswer | Exception]:
        """As `LiveShard.search_many`."""
        self._metrics.start()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._shard.search_many, queries)

    async def document(self, id: str) -> Document | None:
        """The document of an id."""
        found = self._shard.get(id)
        return None if found is None else Document(found.id, found.text, found.metadata)

    async def ready(self) -> bool:
        """Answers once the shard is open."""
        self._metrics.start()
        return True

    async def fault(self) -> str | None:
        """Why the shard applies no changes, in one line; None: it applies them."""
        return self._fault

    def _follow(self) -> None:
        """Apply changes as they come. A damaged change holds back those after it; the reason is logged once."""
        logged = ""
        while True:
            try:
                self._shard.refresh()
                self._fault, logged = None, ""
            except Exception as error:  # whatever it is: a thread that ends leaves the shard stale without a word
                known = isinstance(error, LogFault)  # clients read it, so it does not name the directory
                self._fault = str(error).removeprefix(f"changes={self._changes}: ") if known else "see the server's log"
                if str(error) != logged:
                    logged = str(error)
                    log.error("the shard serves what it has, without later changes: %s", logged)
            time.sleep(FOLLOW_S if self._fault is None else STUCK_S)


class MetricsPage:
    """Collects the metrics of all replicas."""

    def __init__(self) -> None:
        self._snapshots = Snapshots()

    async def keep(self, replica: str, metrics: list[Metric]) -> None:
        """Take the latest metrics of a replica."""
        self._snapshots.keep(replica, metrics)

    async def page(self) -> bytes:
        """As `Service.metrics`."""
        return self._snapshots.page()


class Reporter:
    """Sends a replica's metrics to the page of all."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, once; called from the replica's event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._report())

    async def _report(self) -> None:
        context = serve.get_replica_context()
        replica = f"{context.app_name}/{context.deployment}/{context.replica_tag}"
        page = _deployment(METRICS, APPLICATION)
        while True:
            with contextlib.suppress(asyncio.TimeoutError, ReplicaLost, QueueFull):  # it is not there yet, or again
                await asyncio.wait_for(page("keep", replica, snapshot(self._registry)), PUSH_S)
            await asyncio.sleep(PUSH_S)


@serve.ingress()
class Ingress:
    """A replica of the HTTP API: `service.Service` by the generation of the day."""

    def __init__(self, arguments: ApiArguments, metrics: DeploymentHandle) -> None:
        settings = arguments.settings
        self._arguments = arguments
        self._page = Remote(metrics)
        self._keys = ApiKeys.load(settings.api_keys_env, settings.api_keys_file)
        if arguments.locked and not self._keys:
            raise RuntimeError(
                f"api_keys_env={settings.api_keys_env}: set where `serve` was started but not on the node of the "
                "ingress, which would be open; set it in the environment of all nodes"
            )
        proxies = float(os.environ.get(LIMIT, "inf"))
        if settings.max_body_mib > proxies:
            raise InputError(
                f"max_body_mib={settings.max_body_mib:g}: Serve's proxies were started with {proxies:g} and keep it; "
                f"end Serve with `serve shutdown` first, or set max_body_mib={proxies:g} or less"
            )
        self._registry = CollectorRegistry()
        self._reporter = Reporter(self._registry)
        self._generation: Generation | None = None
        self._going_over: asyncio.Task[None] | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        limits = Limits(
            max_body_mib=self._arguments.settings.max_body_mib,
            request_timeout_s=self._arguments.settings.request_timeout_s,
        )
        return create_app(
            self,
            lambda: self._now.blueprint.fingerprint,
            self._keys,
            limits,
            registry=self._registry,
            request_ids=self._arguments.settings.ha_proxy,  # Serve's own proxy does it
        )

    async def reconfigure(self, blueprint: Mapping[str, Any]) -> None:
        """Go over to another generation once it answers, between two requests; Serve calls it with `user_config`.

        Until it answers this replica stays with the generation that it has; without one it does not start.
        """
        self._reporter.start()
        if self._going_over is not None:
            self._going_over.cancel()
        generation = self._open(Blueprint.model_validate(blueprint))
        self._going_over = asyncio.get_running_loop().create_task(self._go_over(generation))
        await asyncio.wait([self._going_over], timeout=OPEN_TIMEOUT_S)
        if self._generation is None:
            raise RuntimeError(f"{generation.blueprint.encoder} and {generation.blueprint.index} do not answer")

    async def _go_over(self, generation: Generation) -> None:
        while not await generation.ready():
            await asyncio.sleep(FOLLOW_S)
        self._generation = generation

    def _open(self, blueprint: Blueprint) -> Generation:
        settings = self._arguments.settings
        return Generation(
            blueprint,
            _deployment(ENCODER, blueprint.encoder),
            [_deployment(shard, blueprint.index) for shard in blueprint.shards],
            timeout_s=settings.request_timeout_s,
            encoder_replicas=settings.max_encoder_replicas or settings.encoder_replicas,
            shard_replicas=settings.shard_replicas,
        )

    @property
    def _now(self) -> Generation:
        if self._generation is None:
            raise ReplicaLost(RETRY_AFTER_S)
        return self._generation

    @property
    def card(self) -> schema.Model:
        """As `Service.card`."""
        return self._now.card

    async def embed(
        self, inputs: list[str] | list[list[int]], input_type: schema.InputType, instruction: str | None
    ) -> Embedded:
        """As `Service.embed`."""
        return await self._now.embed(inputs, input_type, instruction)

    async def search(
        self, queries: Sequence[Query], top_k: int, filter: Mapping[str, Any] | None, allow_partial: bool
    ) -> Found:
        """As `Service.search`."""
        return await self._now.search(queries, top_k, filter, allow_partial)

    async def put(self, documents: Sequence[Document]) -> int:
        """As `Service.put`."""
        return await self._now.put(documents)

    async def delete(self, ids: Sequence[str]) -> int:
        """As `Service.delete`."""
        return await self._now.delete(ids)

    async def document(self, id: str) -> Document | None:
        """As `Service.document`."""
        return await self._now.document(id)

    async def ready(self) -> bool:
        """As `Service.ready`."""
        return self._generation is not None and await self._generation.ready()

    async def fault(self) -> str | None:
        """As `Service.fault`."""
        return await self._now.fault()

    async def metrics(self) -> bytes:
        """As `Service.metrics`."""
        page: bytes = await self._page("page")
        return page

    async def served(self) -> tuple[ApiArguments, Blueprint]:
        """What this replica is, and the generation that it answers from."""
        return self._arguments, self._now.blueprint


class Remote:
    """A deployment as `generations.Deployment` wants it: its troubles come as what `service.Service` may raise."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._methods: dict[str, DeploymentHandle] = {}  # making one costs more than calling it
        self._deserted_at: float | None = None

    async def __call__(self, method: str, *arguments: Any) -> Any:
        call = self._methods.get(method)
        if call is None:
            call = self._methods[method] = self._handle.options(method_name=method)
        else:
            self._require_replicas(call)
        answer = asyncio.ensure_future(self._answer(call, arguments))
        try:
            while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
                self._require_replicas(call)  # Serve itself would wait for one as long as it takes
            if answer.cancelled():  # by the other side: our own cancellation is raised by the wait
                raise ReplicaLost(RETRY_AFTER_S)
            return answer.result()
        finally:
            answer.cancel()

    def _require_replicas(self, call: DeploymentHandle) -> None:
        # Serve tells nobody, but its router knows, once it has heard of any.
        if not call.running_replicas_populated() or call._router._asyncio_router._request_router.curr_replicas:
            self._deserted_at = None
            return
        now = time.monotonic()
        self._deserted_at = self._deserted_at or now
        raise ReplicaLost(min(max(now - self._deserted_at, RETRY_AFTER_S), LONGEST_RETRY_AFTER_S))

    async def _answer(self, call: DeploymentHandle, arguments: Sequence[Any]) -> Any:
        try:
            response = call.remote(*arguments)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()  # Serve would let the replica go on
                raise
        except RayTaskError as error:
            raise error.cause from error
        except BackPressureError as error:
            raise QueueFull(RETRY_AFTER_S) from error
        except (RayActorError, DeploymentUnavailableError, TaskCancelledError) as error:
            raise ReplicaLost(RETRY_AFTER_S) from error


def _deployment(name: str, application: str) -> Remote:
    # Unchecked: that would ask the controller from within the event loop, and wait.
    return Remote(serve.get_deployment_handle(name, app_name=application, _check_exists=False))
