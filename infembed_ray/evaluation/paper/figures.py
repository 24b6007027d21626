"""Figures 5 and 6 of the paper, with ours: bars of p-MRR and a score, x100."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from infembed_ray.evaluation import tables
from infembed_ray.evaluation.paper.collection import CombinedResults, ReportedModel
from infembed_ray.evaluation.paper.published import TABLES
from infembed_ray.evaluation.paper.sheets import MODELS, plain, stands_for
from infembed_ray.evaluation.significance import Compared, IntervalEstimate
from infembed_ray.evaluation.tables import Column
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.reporting.charts import Scale

PAPER = [catalogue.BENCHMARKS[name].title for name in ("followir", f"followir{catalogue.AS_PAPER}")]
"""Titles of the benchmark whose models the paper compares in Figure 5."""


@dataclass(frozen=True)
class Bars:
    """A model of a chart: a bar of p-MRR, and in Figure 5 one of the score."""

    label: str
    ours: bool
    estimates: tuple[IntervalEstimate, ...]


@dataclass(frozen=True)
class Chart:
    """Bars by group."""

    title: str
    columns: tuple[str, ...]
    """Name of each bar of a model."""
    paper: bool
    """Whether models of the paper are among them."""
    groups: Mapping[str, Sequence[Bars]]
    """Heading -> models."""

    def scale(self, column: int) -> Scale:
        """Return the axis of a column, which holds 0 and all intervals."""
        shown = [bars.estimates[column] for group in self.groups.values() for bars in group]
        return Scale.enclosing([0.0, *(end for estimate in shown for end in (estimate.low, estimate.high))])


def figure_5(collection: CombinedResults, rows: Mapping[str, str]) -> list[Chart]:
    """Return a chart for each evaluated benchmark with a p-MRR, best p-MRR first; FollowIR's has the models of Table 5 too."""
    charts = []
    for benchmark, p_mrr, score in _obedience(collection):
        obeys, retrieves = collection.cells(p_mrr), collection.cells(score)
        paper = benchmark in PAPER and p_mrr.title.startswith("average")
        charted = list(_table_5()) if paper else []
        for key, model in collection.models.items():
            if key in obeys and key in retrieves:
                group = _size(model, rows) or "Ours" if paper else model.backbone or ""
                bars = Bars(key if paper else model.shown, True, (_x100(obeys[key]), _x100(retrieves[key])))
                charted.append((group, bars))
        if any(bars.ours for _, bars in charted):
            groups: dict[str, list[Bars]] = {group: [] for group, _ in charted}
            for group, bars in sorted(charted, key=lambda pair: -pair[1].estimates[0].value):
                groups[group].append(bars)
            columns = ("p-MRR", score.title.removeprefix("average "))
            charts.append(Chart(f"{'Figure 5: ' * paper}{benchmark}, {' and '.join(columns)}", columns, paper, groups))
    return charts


def figure_6(collection: CombinedResults, unfiltered: Sequence[str]) -> list[Chart]:
    """Return a chart by backbone for each training of a sweep, on filtered and on unfiltered records, equal otherwise.

    Args:
        unfiltered: labels of the outputs whose models were trained on records without the judge's filter.
    """
    charts = []
    for benchmark, p_mrr, _ in _obedience(collection):
        cells = collection.cells(p_mrr)
        trainings: dict[tuple[str, str], dict[str, dict[bool, ReportedModel]]] = {}
        for key, model in collection.models.items():
            if key in cells and (train := model.about.get("train")) is not None:
                backbones = trainings.setdefault((model.label, str(train)), {})
                backbones.setdefault(model.backbone or "", {})[model.output in unfiltered] = model
        for (label, _), backbones in trainings.items():
            groups = {
                backbone: [
                    Bars(f"with{'out' * raw} filter", True, (_x100(cells[both[raw].key]),)) for raw in (False, True)
                ]
                for backbone, both in backbones.items()
                if len(both) == 2
            }
            if groups:
                title = f"Figure 6: {label} with and without the quality filter, {benchmark}"
                charts.append(Chart(title, ("p-MRR",), False, groups))
    return charts


def _obedience(collection: CombinedResults) -> Iterator[tuple[str, Column, Column]]:
    """Yield each benchmark with a p-MRR, its first p-MRR column and its first other column; averages come first."""
    for benchmark, columns in tables.columns(collection.results).items():
        p_mrr = next((column for column in columns if column.parts[0][1] == "p-MRR"), None)
        other = next((column for column in columns if column.parts[0][1] != "p-MRR"), None)
        if p_mrr is not None and other is not None:
            yield benchmark, p_mrr, other


def _table_5() -> Iterator[tuple[str, Bars]]:
    """Yield group and bars of the paper's models that have both numbers."""
    places = [TABLES["5"].columns.index(name) for name in ("FollowIR p-MRR", "FollowIR score")]
    for row in TABLES["5"].rows:
        values = [value for place in places if (value := row.numbers[place].value) is not None]
        if len(values) == 2:
            yield row.section, Bars(row.name, False, tuple(IntervalEstimate(value, value, value) for value in values))


def _size(model: ReportedModel, rows: Mapping[str, str]) -> str | None:
    """Return the paper's heading for models of this size, from the model's own row or its backbone's."""
    for row in (row for number in reversed(MODELS) for row in TABLES[number].rows):
        if stands_for(model, row.name, rows) or plain(model.backbone or "") == plain(row.name):
            return row.section
    return None


def _x100(cell: Compared) -> IntervalEstimate:
    mean = cell.mean
    return IntervalEstimate(100 * mean.value, 100 * mean.low, 100 * mean.high)
