"""The quickstart's report as one self-contained HTML file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from infembed_ray.evaluation import tables
from infembed_ray.evaluation.results import Results
from infembed_ray.evaluation.significance import Compared
from infembed_ray.evaluation.tasks import infir
from infembed_ray.quickstart.rankings import Ranking
from infembed_ray.reporting import page
from infembed_ray.reporting.charts import Scale


def write_report(
    path: Path,
    funnel: Mapping[str, int],
    results: Results,
    rankings: Mapping[str, Sequence[Ranking]],
    details: Mapping[str, Path],
) -> Path:
    """Write the report.

    Args:
        funnel: synthesis counts: seeds, kept, rejected, dead_letter, calls, replayed.
        results: results of the models on held-out records; the first model is the baseline.
        rankings: model -> the example query without an instruction, then under each of its instructions.
        details: subject of a stage's own report -> its file.
    """
    html = page.render(
        "infembed_ray.quickstart",
        "report.html",
        funnel=funnel,
        models=list(results.models),
        figures=list(_figures(results)),
        number=tables.Number.from_cell,
        first={model: _first(results, model) for model in results.models},
        note=tables.note(repr(next(iter(results.models)))),
        rankings=rankings,
        details={what: os.path.relpath(file, path.parent) for what, file in details.items()},
    )
    path.write_text(html, encoding="utf-8")
    return path


def _figures(results: Results) -> Iterator[tuple[tables.Column, Scale, list[Compared | None]]]:
    """Yield each measure, its axis, and its cell for each model; None for a mean over no requests."""
    for column in tables.columns(results)[infir.TASK]:
        cells = tables.cells(results, column)
        low = min([0.0, *(cell.mean.low for cell in cells.values())])
        yield column, Scale(math.floor(10 * low) / 10, 1.0), [cells.get(model) for model in results.models]


def _first(results: Results, model: str) -> tuple[int, int]:
    """Count the held-out requests whose right passage is ranked first (nDCG@10 is 1), and all requests."""
    values = [
        value
        for figure, of_figure in results.scores[model][infir.TASK].items()
        if figure.startswith("nDCG@10")
        for value in of_figure.values()
    ]
    return sum(value == 1 for value in values), len(values)
