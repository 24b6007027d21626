"""The parts of a release as Ray Serve applications: an encoder, the shards of an index, perhaps a reranker.

`infembed-encoder-*`, `infembed-index-*` and `infembed-reranker-*` are named after their content, so several can run at a time.
"""

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
from infembed_ray.retrieval.milvus import is_address
from infembed_ray.serving import startup
from infembed_ray.serving.release import (
    ENCODER,
    RERANKER,
    STORE,
    EncoderArguments,
    IndexArguments,
    ReleaseSpec,
    RerankerArguments,
)
from infembed_ray.serving.replicas import EncoderReplica, RerankerReplica, ShardSearch, StoreSearch

CONSTRUCTOR_ATTEMPTS = 3
"""Attempts to start a replica before its application counts as failed."""
MAX_ONGOING_CALLS = 1024
"""Calls of a replica at a time. Serve's default is 5; the concurrency limit at the edge and the queues inside bound them sooner."""
TARGET_CALLS_PER_ENCODER = 1.5
"""Autoscaling target: calls in flight per encoder replica. A call holds many texts, so with 1.5 a replica is never idle."""

NODE_GROUP = "ray.io/node-group"
"""Label of nodes that KubeRay or the cluster launcher started; those clusters may still grow."""


def encoder_application(arguments: EncoderArguments) -> serve.Application:
    """Build the encoder."""
    settings = arguments.settings
    replicas = settings.encoder_replicas, settings.max_encoder_replicas
    return _with_model(EncoderReplica, ENCODER, settings, *replicas).bind(arguments)


def reranker_application(arguments: RerankerArguments) -> serve.Application:
    """Build the reranker, whose replicas have the resources of the encoder's."""
    return _with_model(RerankerReplica, RERANKER, arguments.settings, arguments.replicas).bind(arguments)


def _with_model(
    replica: type[Any], name: str, settings: ServeSettings, smallest: int, largest: int | None = None
) -> serve.Deployment:
    resources = {"CPU": settings.cpus_per_encoder, "GPU": settings.gpus_per_encoder}
    return deployment(replica, name, settings, startup.import_model_modules, resources, smallest, largest)


def index_application(arguments: IndexArguments) -> serve.Application:
    """Build the shards of an index, one deployment each."""
    settings = arguments.settings
    resources = {"CPU": settings.cpus_per_shard, "GPU": settings.gpus_per_shard}
    in_engine = is_address(arguments.index)
    names = [STORE] if in_engine else [facts.name for facts in Index.describe(arguments.index).facts.shards]
    replica = StoreSearch if in_engine else ShardSearch
    shards = [
        deployment(replica, name, settings, startup.import_modules, resources, settings.shard_replicas)
        for name in names
    ]
    # An application is a graph with one root. Any shard can be the root, because shards do not call each other.
    *others, last = range(len(shards))
    return shards[last].bind(arguments, last, *(shards[other].bind(arguments, other) for other in others))


def require_room(new: ReleaseSpec, current: ReleaseSpec | None = None) -> None:
    """InputError if the cluster cannot hold all replicas of both releases and will not grow: they would wait for ever."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if any(NODE_GROUP in node["Labels"] for node in nodes):
        return
    kept = current.reservations if current else set()
    for resource in ("CPU", "GPU"):
        held = [node["Resources"].get(resource, 0.0) for node in nodes]
        needed = {each for each in new.reservations | kept if each.resource == resource}
        total, largest = sum(each.replicas * each.each for each in needed), max(held)
        if total <= sum(held) + 1e-6 and max(each.each for each in needed) <= largest:
            continue
        most = max(needed - kept or needed, key=lambda one: (one.each > largest, one.replicas * one.each))
        both = f" of {new.versions} and of the current release" if current else ""
        asked = f"{counted(most.replicas, 'replica')} of it; all replicas{both} together need {total:g} {resource}"
        fault = f"{asked}, the cluster has {sum(held):g}, its largest node {largest:g}"
        remedy = "lower the setting or the number of replicas, or add nodes"
        if current:
            remedy += "; or stop the API and start it again: both releases run until the switch"
        raise InputError.of(most.setting, getattr(new.settings, most.setting), fault, remedy)


def spread(replicas: int, room: int | None = None, **per_replica: float) -> int | None:
    """Return `max_replicas_per_node` that spreads replicas over as many nodes as possible, so a lost node takes few.

    None, for no limit: with one node, or if not all replicas have room when they are spread. It depends on the nodes of
    now; Serve keeps it for the life of the deployment.

    Args:
        room: number of replicas that must have room; None: `replicas`.
        per_replica: amount of each Ray resource that a replica reserves.
    """
    if replicas < 2 or not ray.is_initialized():
        return None
    room = room or replicas
    capacities = [
        min((node["Resources"].get(name, 0.0) + 1e-9) // amount for name, amount in per_replica.items() if amount)
        for node in ray.nodes()
        if node["Alive"]
    ]
    for per_node in range(1, min(replicas, ray_compat.MAX_REPLICAS_PER_NODE + 1)):
        if sum(min(per_node, capacity) for capacity in capacities) >= room:
            return per_node
    return None


def environment(imports: Callable[[], None], cpus: float) -> dict[str, str]:
    """Return the environment of a worker process, which calls `imports` before it becomes a replica."""
    return {
        ray_compat.SETUP_HOOK_VARIABLE: f"{imports.__module__}.{imports.__name__}",
        "OMP_NUM_THREADS": str(max(1, int(cpus))),  # Ray sets it too late for the modules imported there
    }


def deployment(
    replica: type[Any],
    name: str,
    settings: ServeSettings,
    imports: Callable[[], None],
    resources: Mapping[str, float],
    smallest: int,
    largest: int | None = None,
    *,
    variables: Mapping[str, str] | None = None,
    room: int | None = None,
    **options: Any,
) -> serve.Deployment:
    """Return a deployment with so many replicas, autoscaled if `largest` is larger, with bounds on its calls, start and end.

    Args:
        imports: as `environment` takes it.
        resources: amount of each Ray resource that a replica reserves, CPU among them.
        variables: more variables of the replicas' environment.
        room: as `spread` takes it.
        options: more options of Serve.
    """
    if largest is None or largest <= smallest:
        options["num_replicas"] = smallest
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=smallest,
            max_replicas=largest,
            target_ongoing_requests=TARGET_CALLS_PER_ENCODER,
            upscale_delay_s=10,
            downscale_delay_s=120,
        )
    cpus, gpus = resources["CPU"], resources.get("GPU", 0.0)
    own = {**(variables or {}), **environment(imports, cpus)}
    return serve.deployment(
        replica,
        name=name,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus, "runtime_env": {"env_vars": own}},
        max_replicas_per_node=spread(largest or smallest, room, **resources),
        max_ongoing_requests=MAX_ONGOING_CALLS,
        max_constructor_retry_count=CONSTRUCTOR_ATTEMPTS,
        health_check_period_s=2,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=settings.request_timeout_s,
        **options,
    )
