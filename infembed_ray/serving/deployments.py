"""The Ray Serve applications: an encoder, the shards of an index, perhaps a reranker, and the API over a release of them.

`infembed-encoder-*`, `infembed-index-*` and `infembed-reranker-*` are named after their content, so several can run at a time. `infembed` is the
HTTP API. Its `user_config` names the encoder and the index that it uses, so a new release does not restart it (blue/green).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig

from infembed_ray import ray_compat
from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.progress import counted
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.stores.address import is_address
from infembed_ray.serving import startup
from infembed_ray.serving.arguments import (
    ENCODER,
    INGRESS,
    INGRESS_CPUS,
    METRICS,
    RERANKER,
    STORE,
    ApiArguments,
    EncoderArguments,
    IndexArguments,
)
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.replicas import Encoder, Ingress, MetricsPage, ShardSearch
from infembed_ray.serving.reranking.arguments import RerankerArguments
from infembed_ray.serving.reranking.replica import Reranker
from infembed_ray.serving.routing.blue_green import ReleaseSpec
from infembed_ray.serving.store_search import StoreSearch

CONSTRUCTOR_ATTEMPTS = 3
"""Attempts to start a replica before its application counts as failed."""
MAX_ONGOING_CALLS = 1024
"""Calls of a replica at a time. Serve's default is 5; the concurrency limit at the edge and the queues inside bound them sooner."""
TARGET_CALLS_PER_ENCODER = 1.5
"""Autoscaling target: calls in flight per encoder replica. A call holds many texts, so with 1.5 a replica is never idle."""

NODE_GROUP = "ray.io/node-group"
"""Label of nodes that KubeRay or the cluster launcher started; those clusters may still grow."""


def encoder_application(arguments: EncoderArguments | Mapping[str, Any]) -> serve.Application:
    """Build the encoder; `serve deploy` passes the arguments as a mapping."""
    arguments = EncoderArguments.model_validate(arguments)
    settings = arguments.settings
    largest = settings.max_encoder_replicas or settings.encoder_replicas
    return serve.deployment(
        Encoder,
        name=ENCODER,
        ray_actor_options={
            "num_cpus": settings.cpus_per_encoder,
            "num_gpus": settings.gpus_per_encoder,
            "runtime_env": {"env_vars": _environment(startup.import_encoder_modules, settings.cpus_per_encoder)},
        },
        max_replicas_per_node=spread(largest, CPU=settings.cpus_per_encoder, GPU=settings.gpus_per_encoder),
        **_replicas(settings.encoder_replicas, largest),
        **_limits(settings),
    ).bind(arguments)


def index_application(arguments: IndexArguments | Mapping[str, Any]) -> serve.Application:
    """Build the shards of an index, one deployment each."""
    arguments = IndexArguments.model_validate(arguments)
    settings = arguments.settings
    per_node = spread(settings.shard_replicas, CPU=settings.cpus_per_shard, GPU=settings.gpus_per_shard)
    in_engine = is_address(arguments.index)
    names = [STORE] if in_engine else [facts.name for facts in Index.describe(arguments.index).facts.shards]
    shards = [
        serve.deployment(
            StoreSearch if in_engine else ShardSearch,
            name=name,
            ray_actor_options={
                "num_cpus": settings.cpus_per_shard,
                "num_gpus": settings.gpus_per_shard,
                "runtime_env": {"env_vars": _environment(startup.import_modules, settings.cpus_per_shard)},
            },
            max_replicas_per_node=per_node,
            **_replicas(settings.shard_replicas),
            **_limits(settings),
        )
        for name in names
    ]
    # An application is a graph with one root. Any shard can be the root, because shards do not call each other.
    *others, last = range(len(shards))
    return shards[last].bind(arguments, last, *(shards[other].bind(arguments, other) for other in others))


def reranker_application(arguments: RerankerArguments | Mapping[str, Any]) -> serve.Application:
    """Build the reranker."""
    arguments = RerankerArguments.model_validate(arguments)
    settings = arguments.rerank
    return serve.deployment(
        Reranker,
        name=RERANKER,
        ray_actor_options={
            "num_cpus": settings.cpus,
            "num_gpus": settings.gpus,
            "runtime_env": {"env_vars": _environment(startup.import_reranker_modules, settings.cpus)},
        },
        max_replicas_per_node=spread(settings.replicas, CPU=settings.cpus, GPU=settings.gpus),
        **_replicas(settings.replicas),
        **_limits(arguments.settings),
    ).bind(arguments)


