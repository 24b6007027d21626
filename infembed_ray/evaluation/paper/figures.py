"""Figures 5 and 6 of the paper, with ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from infembed_ray.evaluation import tables
from infembed_ray.evaluation.paper.collection import CombinedResults, ReportedModel
from infembed_ray.evaluation.paper.published import TABLES
from infembed_ray.evaluation.paper.sheets import MODELS, plain, stands_for
from infembed_ray.evaluation.significance import IntervalEstimate
from infembed_ray.evaluation.tables import Cell, Column
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.reporting.charts import Scale

PAPER = [catalogue.BENCHMARKS[name].title for name in ("followir", f"followir{catalogue.AS_PAPER}")]
"""Titles of the benchmark whose models the paper compares in Figure 5."""


@dataclass(frozen=True)
class ChartedModel:
    """A model of Figure 5: p-MRR and score x100."""

    group: str
    label: str
    ours: bool
    p_mrr: IntervalEstimate
    score: IntervalEstimate


@dataclass(frozen=True)
class Chart:
    """Figure 5: the models of a benchmark by group, best p-MRR first."""

    benchmark: str
    score: str
    """Name of the score next to p-MRR."""
    groups: Mapping[str, Sequence[ChartedModel]]
    """Heading -> models."""
    scales: tuple[Scale, Scale]
    """Axes of p-MRR and of the score, which hold 0 and all intervals."""
    paper: bool
    """Whether models of the paper are among them."""


@dataclass(frozen=True)
class Panel:
    """Figure 6 for one training: p-MRR x100 by backbone."""

    title: str
    """The training and the benchmark."""
    groups: Mapping[str, tuple[IntervalEstimate, IntervalEstimate]]
    """Backbone -> p-MRR with and without the quality filter."""
    scale: Scale


def figure_5(collection: CombinedResults, rows: Mapping[str, str]) -> list[Chart]:
    """Return a chart for each evaluated benchmark with a p-MRR; FollowIR's also has the models of Table 5."""
    charts = []
    for benchmark, p_mrr, score in _obedience(collection):
        obeys, retrieves = collection.cells(p_mrr), collection.cells(score)
        paper = benchmark in PAPER and p_mrr.title.startswith("average")
        charted = list(_table_5()) if paper else []
        for key, model in collection.models.items():
            if key in obeys and key in retrieves:
                group = _size(model, rows) or "Ours" if paper else model.backbone or ""
                label = key if paper else model.shown
                charted.append(ChartedModel(group, label, True, _x100(obeys[key]), _x100(retrieves[key])))
        if any(model.ours for model in charted):
            groups: dict[str, list[ChartedModel]] = {model.group: [] for model in charted}
            for shown in sorted(charted, key=lambda model: -model.p_mrr.value):
                groups[shown.group].append(shown)
            scales = _scale(model.p_mrr for model in charted), _scale(model.score for model in charted)
            charts.append(Chart(benchmark, score.title.removeprefix("average "), groups, scales, paper))
    return charts


def figure_6(collection: CombinedResults, unfiltered: Sequence[str]) -> list[Panel]:
    """Return a panel for each training of a sweep that backbones had on filtered and on unfiltered records.

    Args:
        collection: our results.
        unfiltered: labels of the outputs whose models were trained on records without the judge's filter.
    """
    panels = []
    for benchmark, p_mrr, _ in _obedience(collection):
        cells = collection.cells(p_mrr)
        trainings: dict[str, dict[str, dict[bool, ReportedModel]]] = {}
        for key, model in collection.models.items():
            if key in cells and model.about.get("train") is not None:
                of_backbone = trainings.setdefault(model.label, {}).setdefault(model.backbone or "", {})
                of_backbone[model.output in unfiltered] = model
        for label, backbones in trainings.items():
            groups = {
                backbone: (_x100(cells[both[False].key]), _x100(cells[both[True].key]))
                for backbone, both in backbones.items()
                if len(both) == 2 and both[False].about["train"] == both[True].about["train"]
            }
            if groups:
                scale = _scale(estimate for both in groups.values() for estimate in both)
                panels.append(Panel(f"{label}, {benchmark}", groups, scale))
    return panels


def _obedience(collection: CombinedResults) -> Iterator[tuple[str, Column, Column]]:
    """Yield each benchmark with a p-MRR, its first p-MRR column and its first other column; averages come first."""
    for benchmark, columns in tables.columns(collection.results).items():
        p_mrr = next((column for column in columns if column.parts[0][1] == "p-MRR"), None)
        other = next((column for column in columns if column.parts[0][1] != "p-MRR"), None)
        if p_mrr is not None and other is not None:
            yield benchmark, p_mrr, other


def _table_5() -> Iterator[ChartedModel]:
    """Yield the paper's models that have both numbers."""
    places = [TABLES["5"].columns.index(name) for name in ("FollowIR p-MRR", "FollowIR score")]
    for row in TABLES["5"].rows:
        values = [value for place in places if (value := row.numbers[place].value) is not None]
        if len(values) == 2:
            p_mrr, score = (IntervalEstimate(value, value, value) for value in values)
            yield ChartedModel(row.section, row.name, False, p_mrr, score)


def _size(model: ReportedModel, rows: Mapping[str, str]) -> str | None:
    """Return the paper's heading for models of this size, from the model's own row or its backbone's."""
    for row in (row for number in reversed(MODELS) for row in TABLES[number].rows):
        if stands_for(model, row.name, rows) or plain(model.backbone or "") == plain(row.name):
            return row.section
    return None


def _x100(cell: Cell) -> IntervalEstimate:
    mean = cell.compared.mean
    return IntervalEstimate(100 * mean.value, 100 * mean.low, 100 * mean.high)


def _scale(estimates: Iterable[IntervalEstimate]) -> Scale:
    return Scale.enclosing([0.0, *(end for estimate in estimates for end in (estimate.low, estimate.high))])
