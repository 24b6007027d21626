"""`infembed plan serve`: replicas, nodes and cost per month of an API that answers a given load in time.

Each tier (ingress, encoder, every shard) is a queue of c servers with service time s and arrival rate L. Its utilisation is
L s / c, and a wait exceeds t with probability C(c, L s) exp(-(c / s - L) t), where C is Erlang's C formula. A search waits
for the slowest of its n shards, whose p99 is about the (1 - 0.01 / n) quantile of one. The p99 of the tiers are added. Both
overestimate: service times vary less than the exponential ones of the formula, and tiers are rarely slow together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from infembed_ray.config.planning import PlanServeSettings
from infembed_ray.config.retrieval import Precision
from infembed_ray.errors import InputError
from infembed_ray.planning import cost
from infembed_ray.planning.capacity import GIB
from infembed_ray.planning.cost import Demand, Node, node_count
from infembed_ray.planning.index import EncoderShape, IndexOption, cheapest, kind, layouts, price
from infembed_ray.planning.shard_estimate import ShardEstimate, estimate
from infembed_ray.planning.tables import as_json as as_json
from infembed_ray.planning.tables import gib, table, usd
from infembed_ray.retrieval.index import IndexFacts
from infembed_ray.storage.steps import find_input
from infembed_ray.training.observability.flops import peak_flops

_TAIL = 0.01
_UTILISATIONS = (0.7, 0.4, 0.2)
"""Utilisations to consider; the lower ones cost more and wait less."""
_ENCODER_VCPUS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Tier:
    """Replicas of one deployment, or of as many deployments as there are shards.

    Attributes:
        replicas: of each deployment.
        vcpus, gpus, memory: of each replica; memory in bytes.
        service, p99: seconds of a call without and with waiting; `busy`: utilisation.
    """

    name: str
    deployments: int
    replicas: int
    vcpus: int
    gpus: int
    memory: float
    service: float
    busy: float
    p99: float

    @property
    def total(self) -> int:
        """Replicas of all deployments."""
        return self.deployments * self.replicas


@dataclass(frozen=True, kw_only=True)
class ServeOption(IndexOption):
    """One way to serve an index.

    Attributes:
        tiers: ingress, encoder, shards.
        p99: seconds of a search.
        disk: bytes of the files of all shard replicas.
    """

    tiers: tuple[Tier, Tier, Tier]
    p99: float
    gpus: int
    disk: float

    @property
    def overrides(self) -> str:
        """The settings of `infembed index` and of `infembed serve` on their command lines."""
        ingress, encoder, search = self.tiers
        on_gpu = " gpus_per_encoder=1" if encoder.gpus else ""
        return (
            f"{super().overrides}; ingress_replicas={ingress.replicas} encoder_replicas={encoder.replicas} "
            f"shard_replicas={search.replicas} cpus_per_encoder={encoder.vcpus} cpus_per_shard={search.vcpus}{on_gpu} "
            "ha_proxy=true"
        )


@dataclass(frozen=True)
class ServePlan:
    """The best option of each dimension and kind of index type; `chosen`: position of the cheapest that fits."""

    model: EncoderShape
    passages: int
    qps: float
    p99_ms: float
    device: str
    options: tuple[ServeOption, ...]
    chosen: int | None
    others: tuple[str, ...] = ()
    """Further collections of the API, which are not planned."""


def plan(settings: PlanServeSettings) -> ServePlan:
    """Compute all options and choose the cheapest that fits; nothing is started.

    Raises:
        InputError: the settings do not fit each other, the model or the index.
    """
    if settings.gpus_per_shard:
        raise InputError(f"gpus_per_shard={settings.gpus_per_shard:g}: shards are planned on CPUs only; leave it at 0")
    settings, measured, precision = _with_index(settings)
    if settings.model is None:
        raise InputError("model is missing: set model=..., or index=... to a published index")
    model = EncoderShape.load(settings.model, settings.query_tokens)
    device = cost.gpu(settings.device, "device")
    encoders = {busy: list(_encoders(settings, busy, model, device)) for busy in _UTILISATIONS}
    whole = settings.dimensions if settings.index and settings.dimensions else model.dimension
    by_kind: dict[tuple[int, str], list[ServeOption]] = {}
    for factory, dimension, shards in layouts(settings, whole):
        vectors = math.ceil(settings.passages / shards)
        shard = estimate(factory, dimension, vectors, settings.passage_bytes, measured, precision)
        found = by_kind.setdefault((dimension, kind(factory)), [])
        for node, busy in itertools.product(cost.nodes(settings.node), _UTILISATIONS):
            front, search = _ingress(settings, busy), _shards(settings, busy, shard, shards, node)
            found += [_option(settings, shard, (front, encoder, search), node, device) for encoder in encoders[busy]]
    options = tuple(min(found, key=lambda option: _rank(option, settings.p99_ms)) for found in by_kind.values())
    return ServePlan(
        model,
        settings.passages,
        settings.qps,
        settings.p99_ms,
        settings.device,
        options,
        cheapest(options),
        tuple(settings.collections),
    )


def _with_index(settings: PlanServeSettings) -> tuple[PlanServeSettings, dict[str, float], Precision]:
    """Take size, layout and model from the index that the settings name, what its build measured, and the vectors' precision."""
    if not settings.index:
        return settings, {}, "float16"
    facts = IndexFacts.read(find_input(settings.index, "index"))
    largest = max(facts.shards, key=lambda shard: shard.passages)
    own = {
        "passages": max(1, facts.passages),
        "shards": len(facts.shards),
        "dimensions": facts.dimension,
        "factory": largest.factory,
        "model": settings.model or facts.model,
    }
    return settings.model_copy(update=own), {**largest.search, "recall": largest.recall_at_10}, facts.vectors


