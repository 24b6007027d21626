"""`infembed plan serve`: replicas, nodes and USD a month of an API that answers so many searches a second in time.

Every tier (ingress, encoder, each shard) is a queue with c servers of a service time s, asked L times a second:
utilisation L s / c, and a wait that exceeds t with probability C(c, L s) exp(-(c / s - L) t), where C is Erlang's
formula. That holds for times that vary as those of chance do; those of a scan vary less, so it errs on the slow side.
A search waits for the slowest of its shards: the 99th percentile of n of them is about the (1 - 0.01 / n) quantile of
one. The tiers' percentiles are added, which errs on the same side. A GPU answers a batch with one pass or scan; a search
then waits for the one that runs and for its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from infembed_ray.config import PlanServeSettings
from infembed_ray.errors import InputError
from infembed_ray.planning import cost
from infembed_ray.planning.capacity import GIB
from infembed_ray.planning.cost import Node
from infembed_ray.planning.index import Model, aligned, arithmetic, cut, dimensions, gib, kind, layouts, price
from infembed_ray.planning.vectors import IndexType, Line, Place
from infembed_ray.progress import say
from infembed_ray.retrieval.index import IndexFacts
from infembed_ray.storage import existing
from infembed_ray.training.flops import peak_flops

Device = dict[str, Any]
"""A GPU, as hardware.yaml says it."""
_TAIL = 0.01
Fronts = dict[float, tuple["Tier", list["Tier"]]]
"""Share of its time that a replica may be busy -> the ingress, and the encoders to choose from."""
_THREADS = (1, 2, 4, 8, 16)
"""Of an encoder replica on CPUs."""


@dataclass(frozen=True)
class Tier:
    """Replicas of one deployment, all its shards together.

    Attributes:
        name: ingress, encoder or shards.
        place: what its replicas compute on.
        deployments: one, or as many as there are shards.
        replicas: of each deployment.
        threads: vCPUs of a replica; of one on a GPU, 1.
        memory: bytes of a replica, on the host; `gpu_memory` on its GPU.
        per_gpu: replicas that share a GPU; 0: none fits into its memory, or they need none.
        p99: seconds of 99 of 100 calls.
        lines: the arithmetic.
    """

    name: str
    place: Place
    deployments: int
    replicas: int
    threads: int
    memory: float
    gpu_memory: float
    per_gpu: int
    p99: float
    lines: tuple[Line, ...]

    @property
    def all(self) -> int:
        """Replicas of all deployments."""
        return self.deployments * self.replicas


@dataclass(frozen=True)
class Option:
    """One way to serve.

    Attributes:
        dimension, factory, shards, recall: of the index.
        tiers: ingress, encoder, shards.
        p99: seconds of a search, the tiers' added.
        node, nodes: for all that is not on GPUs, and the hosts' part of what is.
        gpus: of the kind asked about.
        disk: bytes of all replicas' files, on nodes with disks of their own.
        usd_month: of nodes, disks and GPUs; None: nothing holds it.
        obstacles: why it is not chosen.
    """

    dimension: int
    factory: str
    shards: int
    recall: float
    tiers: tuple[Tier, ...]
    p99: float
    node: str
    nodes: int
    gpus: int
    disk: float
    usd_month: float | None
    obstacles: tuple[str, ...]

    @property
    def overrides(self) -> str:
        """The settings of `infembed index` and `infembed serve`, as command lines give them."""
        ingress, encoder, search = self.tiers
        named = [
            f"ingress_replicas={ingress.replicas}",
            f"encoder_replicas={encoder.replicas}",
            f"shard_replicas={search.replicas}",
            f"cpus_per_encoder={encoder.threads}",
            f"cpus_per_shard={search.threads}",
            *(["gpus_per_encoder=1"] if encoder.place == "gpu" else []),
            *([f"gpus_per_shard={1 / max(1, search.per_gpu):.4g}"] if search.place == "gpu" else []),
            "ha_proxy=true",
        ]
        return f"shards={self.shards} dimensions={self.dimension} factory={self.factory}; {' '.join(named)}"


@dataclass(frozen=True)
class Report:
    """All ways to serve.

    Attributes:
        model: that encodes queries.
        passages, qps, p99_ms, device: that was asked for.
        options: one of each dimension, kind of type and place.
        chosen: index of the cheapest that fits; None: none does.
    """

    model: Model
    passages: int
    qps: float
    p99_ms: float
    device: str
    options: tuple[Option, ...]
    chosen: int | None


def run(settings: PlanServeSettings, as_json: bool = False) -> None:
    """Print what an API takes; nothing is started.

    Raises:
        InputError: the settings do not fit one another, the model or the index.
    """
    made = plan(settings)
    say(json.dumps(asdict(made), indent=2) if as_json else as_text(made))


def plan(settings: PlanServeSettings) -> Report:
    """All ways to serve, and the cheapest that fits."""
    settings, facts = _of_index(settings)
    if settings.model is None:
        raise InputError("model is missing: set model=..., or index=... to one that is there")
    model = Model.of(settings.model, settings.query_tokens)
    whole = facts.dimension if facts else model.dimension
    device = cost.known(settings.device, "device")
    fronts = {
        busy: (
            ingress(settings, busy),
            [*encoders(settings, model, busy), *gpu_encoders(settings, model, device, busy)],
        )
        for busy in (cost.assumed("busy_share"), 0.4, 0.2)
    }
    options: list[Option] = []
    for dimension in dimensions(settings, settings.dimensions, whole):
        found: dict[tuple[str, Place], list[Option]] = {}
        for shards, factory in layouts(settings.passages, dimension, settings.shards, settings.factory):
            of = IndexType.of(factory, dimension)
            if facts:
                of = of.as_built(max(facts.shards, key=lambda shard: shard.passages))
            for place in _places(of):
                option = _cheapest(settings, of, shards, place, fronts, device, whole)
                found.setdefault((kind(factory), place), []).append(option)
        options += [min(ways, key=partial(_order, settings)) for ways in found.values()]
    fitting = [n for n, option in enumerate(options) if not option.obstacles]
    chosen = min(fitting, key=lambda n: (price(options[n].usd_month), -options[n].recall), default=None)
    return Report(model, settings.passages, settings.qps, settings.p99_ms, settings.device, tuple(options), chosen)


def _of_index(settings: PlanServeSettings) -> tuple[PlanServeSettings, IndexFacts | None]:
    """The settings with what an index that is there already says for itself."""
    if not settings.index:
        return settings, None
    facts = IndexFacts.read(existing(settings.index, "index"))
    largest = max(facts.shards, key=lambda shard: shard.passages)
    own = {
        "passages": max(1, facts.passages),
        "shards": len(facts.shards),
        "dimensions": facts.dimension,
        "factory": largest.factory,
        "model": settings.model or facts.model,
    }
    return settings.model_copy(update=own), facts


def _places(of: IndexType) -> tuple[Place, ...]:
    """A graph is followed on CPUs only, and vectors on disk are read by them."""
    return ("cpu",) if of.graph_m or of.lossy else ("cpu", "gpu")


# --------------------------------------------------------------------------------------------------------- tiers


def wait(servers: int, service: float, rate: float, tail: float) -> float:
    """Seconds that a call waits at most, but for the share `tail` of calls (Erlang C); infinite where they cannot cope.

    Args:
        servers: c.
        service: seconds of a call.
        rate: calls a second.
        tail: share of the calls that may wait longer.
    """
    load = rate * service
    if load >= servers:
        return math.inf
    blocked = 1.0  # Erlang B, by its recursion, which does not overflow
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    waits = blocked / (1 - load / servers * (1 - blocked))
    return max(0.0, math.log(waits / tail) / (servers / service - rate)) if waits > 0 else 0.0


def _queue(servers: int, service: float, settings: PlanServeSettings, tail: float) -> Line:
    waiting = wait(servers, service, settings.qps, tail)
    how = (
        f"{servers} servers, {settings.qps:g}/s x {1e3 * service:.2f} ms = {settings.qps * service / servers:.0%} busy"
    )
    return Line(f"wait of 1 - {tail:.2g} of calls", how, waiting, "s")


def ingress(settings: PlanServeSettings, busy: float) -> Tier:
    """The HTTP API."""
    rate, own = cost.assumed("requests_per_ingress"), 1e-3 * cost.assumed("ingress_ms")
    service = 1 / rate
    servers = max(settings.least_replicas, math.ceil(settings.qps * service / busy))
    queue = _queue(servers, service, settings, _TAIL)
    lines = (Line("parsing, hops, merging", "assumed", own, "s"), queue)
    memory = cost.assumed("search_process_gib") * GIB
    return Tier("ingress", "cpu", 1, servers, 1, memory, 0.0, 0, own + queue.value, lines)


def encoders(settings: PlanServeSettings, model: Model, busy: float) -> Iterator[Tier]:
    """What encodes queries, on CPUs: of replicas with more and more threads."""
    for threads in _THREADS:
        rate = threads * cost.assumed("gemm_gflop_s") * 1e9
        service = settings.query_tokens * model.token_flops / rate
        servers = max(settings.least_replicas, math.ceil(settings.qps * service / busy))
        queue = _queue(servers, service, settings, _TAIL)
        how = f"{settings.query_tokens} x {model.token_flops / 1e9:.3f} GFLOP / {rate / 1e9:g} GFLOP/s"
        lines = (
            Line(f"a query, {threads} thread{'s' * (threads > 1)}", how, service, "s"),
            queue,
            Line("encoding", "the pass that runs, its own, the wait", 2 * service + queue.value, "s"),
        )
        memory = cost.assumed("host_process_gib") * GIB + _weights(settings, model)
        yield Tier("encoder", "cpu", 1, servers, threads, memory, 0.0, 0, lines[-1].value, lines)


def gpu_encoders(settings: PlanServeSettings, model: Model, device: Device, busy: float) -> Iterator[Tier]:
    """The same of one GPU a replica; none where its peak in this precision is not known."""
    peak = peak_flops(device["name"], torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32)
    if peak is None:
        return
    rate = settings.tokens_per_s or cost.assumed("kernel_efficiency") * peak / model.token_flops
    service = settings.query_tokens / rate
    weights = _weights(settings, model)
    reading = weights / (device["memory_gb_s"] * 1e9 * cost.assumed("gpu_bandwidth_share"))
    servers = max(settings.least_replicas, math.ceil(settings.qps * service / busy))
    queue = _queue(servers, service, settings, _TAIL)
    lines = (
        Line("a query", f"{settings.query_tokens} tokens / {rate:,.0f} tokens/s", service, "s"),
        Line("a pass reads all weights", f"{gib(weights)} GiB from the GPU's memory", reading, "s"),
        queue,
        Line("encoding", "the pass that runs, its own, the wait", 2 * max(service, reading) + queue.value, "s"),
    )
    memory = cost.assumed("host_process_gib") * GIB
    fits = int(weights <= device["memory_gib"] * GIB)
    yield Tier("encoder", "gpu", 1, servers, 1, memory, weights, fits, lines[-1].value, lines)


def _weights(settings: PlanServeSettings, model: Model) -> int:
    return model.parameters * (2 if settings.dtype == "bfloat16" else 4)


def search(
    settings: PlanServeSettings, of: IndexType, shards: int, place: Place, node: Node, device: Device, busy: float
) -> Tier:
    """All shards, each with its replicas."""
    vectors = math.ceil(settings.passages / shards)
    lines = of.search(vectors, place, device["memory_gb_s"] * 1e9)
    service = lines[-1].value
    tail = _TAIL / shards
    process = cost.assumed("search_process_gib") * GIB
    held = of.memory(vectors)[-1].value
    if place == "gpu":
        batch = cost.assumed("gpu_batch")
        replicas = max(settings.least_replicas, math.ceil(settings.qps * service / batch / busy))
        queue = _queue(replicas, service / batch, settings, tail)
        lines += [queue, Line("searching", "the scan that runs, its own, the wait", 2 * service + queue.value, "s")]
        here = int(device["memory_gib"] * GIB // held)
        return Tier("shards", place, shards, replicas, 1, process, held, here, lines[-1].value, tuple(lines))
    if of.lossy:
        reading = of.reranked * node.read_seconds
        how = f"{of.reranked} x {1e6 * node.read_seconds:g} us, {node.name}"
        lines += [Line("vectors to rank again, from disk", how, reading, "s")]
        service += reading
    servers = max(settings.least_replicas, math.ceil(settings.qps * service / busy))
    replicas = max(settings.least_replicas, math.ceil(servers / node.vcpus))
    threads = math.ceil(servers / replicas)
    queue = _queue(replicas * threads, service, settings, tail)
    lines += [queue, Line("searching", "the sum", service + queue.value, "s")]
    return Tier("shards", place, shards, replicas, threads, process + held, 0.0, 0, lines[-1].value, tuple(lines))


# ------------------------------------------------------------------------------------------------------ layouts


def _cheapest(
    settings: PlanServeSettings,
    of: IndexType,
    shards: int,
    place: Place,
    fronts: Fronts,
    device: Device,
    whole: int,
) -> Option:
    """An index on the nodes, by the encoder and with as many replicas as cost least while it answers in time.

    Replicas may be busy 70 % of their time; where answers come too late, less.
    """
    vectors = math.ceil(settings.passages / shards)
    fixed = [*cut(settings, settings.dimensions, of.dimension, whole)]
    if refusal := of.obstacle(vectors):
        fixed.append(refusal)
    if of.recall < settings.recall_floor:
        fixed.append(f"recall of about {of.recall:g}")
    ways = []
    for node in cost.nodes(settings.node):
        for busy, (front, encoders) in fronts.items():
            shard = search(settings, of, shards, place, node, device, busy)
            ways += [_priced(settings, of, (front, encoder, shard), node, device, fixed) for encoder in encoders]
    return min(ways, key=partial(_order, settings))


def _order(settings: PlanServeSettings, option: Option) -> tuple[float, float, float]:
    """Fewest obstacles first; of those too late the earliest, of others the cheapest."""
    late = max(0.0, option.p99 - settings.p99_ms * 1e-3)
    return len(option.obstacles), late, price(option.usd_month)


def _priced(
    settings: PlanServeSettings,
    of: IndexType,
    tiers: tuple[Tier, ...],
    node: Node,
    device: Device,
    fixed: list[str],
) -> Option:
    obstacles = [*fixed]
    _, encoder, shard = tiers
    p99 = sum(tier.p99 for tier in tiers)
    if p99 > settings.p99_ms * 1e-3:
        obstacles.append(f"p99 of {1e3 * p99:,.0f} ms")
    on_gpus = [tier for tier in (encoder, shard) if tier.place == "gpu"]
    obstacles += [
        f"a replica of {tier.name} takes {gib(tier.gpu_memory)} GiB of a GPU's {device['memory_gib']:g}"
        for tier in on_gpus
        if not tier.per_gpu
    ]
    gpus = sum(math.ceil(tier.all / max(1, tier.per_gpu)) for tier in on_gpus)
    vectors = math.ceil(settings.passages / shard.deployments)
    files = of.disk(vectors, settings.passage_bytes)[-1].value
    disk = shard.all * files
    nodes = _nodes(tiers, node, files, settings.least_replicas)
    usd = None
    if nodes is None:
        largest = max(tiers, key=lambda tier: tier.memory)
        obstacles.append(
            f"a replica of {largest.name} takes {gib(largest.memory)} GiB and {largest.threads} vCPUs: too much for {node.name}"
        )
    else:
        # Nodes with disks of their own copy what they search; one network volume of a shard serves all its replicas.
        volume = disk if node.nvme else shard.deployments * files
        usd = node.monthly(nodes, volume) + gpus * device["usd_per_gpu_hour"] * cost.assumed("hours_per_month")
    return Option(
        dimension=of.dimension,
        factory=of.factory,
        shards=shard.deployments,
        recall=of.recall,
        tiers=tiers,
        p99=p99,
        node=node.name if nodes else "",
        nodes=nodes or 0,
        gpus=gpus,
        disk=disk,
        usd_month=usd,
        obstacles=tuple(obstacles),
    )


def _nodes(tiers: tuple[Tier, ...], node: Node, files: float, least: int) -> int | None:
    """Nodes of a kind that hold all replicas; None: one of them is too large for any.

    The most of: what memory and vCPUs add up to, shard replicas by what fits into one node, and as many as may not fail
    together.
    """
    if any(tier.memory > node.usable or tier.threads > node.vcpus for tier in tiers):
        return None
    shard = tiers[-1]
    fit = [node.usable // shard.memory, node.vcpus // shard.threads]
    if node.nvme:
        fit.append(max(1, node.nvme // files))  # what is left over lies on a volume
    return max(
        least,
        math.ceil(sum(tier.all * tier.memory for tier in tiers) / node.usable),
        math.ceil(sum(tier.all * tier.threads for tier in tiers) / node.vcpus),
        math.ceil(shard.all / min(fit)),
    )


# --------------------------------------------------------------------------------------------------- how it is shown


def as_text(report: Report) -> str:
    """The report for people: a table of all options, and the arithmetic of the cheapest."""
    model = report.model
    lines = [
        f"{model.name}: {model.parameters / 1e9:.3f} B parameters, {model.dimension} dimensions; "
        f"{report.passages:,} passages, {report.qps:g} searches a second, 99 of 100 within {report.p99_ms:g} ms",
        "",
        *aligned([_HEADER, *(_row(report, n) for n in range(len(report.options)))]),
        "",
        f"> the cheapest that fits. GiB: of one shard replica; vCPU: of all replicas; GPUs: {report.device}; on: of the shards.",
        "Recall, rates and prices are assumptions (planning/hardware.yaml): measure one shard and one replica, then plan again.",
    ]
    if report.chosen is None:
        nearest = min(report.options, key=lambda o: (len(o.obstacles), o.p99))
        lines.append(
            f"Nothing fits. Nearest: {nearest.overrides}: {'; '.join(nearest.obstacles)}. Give more p99_ms, a lower "
            "recall_floor, more shards, another node or device, or matryoshka=[...] of a model trained for it."
        )
        return "\n".join(lines)
    best = report.options[report.chosen]
    lines += [
        f"Cheapest that fits: {best.overrides}",
        f"{best.nodes} x {best.node}, {best.gpus} x {report.device}: {price(best.usd_month):,.0f} USD a month; "
        f"p99 {1e3 * best.p99:.0f} ms",
    ]
    for tier in best.tiers:
        many = f"{tier.deployments} x {tier.replicas}" if tier.deployments > 1 else str(tier.replicas)
        memory = gib(tier.memory) + (f" + {gib(tier.gpu_memory)} on a GPU" if tier.place == "gpu" else "")
        lines += [
            "",
            f"{tier.name}: {many} replicas of {memory} GiB, {tier.threads} vCPU; p99 {1e3 * tier.p99:.1f} ms",
            *arithmetic(tier.lines),
        ]
    vectors = math.ceil(report.passages / best.shards)
    return "\n".join(
        [
            *lines,
            "",
            f"A shard: {vectors:,} vectors",
            *arithmetic(IndexType.of(best.factory, best.dimension).memory(vectors)),
        ]
    )


_HEADER = (
    *("", "dims", "type", "on", "shards", "recall", "ingress", "encoder", "shard replicas", "GiB", "vCPU", "disk GiB"),
    *("p99 ms", "nodes", "GPUs", "USD/month", "fits"),
)


def _row(report: Report, number: int) -> tuple[str, ...]:
    option = report.options[number]
    front, encoder, shard = option.tiers
    return (
        ">" * (number == report.chosen),
        str(option.dimension),
        option.factory,
        shard.place,
        str(option.shards),
        f"{option.recall:.2f}",
        str(front.replicas),
        f"{encoder.replicas} x {'GPU' if encoder.place == 'gpu' else f'{encoder.threads} vCPU'}",
        str(shard.replicas),
        gib(shard.memory + shard.gpu_memory),
        str(sum(tier.all * tier.threads for tier in option.tiers)),
        gib(option.disk),
        f"{1e3 * option.p99:,.0f}",
        f"{option.nodes} x {option.node}" if option.nodes else "-",
        str(option.gpus),
        "-" if option.usd_month is None else f"{option.usd_month:,.0f}",
        "; ".join(option.obstacles) or "yes",
    )
