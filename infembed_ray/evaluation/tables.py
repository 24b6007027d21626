"""Tables of models and tasks: means, intervals, and differences to the first model with their significance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from infembed_ray.evaluation import significance
from infembed_ray.evaluation.results import Results
from infembed_ray.evaluation.significance import LEVEL, Compared, Stratum, compare
from infembed_ray.evaluation.tasks.catalogue import BENCHMARKS

TABLE_FILE, REPORT_FILE = "table.md", "report.html"
FEW = 20
"""Queries below which a report warns: of 5, a 95 % interval of the bootstrap covers 80 %, of 10 it covers 88 %."""
MARK = "*"
"""Marks a significant difference."""


@dataclass(frozen=True)
class Column:
    """A figure of a task, or the unweighted mean of figures of several tasks."""

    title: str
    parts: tuple[tuple[str, str], ...]
    """Pairs of task and figure."""
    scale: int = 1
    """Factor of the displayed values."""
    decimals: int = 3

    def number(self, value: float, sign: bool = False) -> str:
        """Format a value, without a sign of zero."""
        shown = round(value * self.scale, self.decimals) + 0.0
        return f"{shown:{'+' if sign else ''}.{self.decimals}f}"


@dataclass(frozen=True)
class Number:
    """A number of a table, as it is shown."""

    value: str
    interval: str | None = None
    """`[low, high]`."""
    spread: str | None = None
    """Standard deviation over seeds, after `±`."""
    difference: str | None = None
    """Difference to the baseline, with its sign, and `MARK` if it is significant."""
    p_holm: float | None = None

    @classmethod
    def from_cell(cls, column: Column, cell: Compared, spread: float | None = None) -> Number:
        """Format a cell and its standard deviation over seeds."""
        mean, delta = cell.mean, cell.difference
        return cls(
            value=column.number(mean.value),
            interval=f"[{column.number(mean.low)}, {column.number(mean.high)}]",
            spread=None if spread is None else f"± {column.number(spread)}",
            difference=None if delta is None else column.number(delta.value, sign=True) + MARK * cell.significant,
            p_holm=cell.p,
        )

    @property
    def text(self) -> str:
        """Mean, difference to the baseline, significance: `0.928 +0.120*`."""
        return f"{self.value} {self.difference}" if self.difference else self.value


def columns(results: Results) -> dict[str, list[Column]]:
    """Return benchmark title -> its averages, if all their tasks were evaluated, then the figures of its tasks.

    A task of no benchmark is a benchmark of its own.
    """
    columns_of: dict[str, list[Column]] = {}
    for benchmark in BENCHMARKS.values():
        for name, figures in benchmark.averages.items():
            if all(task in results.tasks for task in figures):
                columns_of.setdefault(benchmark.title, []).append(_shown(f"average {name}", tuple(figures.items())))
    entries = ((benchmark, entry) for benchmark in BENCHMARKS.values() for entry in benchmark.tasks)
    titles = {entry.name: (benchmark.title, entry.title) for benchmark, entry in entries}
    for task, summary in results.tasks.items():
        benchmark_title, own = titles.get(task, (task, task))
        for figure in summary.figures:
            title = figure.name if own == benchmark_title else f"{own} {figure.name}"
            columns_of.setdefault(benchmark_title, []).append(_shown(title, ((task, figure.name),)))
    return columns_of


def cells(results: Results, column: Column, models: Sequence[str] | None = None) -> dict[str, Compared]:
    """Return the cells of a column by model, compared with the first model; empty if the figure has no values."""
    models = list(results.models) if models is None else models
    strata = []
    for task, figure in column.parts:
        of_models = [results.scores[model][task][figure] for model in models]
        if not of_models[0]:
            return {}
        strata.append(stratum(of_models, results.tasks[task].groups))
    return dict(zip(models, compare(strata), strict=True))


def stratum(of_models: Sequence[Mapping[str, float]], groups: Mapping[str, str]) -> Stratum:
    """Sum the values of models for the same queries by group, in one order: equal figures of a report share resamples."""
    queries = sorted(of_models[0])
    values = np.array([[of_model[query] for of_model in of_models] for query in queries])
    return Stratum.from_values(values, [(query in groups, groups.get(query, query)) for query in queries])


def note(baseline: str | None) -> str:
    """Describe the statistics; `baseline` is None without comparisons."""
    if baseline is None:
        return f"{significance.INTERVALS}."
    return f"Differences are to {baseline}; {MARK}: significant at {LEVEL:.0%}. {significance.INTERVALS}; {significance.TESTS}."


def few(results: Results) -> str:
    """Name the tasks with too few queries for their intervals; empty if there are none."""
    names = []
    for task, summary in results.tasks.items():
        of_figures = next((own[task].values() for own in results.scores.values() if task in own), ())
        sizes = (len({summary.groups.get(query, query) for query in values}) for values in of_figures if values)
        fewest = min(sizes, default=FEW)
        names += [f"{task} ({fewest})"] * (fewest < FEW)
    note = f"Fewer than {FEW} queries, or groups of queries, give intervals that are too narrow: {', '.join(names)}."
    return note if names else ""


def _shown(title: str, parts: tuple[tuple[str, str], ...]) -> Column:
    """Make a column; p-MRR is shown x100, as is usual."""
    return Column(f"{title} x100", parts, 100, 1) if parts[0][1] == "p-MRR" else Column(title, parts)
