"""Tables of models and tasks: means, intervals, and differences to the first model with their significance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from infembed_ray.evaluation import significance
from infembed_ray.evaluation.results import Results
from infembed_ray.evaluation.significance import Compared, Stratum, compare, holm
from infembed_ray.evaluation.tasks.registry import BENCHMARKS

LEVEL = 0.05
MARK = "*"
"""Marks a difference whose corrected p-value is below `LEVEL`."""

TABLE_FILE = "table.md"
"""All tables in Markdown, with intervals."""
REPORT_FILE = "report.html"
"""All tables and charts on one page."""
WIDTH = 100
"""Characters per line of a table for a terminal; further columns go into another table."""


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
        """Format a value."""
        return f"{value * self.scale:{'+' if sign else ''}.{self.decimals}f}"


@dataclass(frozen=True)
class Cell:
    """A model's figure, compared with the baseline's."""

    compared: Compared
    adjusted: float | None = None
    """p-value after Holm's correction over the models of the column; None for the baseline."""

    @property
    def significant(self) -> bool:
        """Whether the figure differs significantly from the baseline's."""
        return self.adjusted is not None and self.adjusted < LEVEL


def columns(results: Results) -> dict[str, list[Column]]:
    """Return benchmark title -> its averages, if all their tasks were evaluated, then the figures of its tasks.

    A task of no benchmark is a benchmark of its own.
    """
    found: dict[str, list[Column]] = {}
    for benchmark in BENCHMARKS.values():
        for name, figures in benchmark.averages.items():
            if all(task in results.tasks for task in figures):
                found.setdefault(benchmark.title, []).append(_shown(f"average {name}", tuple(figures.items())))
    titles = {
        entry.name: (benchmark.title, entry.title)
        for benchmark in BENCHMARKS.values()
        for entry in (*benchmark.tasks, *benchmark.others)
    }
    for task, summary in results.tasks.items():
        benchmark_title, own = titles.get(task, (task, task))
        for figure in summary.figures:
            title = figure.name if own == benchmark_title else f"{own} {figure.name}"
            found.setdefault(benchmark_title, []).append(_shown(title, ((task, figure.name),)))
    return found


def cells(results: Results, column: Column, models: Sequence[str] | None = None) -> dict[str, Cell]:
    """Return the cells of a column by model, compared with the first model; empty if the figure has no values."""
    models = list(results.models) if models is None else models
    strata = []
    for task, figure in column.parts:
        of_model = [results.scores[model][task][figure] for model in models]
        queries = list(of_model[0])
        if not queries:
            return {}
        groups = results.tasks[task].groups
        values = np.array([[of_one[query] for of_one in of_model] for query in queries])
        strata.append(Stratum.from_values(values, [(query in groups, groups.get(query, query)) for query in queries]))
    compared = compare(strata)
    adjusted: list[float | None] = [None, *holm([c.p for c in compared if c.p is not None])]
    return {model: Cell(c, p) for model, c, p in zip(models, compared, adjusted, strict=True)}


def as_text(results: Results) -> str:
    """Format means and differences for a terminal or a log, in lines of at most `WIDTH` characters."""
    parts = []
    for title, rows in _tables(results):
        for part in _fitting(rows):
            lines = ["  ".join(row).rstrip() for row in part]
            lines.insert(1, "  ".join("-" * len(cell) for cell in part[0]))
            parts.append("\n".join([title, *lines]))
    baseline = _baseline(results)
    differences = f"Differences are to {baseline}; {MARK}: significant at {LEVEL:.0%}. " if baseline else ""
    return "\n\n".join([*parts, f"{differences}{REPORT_FILE} and {TABLE_FILE} have the 95% intervals."])


def text(column: Column, cell: Cell | None, interval: bool = True) -> str:
    """Format a cell: `0.928 [0.901, 0.950] +0.120*` is mean, interval, difference to the baseline, significance."""
    if cell is None:
        return "n/a"
    mean, delta = cell.compared.mean, cell.compared.difference
    shown = column.number(mean.value)
    if interval:
        shown += f" [{column.number(mean.low)}, {column.number(mean.high)}]"
    if delta is None:
        return shown
    return f"{shown} {column.number(delta.value, sign=True)}{MARK if cell.significant else ''}"


def _tables(results: Results) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield title and rows of each table, without intervals; the first row is the header."""
    for benchmark, shown in columns(results).items():
        found = [cells(results, column) for column in shown]
        rows = [["model", *(column.title for column in shown)]]
        for model in results.models:
            of_row = (text(c, of_model.get(model), interval=False) for c, of_model in zip(shown, found, strict=True))
            rows.append([model, *of_row])
        yield benchmark, rows


def _fitting(rows: Sequence[Sequence[str]]) -> Iterator[list[list[str]]]:
    """Split padded rows into tables of at most `WIDTH` characters per line, each with the first column."""
    first, *others = [[cell.ljust(max(map(len, column))) for cell in column] for column in zip(*rows, strict=True)]
    part = [first]
    for column in others:
        if len(part) > 1 and sum(len(c[0]) + 2 for c in part) + len(column[0]) > WIDTH:
            yield list(map(list, zip(*part, strict=True)))
            part = [first]
        part.append(column)
    yield list(map(list, zip(*part, strict=True)))


def note(baseline: str | None) -> str:
    """Describe the statistics; `baseline` is None without comparisons."""
    if baseline is None:
        return f"{significance.INTERVALS}."
    return f"Differences are to {baseline}; {MARK}: significant at {LEVEL:.0%}. {significance.INTERVALS}; {significance.TESTS}."


def _baseline(results: Results) -> str | None:
    """Return the quoted label of the baseline; None if there is only one model."""
    return repr(next(iter(results.models))) if len(results.models) > 1 else None


def _shown(title: str, parts: tuple[tuple[str, str], ...]) -> Column:
    """Make a column; p-MRR is shown x100, as is usual."""
    return Column(f"{title} x100", parts, 100, 1) if parts[0][1] == "p-MRR" else Column(title, parts)
