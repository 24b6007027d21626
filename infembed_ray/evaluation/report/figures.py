"""Figures 5 and 6 of the paper as drawings: what stands where, in percent or pixels."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from infembed_ray.evaluation import tables
from infembed_ray.evaluation.report.collection import BASE, Collection, Model
from infembed_ray.evaluation.report.paper import TABLES
from infembed_ray.evaluation.report.sheets import MODELS, plain, stands_for
from infembed_ray.evaluation.significance import Estimate
from infembed_ray.evaluation.tables import Cell, Column

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 8, 34
"""Pixels of a panel of Figure 6, and of the room around it for the axes."""


@dataclass(frozen=True)
class Bar:
    """One measure of one model, in percent of the width; `low` and `high` are the ends of its interval."""

    text: str
    start: float
    length: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Measured:
    """A model of Figure 5."""

    label: str
    ours: bool
    p_mrr: Bar
    score: Bar


@dataclass(frozen=True)
class Chart:
    """Figure 5: the models of a benchmark by group, best p-MRR first; everything x100."""

    benchmark: str
    score: str
    """What the score is."""
    groups: tuple[tuple[str, tuple[Measured, ...]], ...]
    zeros: tuple[float, float]
    """Where 0 is, of p-MRR and score."""
    paper: bool
    """Are models of the paper among them?"""


@dataclass(frozen=True)
class Curve:
    """p-MRR over epochs; all coordinates in pixels."""

    label: str
    path: str
    points: tuple[tuple[float, float, float, float], ...]
    """x, y, and y of the ends of the interval."""
    values: tuple[tuple[int, str], ...]
    """Epochs and p-MRR, to be read."""


@dataclass(frozen=True)
class Panel:
    """Figure 6, of one backbone and training: with and without the quality filter."""

    title: str
    curves: tuple[Curve, ...]
    x: tuple[tuple[float, str], ...]
    y: tuple[tuple[float, str], ...]


def figure_5(collection: Collection, rows: Mapping[str, str]) -> list[Chart]:
    """A chart for each benchmark of ours that has a p-MRR; that of FollowIR has the models of Table 5 too."""
    charts = []
    for benchmark, p_mrr, score in _obedience(collection):
        obeys, retrieves = collection.cells(p_mrr), collection.cells(score)
        paper = benchmark == "FollowIR" and p_mrr.title.startswith("average")
        found = list(_table_5()) if paper else []
        for key, model in collection.models.items():
            if key in obeys and key in retrieves:
                group = _size(model, rows) or "Ours" if paper else model.backbone or ""
                found.append(
                    _Model(group, key if paper else model.shown, True, _x100(obeys[key]), _x100(retrieves[key]))
                )
        if any(model.ours for model in found):
            charts.append(_chart(benchmark, score.title, found, paper))
    return charts


def figure_6(collection: Collection, unfiltered: Sequence[str]) -> list[Panel]:
    """A panel for each training of a sweep that was done on filtered and on unfiltered records.

    Args:
        collection: ours.
        unfiltered: labels of the outputs whose models were trained on records that no judge had filtered.
    """
    panels = []
    for benchmark, p_mrr, _ in _obedience(collection):
        cells = collection.cells(p_mrr)
        series: dict[tuple[str, str, str], dict[bool, dict[int, Cell]]] = {}
        for key, model in collection.models.items():
            if key in cells and (train := model.about.get("train")) is not None:
                design = json.dumps({name: value for name, value in train.items() if name != "epochs"}, sort_keys=True)
                label = re.sub(r"(^|, )epochs=\d+", "", model.label)
                of_design = series.setdefault((model.backbone or "", label, design), {False: {}, True: {}})
                of_design[model.output in unfiltered][train["epochs"]] = cells[key]
        bases = {m.backbone: cells[key] for key, m in collection.models.items() if m.label == BASE and key in cells}
        for (backbone, label, _), both in series.items():
            if both[True] and both[False]:
                if backbone in bases:
                    both = {without: {0: bases[backbone], **points} for without, points in both.items()}
                title = ", ".join(filter(None, (backbone, label, benchmark)))
                panels.append(_panel(title, {"without filter": both[True], "with filter": both[False]}))
    return panels


def _obedience(collection: Collection) -> Iterator[tuple[str, Column, Column]]:
    """Benchmarks with a p-MRR: their first column of it, and their first other one; averages come first."""
    for benchmark, columns in tables.columns(collection.results).items():
        p_mrr = next((column for column in columns if column.parts[0][1] == "p-MRR"), None)
        other = next((column for column in columns if column.parts[0][1] != "p-MRR"), None)
        if p_mrr is not None and other is not None:
            yield benchmark, p_mrr, other


def _table_5() -> Iterator[_Model]:
    """The paper's models that have both numbers."""
    columns = TABLES["5"].columns
    for row in TABLES["5"].rows:
        p_mrr, score = (row.numbers[columns.index(name)].value for name in ("FollowIR p-MRR", "FollowIR score"))
        if p_mrr is not None and score is not None:
            yield _Model(row.section, row.name, False, Estimate(p_mrr, p_mrr, p_mrr), Estimate(score, score, score))


