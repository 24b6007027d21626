"""Tables of any models on any tasks: means, their intervals, and differences to the first model with their significance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from infembed_ray.evaluation import significance
from infembed_ray.evaluation.results import Results, conventions_of
from infembed_ray.evaluation.significance import Compared, Stratum, compare, holm
from infembed_ray.evaluation.tasks.catalogue import BENCHMARKS

LEVEL = 0.05
MARK = "*"
"""Of a difference whose corrected p-value is below `LEVEL`."""

TABLE_FILE = "table.md"
"""All tables in Markdown, with intervals."""
WIDTH = 100
"""Characters of a line of a table for a terminal; columns beyond it go into another table."""


@dataclass(frozen=True)
class Column:
    """A figure of a task, or the unweighted mean of the figures of several."""

    title: str
    parts: tuple[tuple[str, str], ...]
    """Task and figure."""
    scale: int = 1
    """What the values are multiplied by where they are shown."""
    decimals: int = 3

    def number(self, value: float, sign: bool = False) -> str:
        """A value as it is shown."""
        return f"{value * self.scale:{'+' if sign else ''}.{self.decimals}f}"


@dataclass(frozen=True)
class Cell:
    """A model's figure beside the baseline's."""

    compared: Compared
    adjusted: float | None = None
    """p-value by Holm's correction over the models of the column; None of the baseline."""

    @property
    def significant(self) -> bool:
        """Is it another figure than the baseline's?"""
        return self.adjusted is not None and self.adjusted < LEVEL


def columns(results: Results) -> dict[str, list[Column]]:
    """Title of a benchmark -> its averages, where all their tasks are there, then the figures of its tasks.

    A task that is of no benchmark stands for itself.
    """
    found: dict[str, list[Column]] = {}
    for benchmark in BENCHMARKS.values():
        for name, figures in benchmark.averages.items():
            if all(task in results.tasks for task in figures):
                found.setdefault(benchmark.title, []).append(_shown(f"average {name}", tuple(figures.items())))
    titles = {
        entry.name: (benchmark.title, entry.title) for benchmark in BENCHMARKS.values() for entry in benchmark.tasks
    }
    titles |= {e.name: (benchmark.title, e.title) for benchmark in BENCHMARKS.values() for e in benchmark.others}
    for task, asked in results.tasks.items():
        of, own = titles.get(task, (task, task))
        for figure in asked.figures:
            title = figure.name if own == of else f"{own} {figure.name}"
            found.setdefault(of, []).append(_shown(title, ((task, figure.name),)))
    return found


def cells(results: Results, column: Column, models: Sequence[str] | None = None) -> dict[str, Cell]:
    """The column's cell of each of the models, of which the first is the baseline; none where it is a mean over nothing."""
    models = list(results.models) if models is None else models
    strata = []
    for task, figure in column.parts:
        of_model = [results.scores[model][task][figure] for model in models]
        queries = list(of_model[0])
        if not queries:
            return {}
        groups = results.tasks[task].groups
        values = np.array([[of_one[query] for of_one in of_model] for query in queries])
        strata.append(Stratum.of(values, [(query in groups, groups.get(query, query)) for query in queries]))
    compared = compare(strata)
    adjusted: list[float | None] = [None, *holm([c.p for c in compared if c.p is not None])]
    return {model: Cell(c, p) for model, c, p in zip(models, compared, adjusted, strict=True)}


def as_text(results: Results) -> str:
    """Means and differences for a terminal or a log: aligned columns, lines of at most `WIDTH` characters, no colour."""
    parts = []
    for title, rows in _tables(results, intervals=False):
        for part in _fitting(rows):
            lines = ["  ".join(row).rstrip() for row in part]
            lines.insert(1, "  ".join("-" * len(cell) for cell in part[0]))
            parts.append("\n".join([title, *lines]))
    baseline = _baseline(results)
    differences = f"Differences are to {baseline}; {MARK}: significant at {LEVEL:.0%}. " if baseline else ""
    return "\n\n".join([*parts, f"{differences}{TABLE_FILE} has the 95% intervals."])


def as_markdown(results: Results) -> str:
    """The tables in Markdown, what is below them included."""
    parts = []
    for title, rows in _tables(results):
        lines = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
        table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        parts.append("\n".join([f"## {title}", "", *table]))
    about = [f"- {task}: {_listed(asked.about)}" for task, asked in results.tasks.items()]
    conventions = [f"- {name}: {text}" for name, text in conventions_of(results.measures).items()]
    return "\n\n".join([*parts, _note(results), "\n".join(about), "\n".join(conventions)]) + "\n"


def text(column: Column, cell: Cell | None, interval: bool = True) -> str:
    """`0.928 [0.901, 0.950] +0.120*`: mean, interval, difference to the baseline, mark of significance."""
    if cell is None:
        return "n/a"
    mean, apart = cell.compared.mean, cell.compared.difference
    shown = column.number(mean.value)
    if interval:
        shown += f" [{column.number(mean.low)}, {column.number(mean.high)}]"
    if apart is None:
        return shown
    return f"{shown} {column.number(apart.value, sign=True)}{MARK if cell.significant else ''}"


def _tables(results: Results, intervals: bool = True) -> Iterator[tuple[str, list[list[str]]]]:
    """Title, and rows of which the first is the header."""
    for benchmark, shown in columns(results).items():
        found = [cells(results, column) for column in shown]
        rows = [["model", *(column.title for column in shown)]]
        for model in results.models:
            of_row = (text(c, of_model.get(model), intervals) for c, of_model in zip(shown, found, strict=True))
            rows.append([model, *of_row])
        yield benchmark, rows


def _fitting(rows: Sequence[Sequence[str]]) -> Iterator[list[list[str]]]:
    """The rows, padded, in tables of at most `WIDTH` characters a line; the first column begins each of them."""
    first, *others = [[cell.ljust(max(map(len, column))) for cell in column] for column in zip(*rows, strict=True)]
    part = [first]
    for column in others:
        if len(part) > 1 and sum(len(c[0]) + 2 for c in part) + len(column[0]) > WIDTH:
            yield list(map(list, zip(*part, strict=True)))
            part = [first]
        part.append(column)
    yield list(map(list, zip(*part, strict=True)))


def note(baseline: str | None) -> str:
    """How the statistics came about; None where there is nothing to compare."""
    if baseline is None:
        return f"{significance.INTERVALS}."
    return f"Differences are to {baseline}; {MARK}: significant at {LEVEL:.0%}. {significance.INTERVALS}; {significance.TESTS}."


def _note(results: Results) -> str:
    return note(_baseline(results))


def _baseline(results: Results) -> str | None:
    """Quoted label of the model that others are compared to; None of a single model."""
    return repr(next(iter(results.models))) if len(results.models) > 1 else None


def _listed(about: Mapping[str, object]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items())


def _shown(title: str, parts: tuple[tuple[str, str], ...]) -> Column:
    """p-MRR is shown x100, as everybody does."""
    return Column(f"{title} x100", parts, 100, 1) if parts[0][1] == "p-MRR" else Column(title, parts)
