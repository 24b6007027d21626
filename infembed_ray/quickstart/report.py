"""The quickstart's report: one HTML file without scripts or other resources."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader

from infembed_ray.evaluation import tables
from infembed_ray.evaluation.results import Results
from infembed_ray.evaluation.tasks import infir
from infembed_ray.quickstart.rankings import Ranking


@dataclass(frozen=True)
class Bar:
    """One model's figure. Positions are in per cent of the bar's full length."""

    text: str
    interval: str
    length: float
    low: float
    high: float


def write_report(
    path: Path,
    funnel: Mapping[str, int],
    results: Results,
    rankings: Mapping[str, Sequence[Ranking]],
    details: Mapping[str, Path],
) -> Path:
    """Write the report.

    Args:
        path: of the HTML file.
        funnel: synthesis counts: seeds, kept, rejected, dead_letter, calls, replayed.
        results: of the models on held-out records; the first model is the baseline.
        rankings: model -> the example query without an instruction, then under each of its instructions.
        details: what a stage's own report is about -> its file.
    """
    environment = Environment(loader=PackageLoader("infembed_ray.quickstart", "."), autoescape=True)
    page = environment.get_template("report.html").render(
        funnel=funnel,
        models=list(results.models),
        figures=list(_figures(results)),
        first={model: _first(results, model) for model in results.models},
        note=tables.note(repr(next(iter(results.models)))),
        rankings=rankings,
        details={what: os.path.relpath(file, path.parent) for what, file in details.items()},
    )
    path.write_text(page, encoding="utf-8")
    return path


def _figures(results: Results) -> Iterator[tuple[str, list[Bar]]]:
    """Every figure's title, and its bar for each model."""
    for column in tables.columns(results)[infir.TASK]:
        cells = tables.cells(results, column)
        yield column.title, [_bar(column, cells.get(model)) for model in results.models]


def _bar(column: tables.Column, cell: tables.Cell | None) -> Bar:
    text = tables.text(column, cell, interval=False)
    if cell is None:
        return Bar(text, "", 0, 0, 0)
    mean = cell.compared.mean
    interval = f"{column.number(mean.low)} to {column.number(mean.high)}"
    return Bar(text, interval, *(100 * min(1, max(0, v)) for v in (mean.value, mean.low, mean.high)))


def _first(results: Results, model: str) -> tuple[int, int]:
    """Number of held-out requests whose right passage is first, and of all requests. nDCG@10 is then 1."""
    values = [
        value
        for figure, of_figure in results.scores[model][infir.TASK].items()
        if figure.startswith("nDCG@10")
        for value in of_figure.values()
    ]
    return sum(value == 1 for value in values), len(values)