def _size(model: Model, rows: Mapping[str, str]) -> str | None:
    """The heading in the paper's tables of models of its size: its own row's, or its backbone's."""
    of_tables = [row for number in reversed(MODELS) for row in TABLES[number].rows]
    return next(
        (
            row.section
            for row in of_tables
            if stands_for(model, row.name, rows) or plain(model.backbone or "") == plain(row.name)
        ),
        None,
    )


def _x100(cell: Cell) -> Estimate:
    mean = cell.compared.mean
    return Estimate(100 * mean.value, 100 * mean.low, 100 * mean.high)


@dataclass(frozen=True)
class _Model:
    """A model of Figure 5, before it is drawn."""

    group: str
    label: str
    ours: bool
    p_mrr: Estimate
    score: Estimate


def _chart(benchmark: str, score: str, found: Sequence[_Model], paper: bool) -> Chart:
    of_p_mrr = _percent([end for model in found for end in (model.p_mrr.low, model.p_mrr.high)])
    of_score = _percent([end for model in found for end in (model.score.low, model.score.high)])
    groups: dict[str, list[Measured]] = {model.group: [] for model in found}
    for model in sorted(found, key=lambda model: -model.p_mrr.value):
        bars = _bar(model.p_mrr, of_p_mrr, model.ours), _bar(model.score, of_score, model.ours)
        groups[model.group].append(Measured(model.label, model.ours, *bars))
    zeros = of_p_mrr(0.0), of_score(0.0)
    name = score.removeprefix("average ")
    return Chart(benchmark, name, tuple((group, tuple(models)) for group, models in groups.items()), zeros, paper)


def _percent(values: Sequence[float]) -> Callable[[float], float]:
    low, high = min(0.0, *values), max(0.0, *values)
    return lambda value: round(100 * (value - low) / ((high - low) or 1.0), 2)


def _bar(value: Estimate, scale: Callable[[float], float], ours: bool) -> Bar:
    start, end = sorted((scale(0.0), scale(value.value)))
    low, high = (scale(value.low), scale(value.high)) if ours else (None, None)
    return Bar(f"{value.value:.1f}", start, round(end - start, 2), low, high)


def _panel(title: str, series: Mapping[str, Mapping[int, Cell]]) -> Panel:
    estimates = {label: {epochs: _x100(cell) for epochs, cell in points.items()} for label, points in series.items()}
    ends = [end for points in estimates.values() for value in points.values() for end in (value.low, value.high)]
    epochs = sorted({epoch for points in estimates.values() for epoch in points})
    ticks = _ticks(min(ends), max(ends))

    def x(epoch: int) -> float:
        share = (epoch - epochs[0]) / ((epochs[-1] - epochs[0]) or 1)
        return round(LEFT + 8 + share * (WIDTH - LEFT - RIGHT - 16), 1)

    def y(value: float) -> float:
        return round(TOP + (ticks[-1] - value) / (ticks[-1] - ticks[0]) * (HEIGHT - TOP - BOTTOM), 1)

    curves = []
    for label, points in estimates.items():
        drawn = tuple((x(e), y(v.value), y(v.low), y(v.high)) for e, v in sorted(points.items()))
        path = "M" + "L".join(f"{left} {top}" for left, top, _, _ in drawn)
        curves.append(Curve(label, path, drawn, tuple((e, f"{v.value:.1f}") for e, v in sorted(points.items()))))
    return Panel(
        title, tuple(curves), tuple((x(e), str(e)) for e in epochs), tuple((y(tick), f"{tick:g}") for tick in ticks)
    )


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers, evenly apart, that enclose an interval."""
    apart = max(high - low, 1e-6) / 4
    power = 10.0 ** math.floor(math.log10(apart))
    apart = next(step * power for step in (1, 2, 5, 10) if step * power >= apart * 0.999)
    first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    return [round(n * apart, 9) for n in range(first, max(last, first + 1) + 1)]