def wait(servers: int, service: float, rate: float, tail: float) -> float:
    """Seconds within which a call starts, except for a share `tail` of calls (Erlang C); infinite under overload.

    Args:
        service: seconds of a call.
        rate: calls per second.
    """
    load = rate * service
    if load >= servers:
        return math.inf
    blocked = 1.0  # Erlang B by its recursion, which does not overflow
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    waits = blocked / (1 - load / servers * (1 - blocked))
    return max(0.0, math.log(waits / tail) / (servers / service - rate)) if waits > 0 else 0.0


def _tier(
    settings: PlanServeSettings,
    busy: float,
    name: str,
    service: float,
    memory: float,
    latency: float,
    deployments: int = 1,
    vcpus: int = 1,
    gpus: int = 0,
    threads: int = 1,
) -> Tier:
    """A tier with the fewest replicas whose utilisation is at most `busy`.

    Args:
        service: seconds that a call occupies a server.
        latency: seconds of a call without waiting.
        threads: most servers in one replica.
    """
    servers = max(settings.least_replicas, math.ceil(settings.qps * service / busy))
    replicas = max(settings.least_replicas, math.ceil(servers / threads))
    each = math.ceil(servers / replicas)
    used = settings.qps * service / (replicas * each)
    p99 = latency + wait(replicas * each, service, settings.qps, _TAIL / deployments)
    return Tier(name, deployments, replicas, vcpus * each, gpus, memory, service, used, p99)


def _ingress(settings: PlanServeSettings, busy: float) -> Tier:
    service = 1 / cost.assumed("requests_per_ingress")
    return _tier(settings, busy, "ingress", service, cost.assumed("search_process_gib") * GIB, service)


def _encoders(settings: PlanServeSettings, busy: float, model: EncoderShape, device: dict[str, Any]) -> Iterator[Tier]:
    """Encoders on CPUs, and on one GPU per replica. A query waits for the batch that runs, then for its own."""
    weights = model.parameters * (2 if settings.dtype == "bfloat16" else 4)
    process = cost.assumed("host_process_gib") * GIB
    flops = settings.query_tokens * model.token_flops
    for vcpus in _ENCODER_VCPUS:
        service = flops / (vcpus * 1e9 * cost.assumed("gemm_gflop_s"))
        yield _tier(settings, busy, "encoder", service, process + weights, 2 * service, vcpus=vcpus)
    peak = peak_flops(device["name"], torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32)
    if peak is not None and weights <= device["memory_gib"] * GIB:
        rate = settings.tokens_per_s or cost.assumed("kernel_efficiency") * peak / model.token_flops
        service = settings.query_tokens / rate
        reading = weights / (device["memory_gb_s"] * 1e9 * cost.assumed("gpu_bandwidth_share"))
        yield _tier(settings, busy, "encoder", service, process, 2 * max(service, reading), gpus=1)


def _shards(settings: PlanServeSettings, busy: float, shard: ShardEstimate, shards: int, node: Node) -> Tier:
    service = shard.search_seconds + shard.reranked * node.read_seconds
    memory = cost.assumed("search_process_gib") * GIB + shard.memory
    return _tier(settings, busy, "shards", service, memory, service, deployments=shards, threads=node.vcpus)