def api_application(arguments: ApiArguments | Mapping[str, Any]) -> serve.Application:
    """Build the API without a release; the config file sets its `user_config`."""
    return api_over(ApiArguments.model_validate(arguments), None)


def api_over(arguments: ApiArguments, spec: ReleaseSpec | None) -> serve.Application:
    """Build the API over a release."""
    settings = arguments.settings
    metrics = serve.deployment(
        MetricsPage,
        name=METRICS,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": _environment(startup.import_modules, 0)}},
    )
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        ray_actor_options={
            "num_cpus": INGRESS_CPUS,
            "runtime_env": {
                "env_vars": ray_compat.SINGLE_EVENT_LOOP | _environment(startup.import_modules, INGRESS_CPUS)
            },
        },
        user_config=spec and spec.as_json(),
        max_surge_percent=100,  # old replicas serve until the new ones do, which needs room for one more
        max_replicas_per_node=spread(settings.ingress_replicas, room=settings.ingress_replicas + 1, CPU=INGRESS_CPUS),
        **_replicas(settings.ingress_replicas),
        **_limits(settings),
    )
    # The version does not depend on the release, so another release restarts nothing.
    ingress, metrics = (ray_compat.with_version(part, arguments.digest()) for part in (ingress, metrics))
    return ingress.bind(arguments, metrics.bind())


def require_resources(plan: Plan) -> None:
    """InputError if the cluster cannot hold all replicas and will not grow: they would wait for resources for ever."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if any(NODE_GROUP in node["Labels"] for node in nodes):
        return
    for resource in ("CPU", "GPU"):
        held = [node["Resources"].get(resource, 0.0) for node in nodes]
        reserved = [entry[1:] for entry in plan.reservations() if entry[0] == resource]
        total, largest = sum(replicas * each for _, replicas, each in reserved), max(held)
        setting, replicas, each = max(reserved, key=lambda entry: (entry[2] > largest, entry[1] * entry[2]))
        if each > largest or total > sum(held) + 1e-6:
            raise InputError(
                f"{setting}: {counted(replicas, 'replica')} of it; all replicas together need {total:g} {resource}, the cluster has "
                f"{sum(held):g}, its largest node {largest:g}; lower the setting or the number of replicas, or add nodes"
            )


def spread(replicas: int, room: int | None = None, **per_replica: float) -> int | None:
    """Return `max_replicas_per_node` that spreads replicas over as many nodes as possible, so a lost node takes few.

    None, for no limit: with one node, or if not all replicas have room when they are spread. It depends on the nodes that
    are there now; Serve keeps it for the life of the deployment, even if nodes leave.

    Args:
        replicas: number of replicas of the deployment.
        room: number of replicas that must have room; None: `replicas`.
        per_replica: amount of each Ray resource that a replica reserves.
    """
    if replicas < 2 or not ray.is_initialized():
        return None
    room = room or replicas
    capacities = [_capacity(node["Resources"], per_replica) for node in ray.nodes() if node["Alive"]]
    for per_node in range(1, min(replicas, ray_compat.MAX_REPLICAS_PER_NODE + 1)):
        if sum(min(per_node, capacity) for capacity in capacities) >= room:
            return per_node
    return None


def _capacity(node: Mapping[str, float], per_replica: Mapping[str, float]) -> int:
    """Return the number of replicas that a node has room for."""
    return int(min((node.get(name, 0.0) + 1e-9) // amount for name, amount in per_replica.items() if amount))


def _environment(imports: Callable[[], None], cpus: float) -> dict[str, str]:
    """Return the environment of a worker process, which calls `imports` before it becomes a replica."""
    return {
        ray_compat.SETUP_HOOK_VARIABLE: f"{imports.__module__}.{imports.__name__}",
        "OMP_NUM_THREADS": str(max(1, int(cpus))),  # Ray sets it too late for the modules imported there
    }


def _replicas(smallest: int, largest: int | None = None) -> dict[str, Any]:
    if largest is None or largest <= smallest:
        return {"num_replicas": smallest}
    scaling = AutoscalingConfig(
        min_replicas=smallest,
        max_replicas=largest,
        target_ongoing_requests=TARGET_CALLS_PER_ENCODER,
        upscale_delay_s=10,
        downscale_delay_s=120,
    )
    return {"autoscaling_config": scaling}


def _limits(settings: ServeSettings) -> dict[str, Any]:
    return {
        "max_ongoing_requests": MAX_ONGOING_CALLS,
        "max_constructor_retry_count": CONSTRUCTOR_ATTEMPTS,
        "health_check_period_s": 2,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": settings.request_timeout_s,
    }
