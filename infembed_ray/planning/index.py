"""`infembed plan index`: memory, disk, build time and cost of an index, for each FAISS type, and the cheapest that fits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infembed_ray.config.planning import PlanIndexSettings, PlanServeSettings
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.planning import cost
from infembed_ray.planning.backbones import load
from infembed_ray.planning.capacity import GIB
from infembed_ray.planning.cost import Cluster, Demand
from infembed_ray.planning.shard_estimate import BUILD_THREADS, ShardEstimate, estimate
from infembed_ray.planning.tables import as_json as as_json
from infembed_ray.planning.tables import gib, table, usd
from infembed_ray.retrieval import factory as factories
from infembed_ray.training.observability.flops import BackboneFlops

_MAX_SHARDS = 1024


@dataclass(frozen=True)
class EncoderShape:
    """Size of an encoder; `token_flops` are those of one token in a forward pass."""

    name: str
    parameters: int
    dimension: int
    token_flops: float

    @classmethod
    def load(cls, name: str, text_tokens: int) -> EncoderShape:
        """Read the shape of a model directory, hub name or known architecture, without its weights.

        Args:
            text_tokens: tokens of a text, which decide the FLOPs of attention.
        """
        encoder = load(TrainSettings(model=name, records="", output=""))
        backbone = encoder.backbone_of("passage")
        flops = BackboneFlops.count(backbone, encoder.causal)
        pairs = text_tokens / (2 if encoder.causal else 1) * len(flops.windows)
        forward = (flops.token + flops.pair * pairs) / 3  # the backward pass is the other two thirds
        return cls(name, sum(p.numel() for p in backbone.parameters()), encoder.dimension, forward)

    def __str__(self) -> str:
        return f"{self.name}: {self.parameters / 1e9:.3f} B parameters, {self.dimension} dimensions"


@dataclass(frozen=True, kw_only=True)
class IndexOption:
    """An index of `shards` shards on the cheapest nodes that hold one copy of it.

    Attributes:
        usd_month: price of the nodes; None: no node holds a shard.
        obstacles: why it is not chosen; empty if it fits.
    """

    shards: int
    shard: ShardEstimate
    node: str
    nodes: int
    usd_month: float | None
    obstacles: tuple[str, ...]

    @property
    def overrides(self) -> str:
        """The layout as settings on a command line."""
        return f"shards={self.shards} dimensions={self.shard.dimension} factory={self.shard.factory}"


@dataclass(frozen=True)
class IndexPlan:
    """The best option of each dimension and kind of type.

    Attributes:
        encoding: tokens, tokens_per_s of a GPU, hours and usd to encode the corpus; whether the rate is assumed or measured.
        chosen: position of the cheapest option that fits; None: none does.
        asked: position of what `infembed index` builds with these settings; None: it refuses, because of `refusal`.
    """

    model: EncoderShape
    passages: int
    encoding: dict[str, Any]
    options: tuple[IndexOption, ...]
    chosen: int | None
    asked: int | None
    refusal: str | None


def plan(settings: PlanIndexSettings) -> IndexPlan:
    """Compute all layouts and choose the cheapest that fits; nothing is built.

    Raises:
        InputError: the settings do not fit each other or the model.
    """
    model = EncoderShape.load(settings.model, settings.passage_tokens)
    by_kind: dict[tuple[int, str], list[IndexOption]] = {}
    for factory, dimension, shards in layouts(settings, model.dimension):
        by_kind.setdefault((dimension, kind(factory)), []).append(_option(settings, factory, dimension, shards))
    options = [min(found, key=lambda o: (len(o.obstacles), price(o), o.shards)) for found in by_kind.values()]
    chosen = cheapest(options)
    shards = settings.shards or (1 if chosen is None else options[chosen].shards)
    dimension = settings.dimensions or model.dimension
    asked = refusal = None
    try:
        vectors = math.ceil(settings.passages / shards)
        factory = factories.choose(vectors, dimension, settings.memory_gib, shards, settings.factory, settings.vectors)
    except InputError as error:
        refusal = str(error)
    else:
        built = _option(settings, factory, dimension, shards)
        options += [] if built in options else [built]
        asked = options.index(built)
    return IndexPlan(model, settings.passages, _encoding(settings, model), tuple(options), chosen, asked, refusal)


def layouts(settings: PlanIndexSettings | PlanServeSettings, dimension: int) -> Iterator[tuple[str, int, int]]:
    """Yield (factory, dimension, shards): exact search and the types that `infembed index` chooses from.

    Raises:
        InputError: the settings ask for more dimensions than the model has.
    """
    asked = [("dimensions", settings.dimensions), *(("matryoshka", value) for value in settings.matryoshka)]
    for name, value in asked:
        if value is not None and value > dimension:
            raise InputError(f"{name}={value}: the model has {dimension}; give as many or fewer")
    every = {settings.dimensions} if settings.dimensions else {dimension, *settings.matryoshka}
    powers = [2**power for power in range(_MAX_SHARDS.bit_length())]
    precision = settings.vectors if isinstance(settings, PlanIndexSettings) else "float16"
    useful = [n for n in powers if n == 1 or settings.passages / n >= factories.EXACT_BELOW]
    for size in sorted(every, reverse=True):
        for shards in [settings.shards] if settings.shards else useful:
            types = factories.candidates(math.ceil(settings.passages / shards), size, precision)
            for factory in [settings.factory] if settings.factory else dict.fromkeys(["Flat", *types]):
                yield factory, size, shards


def kind(factory: str) -> str:
    """A type without the number of its inverted lists."""
    return re.sub(r"IVF\d+(_HNSW\d+)?", "IVF", factory)


def price(option: IndexOption) -> float:
    """Sort key: an option without a price comes last."""
    return math.inf if option.usd_month is None else option.usd_month


def cheapest(options: Sequence[IndexOption]) -> int | None:
    """Position of the cheapest option without obstacles, the one with the best recall if several cost the same."""
    fitting = [n for n, option in enumerate(options) if not option.obstacles]
    return min(fitting, key=lambda n: (price(options[n]), -options[n].shard.recall), default=None)


def _option(settings: PlanIndexSettings, factory: str, dimension: int, shards: int) -> IndexOption:
    vectors = math.ceil(settings.passages / shards)
    shard = estimate(factory, dimension, vectors, settings.passage_bytes, precision=settings.vectors)
    process = cost.assumed("search_process_gib") * GIB
    need = max(shard.memory + process, shard.peak)
    obstacles = shard.obstacles(settings.recall_floor)
    if settings.memory_gib is not None and shard.memory > settings.memory_gib * GIB:
        obstacles.append(f"a shard takes {gib(shard.memory)} GiB of {settings.memory_gib:g}")
    if shard.build_hours > (longest := cost.assumed("longest_build_h")):
        obstacles.append(f"a shard builds for {shard.build_hours:,.0f} h of {longest:g}")
    placed = [
        (node.monthly(count, shards * shard.disk), count, node.name)
        for node in cost.nodes(settings.node)
        if need <= node.usable and (count := cost.node_count([Demand(shards, shard.memory + process)], node))
    ]
    if not placed:
        largest = max(cost.nodes(settings.node), key=lambda node: node.usable)
        obstacles.append(f"a shard takes {gib(need)} GiB of {gib(largest.usable)} on {largest.name}")
    usd_month, count, node = min(placed, default=(None, 0, ""))
    return IndexOption(
        shards=shards, shard=shard, node=node, nodes=count, usd_month=usd_month, obstacles=tuple(obstacles)
    )


def _encoding(settings: PlanIndexSettings, model: EncoderShape) -> dict[str, Any]:
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    cluster = Cluster.from_settings(settings.hardware, dtype)
    tokens = settings.passages * settings.passage_tokens
    rate = settings.tokens_per_s or cost.assumed("kernel_efficiency") * cluster.peak / model.token_flops
    hours = tokens / (rate * cluster.gpus) / 3600
    return {
        "speed": "assumed" if settings.tokens_per_s is None else "measured",
        "tokens": tokens,
        "tokens_per_s": rate,
        "gpus": f"{cluster.gpus} x {cluster.name}",
        "hours": hours,
        "usd": hours * cluster.gpus * cluster.usd_per_gpu_hour,
    }


def as_text(made: IndexPlan) -> str:
    """Format the plan for people."""
    marks = [">" * (n == made.chosen) + "*" * (n == made.asked) for n in range(len(made.options))]
    rows = [{"": mark, **_columns(option)} for mark, option in zip(marks, made.options, strict=True)]
    encoding = made.encoding
    lines = [
        f"{made.model}; {made.passages:,} passages",
        f"Encoding: {encoding['tokens']:,} tokens at {encoding['tokens_per_s']:,.0f} per second and GPU "
        f"({encoding['speed']}), {encoding['gpus']}: {encoding['hours']:,.1f} h, {encoding['usd']:,.0f} USD",
        "",
        *table(rows),
        "",
        "> the cheapest that fits, * what `infembed index` builds with these settings. GiB: memory of all shards, one copy,",
        f"while searched; disk: GiB of all shards; peak: GiB to build a shard; h: to build a shard with {BUILD_THREADS} threads.",
        "Recall, times and prices are assumptions (planning/hardware.yaml); a build measures its recall.",
    ]
    if made.refusal:
        lines.append(f"`infembed index` would refuse: {made.refusal}")
    if made.chosen is None:
        nearest = min(made.options, key=lambda option: (len(option.obstacles), option.shard.memory * option.shards))
        lines.append(
            f"Nothing fits. Nearest: {nearest.overrides}: {'; '.join(nearest.obstacles)}. Set more shards, a lower "
            "recall_floor, more memory_gib, another node, or matryoshka=[...] of a model trained for it."
        )
    else:
        best = made.options[made.chosen]
        lines.append(
            f"Cheapest that fits: {best.overrides}: {best.nodes} x {best.node}, {usd(best.usd_month)} USD a month"
        )
    return "\n".join(lines)


def _columns(option: IndexOption) -> dict[str, str]:
    """Cells of an option's row by their headings."""
    shard = option.shard
    return {
        "dims": str(shard.dimension),
        "type": shard.factory,
        "shards": str(option.shards),
        "B/vector": f"{shard.memory / shard.vectors:,.0f}",
        "GiB": gib(shard.memory * option.shards),
        "disk": gib(shard.disk * option.shards),
        "peak": gib(shard.peak),
        "h": f"{shard.build_hours:,.2f}",
        "recall": f"{shard.recall:.2f}",
        "nodes": f"{option.nodes} x {option.node}" if option.nodes else "-",
        "USD/month": usd(option.usd_month),
        "fits": "; ".join(option.obstacles) or "yes",
    }