def _option(
    settings: PlanServeSettings,
    shard: ShardEstimate,
    tiers: tuple[Tier, Tier, Tier],
    node: Node,
    device: dict[str, Any],
) -> ServeOption:
    """Place the tiers on nodes of one kind and on GPUs, and price them."""
    search = tiers[-1]
    p99 = sum(tier.p99 for tier in tiers)
    gpus = sum(tier.total * tier.gpus for tier in tiers)
    demands = [Demand(tier.total, tier.memory, tier.vcpus, shard.disk if tier is search else 0.0) for tier in tiers]
    nodes = node_count(demands, node, settings.least_replicas)
    obstacles, usd_month = shard.obstacles(settings.recall_floor), None
    if p99 > settings.p99_ms * 1e-3:
        obstacles.append(f"p99 of {1e3 * p99:,.0f} ms")
    if nodes is None:
        largest = max(tiers, key=lambda tier: tier.memory)
        obstacles.append(f"a replica of {largest.name} takes {gib(largest.memory)} GiB: too much for {node.name}")
    else:  # nodes with disks copy what they search; replicas of a shard share one network volume
        volume = shard.disk * (search.total if node.nvme else search.deployments)
        on_gpus = gpus * device["usd_per_gpu_hour"] * cost.assumed("hours_per_month")
        usd_month = node.monthly(nodes, volume) + on_gpus
    return ServeOption(
        shards=search.deployments,
        shard=shard,
        tiers=tiers,
        p99=p99,
        node=node.name if nodes else "",
        nodes=nodes or 0,
        gpus=gpus,
        disk=search.total * shard.disk,
        usd_month=usd_month,
        obstacles=tuple(obstacles),
    )


def _rank(option: ServeOption, p99_ms: float) -> tuple[float, float, float]:
    """Sort key: fewest obstacles, then least delay beyond the target, then price."""
    return len(option.obstacles), max(0.0, option.p99 - p99_ms * 1e-3), price(option)


def as_text(made: ServePlan) -> str:
    """Format the plan for people."""
    rows = [{"": ">" * (n == made.chosen), **_columns(option)} for n, option in enumerate(made.options)]
    lines = [
        f"{made.model}; {made.passages:,} passages, {made.qps:g} searches a second, p99 within {made.p99_ms:g} ms",
        "",
        *table(rows),
        "",
        f"> the cheapest that fits. GiB: memory of one shard replica; vCPU: of all replicas; GPUs: {made.device}.",
        "Recall, rates and prices are assumptions (planning/hardware.yaml): measure one shard and one replica, then plan again.",
    ]
    if made.others:
        lines.append(
            f"Not planned: the collections {', '.join(made.others)}. Plan each with its index=...: its shards come on top; qps "
            "of the ingress and the encoder is that of all collections."
        )
    if made.chosen is None:
        nearest = min(made.options, key=lambda option: (len(option.obstacles), option.p99))
        lines.append(
            f"Nothing fits. Nearest: {nearest.overrides}: {'; '.join(nearest.obstacles)}. Set a higher p99_ms, a lower "
            "recall_floor, more shards, another node or device, or matryoshka=[...] of a model trained for it."
        )
        return "\n".join(lines)
    best = made.options[made.chosen]
    lines += [
        f"Cheapest that fits: {best.overrides}",
        f"{best.nodes} x {best.node}, {best.gpus} x {made.device}: {usd(best.usd_month)} USD a month; p99 {1e3 * best.p99:.0f} ms",
    ]
    lines += [
        f"{tier.name}: {tier.total} replicas of {gib(tier.memory)} GiB, {tier.vcpus} vCPU, {tier.gpus} GPU; "
        f"{1e3 * tier.service:.2f} ms a call, {tier.busy:.0%} busy, p99 {1e3 * tier.p99:.1f} ms"
        for tier in best.tiers
    ]
    return "\n".join(lines)


def _columns(option: ServeOption) -> dict[str, str]:
    """Cells of an option's row by their headings."""
    ingress, encoder, shards = option.tiers
    return {
        "dims": str(option.shard.dimension),
        "type": option.shard.factory,
        "shards": str(option.shards),
        "recall": f"{option.shard.recall:.2f}",
        "ingress": str(ingress.replicas),
        "encoder": f"{encoder.replicas} x {'GPU' if encoder.gpus else f'{encoder.vcpus} vCPU'}",
        "shard replicas": str(shards.replicas),
        "GiB": gib(shards.memory),
        "vCPU": str(sum(tier.total * tier.vcpus for tier in option.tiers)),
        "disk GiB": gib(option.disk),
        "p99 ms": f"{1e3 * option.p99:,.0f}",
        "nodes": f"{option.nodes} x {option.node}" if option.nodes else "-",
        "GPUs": str(option.gpus),
        "USD/month": usd(option.usd_month),
        "fits": "; ".join(option.obstacles) or "yes",
    }
