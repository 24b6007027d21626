"""`infembed plan index`: what an index takes to build and to hold, in every FAISS type worth a look, and the cheapest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from infembed_ray.config import PlanIndexSettings, PlannedCollection, TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.planning import cost
from infembed_ray.planning.backbones import load
from infembed_ray.planning.capacity import FLOAT, GIB
from infembed_ray.planning.cost import Cluster
from infembed_ray.planning.vectors import IndexType, Line
from infembed_ray.progress import say
from infembed_ray.retrieval import factory as types
from infembed_ray.training.flops import BackboneFlops, peak_flops

_SHARDS = tuple(n for power in range(11) for n in (2**power, 3 * 2 ** (power - 1)) if power > 1 or n == 2**power)
"""Numbers of shards that are looked at: 1, 2, 4, 6, 8, 12, ..."""
THREADS = 16
"""That build a shard."""


@dataclass(frozen=True)
class Model:
    """An encoder as a planner sees it: name, number of its parameters, dimension, FLOPs of a token in a forward pass."""

    name: str
    parameters: int
    dimension: int
    token_flops: float

    @classmethod
    def of(cls, name: str, text_tokens: int) -> Model:
        """A directory, a hub name or a known architecture; nothing is loaded but its shape.

        Args:
            name: of the model.
            text_tokens: of a text, which decide how much attention adds.
        """
        encoder = load(TrainSettings(model=name, records="", output=""))
        backbone = encoder.backbone_of("passage")
        flops = BackboneFlops.of(backbone, encoder.causal)
        pairs = text_tokens / (2 if encoder.causal else 1) * len(flops.windows)
        forward = (flops.token + flops.pair * pairs) / 3  # the other two thirds are the backward pass
        return cls(name, sum(p.numel() for p in backbone.parameters()), encoder.dimension, forward)


@dataclass(frozen=True)
class Option:
    """One way to lay an index out.

    Attributes:
        dimension: of the vectors.
        factory: of every shard, as FAISS spells it.
        shards: of the index.
        vectors: of a shard.
        recall: recall@10, assumed.
        memory, disk, building: arithmetic of a shard; the last line is the sum (bytes, bytes, seconds of a thread).
        training: vectors of a shard that training takes.
        peak: bytes of a task that builds a shard.
        node, nodes: that hold one copy of all shards.
        usd_month: of these; None: nothing holds it.
        obstacles: why it is not chosen; empty: it could be.
    """

    dimension: int
    factory: str
    shards: int
    vectors: int
    recall: float
    memory: tuple[Line, ...]
    disk: tuple[Line, ...]
    building: tuple[Line, ...]
    training: int
    peak: float
    node: str
    nodes: int
    usd_month: float | None
    obstacles: tuple[str, ...]

    @property
    def overrides(self) -> str:
        """The settings, as a command line gives them."""
        return f"shards={self.shards} dimensions={self.dimension} factory={self.factory}"


@dataclass(frozen=True)
class Report:
    """All ways to lay an index out.

    Attributes:
        model: that encodes the corpus.
        passages: of it.
        encoding: arithmetic; the last line is USD.
        speed: what its time is made of.
        options: one of each dimension and kind of type.
        chosen: index of the cheapest that fits; None: none does.
        asked: index of what `infembed index` builds with these settings; None: it would refuse, for `refusal`.
    """

    model: Model
    passages: int
    encoding: tuple[Line, ...]
    speed: Literal["assumed", "measured"]
    options: tuple[Option, ...]
    chosen: int | None
    asked: int | None
    refusal: str | None


def run(settings: PlanIndexSettings, as_json: bool = False) -> None:
    """Print what an index takes; nothing is built.

    Raises:
        InputError: the settings do not fit one another or the model.
    """
    made = plan(settings)
    say(json.dumps(asdict(made), indent=2) if as_json else as_text(made))


def plan(settings: PlanIndexSettings) -> Report:
    """All ways to lay an index out, and the cheapest that fits."""
    model = Model.of(settings.model, settings.passage_tokens)
    options = []
    for dimension in dimensions(settings, settings.dimensions, model.dimension):
        found: dict[str, list[Option]] = {}
        for shards, factory in layouts(settings.passages, dimension, settings.shards, settings.factory):
            option = _cheapest(settings, model, dimension, shards, factory)
            found.setdefault(kind(factory), []).append(option)
        options += [min(of, key=lambda o: (len(o.obstacles), price(o.usd_month), o.shards)) for of in found.values()]
    fitting = [n for n, option in enumerate(options) if not option.obstacles]
    chosen = min(fitting, key=lambda n: (price(options[n].usd_month), -options[n].recall), default=None)
    shards = settings.shards or (options[chosen].shards if chosen is not None else 1)
    dimension = settings.dimensions or model.dimension
    refusal = asked = None
    try:
        factory = settings.factory or types.choose(
            math.ceil(settings.passages / shards), dimension, settings.memory_gib, shards
        )
    except InputError as error:
        refusal = str(error)
    else:
        own = _cheapest(settings, model, dimension, shards, factory)
        same = (n for n, o in enumerate(options) if (o.dimension, o.shards, o.factory) == (dimension, shards, factory))
        asked = next(same, None)
        if asked is None:
            options.append(own)
            asked = len(options) - 1
    encoding, speed = encoding_of(settings, model)
    return Report(model, settings.passages, encoding, speed, tuple(options), chosen, asked, refusal)


def dimensions(settings: PlannedCollection, asked: int | None, whole: int) -> list[int]:
    """That are looked at: the one asked for, or the model's and those that it may be cut to.

    Raises:
        InputError: more than the model has.
    """
    for name, value in [("dimensions", asked), *(("matryoshka", value) for value in settings.matryoshka)]:
        if value is not None and value > whole:
            raise InputError(f"{name}={value}: the model has {whole}; give as many or fewer")
    if asked is not None:
        return [asked]
    others = settings.matryoshka or tuple(d for d in (1024, 512, 256) if 2 * d <= whole)
    return [whole, *sorted(set(others) - {whole}, reverse=True)]


def cut(settings: PlannedCollection, asked: int | None, dimension: int, whole: int) -> tuple[str, ...]:
    """An obstacle, where a model would be cut to dimensions that nobody says it was trained for."""
    if dimension in (whole, asked) or dimension in settings.matryoshka:
        return ()
    return (f"needs a model trained for it: matryoshka=[{dimension}]",)


def layouts(passages: int, dimension: int, shards: int, factory: str | None) -> Iterator[tuple[int, str]]:
    """(shards, factory) that are looked at: those that `infembed index` chooses from, and exact search."""
    for count in (shards,) if shards else _SHARDS:
        vectors = math.ceil(passages / count)
        if count > 1 and not shards and vectors < types.EXACT_BELOW:
            return
        found = [factory] if factory else dict.fromkeys(["Flat", *types.candidates(vectors, dimension)])
        yield from ((count, name) for name in found)


def kind(factory: str) -> str:
    """What a type is called whatever the number of its lists."""
    return ",".join(
        part.split("_")[0].rstrip("0123456789") if part.startswith("IVF") else part for part in factory.split(",")
    )


def price(usd: float | None) -> float:
    """To be put in order by: what cannot be had costs most."""
    return math.inf if usd is None else usd


def _cheapest(settings: PlanIndexSettings, model: Model, dimension: int, shards: int, factory: str) -> Option:
    """A layout on the nodes that hold it for the least money."""
    of = IndexType.of(factory, dimension)
    vectors = math.ceil(settings.passages / shards)
    memory = of.memory(vectors)
    disk = of.disk(vectors, settings.passage_bytes)
    need = memory[-1].value + cost.assumed("search_process_gib") * GIB
    obstacles = [*cut(settings, settings.dimensions, dimension, model.dimension)]
    if refusal := of.obstacle(vectors):
        obstacles.append(refusal)
    if settings.memory_gib is not None and memory[-1].value > settings.memory_gib * GIB:
        obstacles.append(f"a shard takes {memory[-1].value / GIB:,.0f} GiB of {settings.memory_gib:g}")
    if of.recall < settings.recall_floor:
        obstacles.append(f"recall of about {of.recall:g}")
    training = of.training(vectors)
    peak = memory[-1].value + training * FLOAT * (dimension + of.coded * of.rotated)
    building = of.build(vectors)
    if building[-1].value > THREADS * 3600 * (longest := cost.assumed("longest_build_h")):
        obstacles.append(f"a shard builds for {building[-1].value / THREADS / 3600:,.0f} h of {longest:g}")
    priced = []
    for node in cost.nodes(settings.node):
        here = int(node.usable // need)
        if here and peak <= node.usable:
            count = math.ceil(shards / here)
            priced.append((node.monthly(count, shards * disk[-1].value), count, node.name))
    if not priced:
        largest = max(cost.nodes(settings.node), key=lambda node: node.usable)
        most = max(need, peak)
        obstacles.append(f"a shard takes {most / GIB:,.0f} GiB of {largest.usable / GIB:,.0f} on {largest.name}")
    usd, count, name = min(priced, default=(None, 0, ""))
    return Option(
        dimension=dimension,
        factory=factory,
        shards=shards,
        vectors=vectors,
        recall=of.recall,
        memory=tuple(memory),
        disk=tuple(disk),
        building=tuple(building),
        training=training,
        peak=peak,
        node=name,
        nodes=count,
        usd_month=usd,
        obstacles=tuple(obstacles),
    )


def encoding_of(settings: PlanIndexSettings, model: Model) -> tuple[tuple[Line, ...], Literal["assumed", "measured"]]:
    """What it takes to encode the corpus."""
    device = cost.known(settings.hardware.device)
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    cluster = Cluster.of(settings.hardware, peak_flops(device["name"], dtype))
    tokens = settings.passages * settings.passage_tokens
    lines = [Line("tokens", f"{settings.passages:,} x {settings.passage_tokens}", tokens, "tokens")]
    if settings.tokens_per_s is None:
        share = cost.assumed("kernel_efficiency")
        rate = share * cluster.peak / model.token_flops
        how = f"{share:g} x {cluster.peak / 1e12:g} TFLOP/s / {model.token_flops / 1e9:,.3f} GFLOP a token"
        lines.append(Line("a GPU (assumed)", how, rate, "tokens/s"))
    else:
        rate = settings.tokens_per_s
        lines.append(Line("a GPU (measured)", "tokens_per_s", rate, "tokens/s"))
    hours = tokens / (rate * cluster.gpus) / 3600
    lines.append(Line("time", f"tokens / rate / {cluster.gpus} {cluster.name}", hours, "h"))
    usd = hours * cluster.gpus * cluster.usd_per_gpu_hour
    lines.append(Line("price", f"x {cluster.gpus} x {cluster.usd_per_gpu_hour:g} USD/h", usd, "USD"))
    return tuple(lines), "assumed" if settings.tokens_per_s is None else "measured"


# --------------------------------------------------------------------------------------------------- how it is shown


def as_text(report: Report) -> str:
    """The report for people: the encoding, a table of all options, the arithmetic of the cheapest."""
    model = report.model
    lines = [
        f"{model.name}: {model.parameters / 1e9:.3f} B parameters, {model.dimension} dimensions; {report.passages:,} passages",
        "",
        f"Encoding ({report.speed})",
        *arithmetic(report.encoding),
        "",
        *aligned([_HEADER, *(_row(report, n) for n in range(len(report.options)))]),
        "",
        "> the cheapest that fits, * what `infembed index` builds with these settings. GiB: memory of all shards, one copy,",
        "while searched; disk of all shards; peak: memory of a task that builds a shard; h: of 16 threads that build one.",
        "Recall, times and prices are assumptions (planning/hardware.yaml); a build measures its recall.",
    ]
    if report.refusal:
        lines.append(f"`infembed index` would refuse: {report.refusal}")
    if report.chosen is None:
        nearest = min(report.options, key=lambda o: (len(o.obstacles), o.memory[-1].value * o.shards))
        lines.append(
            f"Nothing fits. Nearest: {nearest.overrides}: {'; '.join(nearest.obstacles)}. Set more shards, a lower "
            "recall_floor, more memory_gib, another node, or matryoshka=[...] of a model trained for it."
        )
        return "\n".join(lines)
    best = report.options[report.chosen]
    return "\n".join(
        [
            *lines,
            f"Cheapest that fits: {best.overrides}: {best.nodes} x {best.node}, {best.usd_month:,.0f} USD a month",
            "",
            f"A shard of it: {best.vectors:,} vectors",
            *arithmetic(best.memory),
            *arithmetic(best.disk),
            *arithmetic(best.building),
        ]
    )


def arithmetic(lines: Sequence[Line]) -> Iterator[str]:
    """What = how = value, in columns."""
    yield from aligned([("", line.what, line.how, "=", amount(line.value, line.unit)) for line in lines])


def amount(value: float, unit: str) -> str:
    """A quantity for people, in a unit of its size."""
    if unit == "B":
        return f"{value / GIB:,.2f} GiB" if value >= GIB / 100 else f"{value:,.0f} B"
    if unit == "s":
        return (
            f"{value / 3600:,.1f} h" if value >= 3600 else f"{value:,.1f} s" if value >= 1 else f"{1e3 * value:.2f} ms"
        )
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:,.2f} {unit}"


_HEADER = (
    *("", "dims", "type", "shards", "B/vector", "GiB", "disk", "trained on", "peak", "h", "recall"),
    *("nodes", "USD/month", "fits"),
)


def _row(report: Report, number: int) -> tuple[str, ...]:
    option = report.options[number]
    return (
        ">" * (number == report.chosen) + "*" * (number == report.asked),
        str(option.dimension),
        option.factory,
        str(option.shards),
        f"{option.memory[0].value:,.0f}",
        gib(option.memory[-1].value * option.shards),
        gib(option.disk[-1].value * option.shards),
        f"{option.training:,}",
        gib(option.peak),
        f"{option.building[-1].value / 3600 / THREADS:,.2f}",
        f"{option.recall:.2f}",
        f"{option.nodes} x {option.node}" if option.nodes else "-",
        "-" if option.usd_month is None else f"{option.usd_month:,.0f}",
        "; ".join(option.obstacles) or "yes",
    )


def gib(nbytes: float) -> str:
    """GiB, with decimals where they matter."""
    return f"{nbytes / GIB:,.{1 if nbytes >= GIB else 3}f}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns as wide as need be."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
