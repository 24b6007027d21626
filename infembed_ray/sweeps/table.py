"""Table of a sweep: mean and standard deviation over seeds, in the shape of the paper's Tables 3 and 6."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_X100 = " x100"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a trial.

    Attributes:
        row, model: Labels of its row and its backbone.
        seed: Seed; None for an untrained backbone.
        measures: Name -> value, with the same names for every trial; empty if the trial failed.
        failure: Why it failed, in one line, or None.
    """

    row: str
    model: str
    seed: int | None
    measures: Mapping[str, float]
    failure: str | None = None


def measures_of(figures: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """Select the measures of one model from an evaluation's figures, task by task; p-MRR is x100, as usual."""
    return {
        (figure if len(figures) == 1 else f"{task} {figure}") + (_X100 if figure == "p-MRR" else ""): (
            100 * value if figure == "p-MRR" else value
        )
        for task, of_task in figures.items()
        for figure, value in of_task.items()
        if value is not None
    }


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """Format an overview of all backbones, then all measures of each: mean and sample standard deviation over seeds."""
    models = list(dict.fromkeys(outcome.model for outcome in outcomes))
    names = _names(outcomes)
    parts = []
    if len(models) > 1:
        short = _short(names)
        header = ["", *(f"{model}: {measure}" for model in models for measure in short)]
        parts.append(_table(header, outcomes, [(model, measure) for model in models for measure in short]))
    for model in models:
        parts.append(_table([model, *names], outcomes, [(model, measure) for measure in names]))
    failed = [f"- {o.row}, {o.model}, seed {o.seed}: {o.failure}" for o in outcomes if o.failure is not None]
    if failed:
        parts.append("Failed:\n\n" + "\n".join(failed))
    seeds = sorted({outcome.seed for outcome in outcomes if outcome.seed is not None})
    parts.append(f"Mean ± sample standard deviation over seeds {', '.join(map(str, seeds))}.")
    return "\n\n".join(parts) + "\n"


def _names(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the names of all measures, in the order of the tasks."""
    return list(dict.fromkeys(name for outcome in outcomes for name in outcome.measures))


def _short(names: Sequence[str]) -> list[str]:
    """Return the measures of the overview, as in Table 3: the first of retrieval and the first of instruction following."""
    following = next((name for name in names if name.endswith(_X100)), None)
    retrieval = next((name for name in names if not name.endswith(_X100)), None)
    return [name for name in (retrieval, following) if name is not None]


def _table(header: Sequence[str], outcomes: Sequence[Outcome], columns: Sequence[tuple[str, str]]) -> str:
    lines = [header, ["---", *["---:"] * len(columns)]]
    for row in dict.fromkeys(outcome.row for outcome in outcomes):
        lines.append(
            [row, *(_cell([o for o in outcomes if (o.row, o.model) == (row, m)], name) for m, name in columns)]
        )
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _cell(outcomes: Sequence[Outcome], measure: str) -> str:
    failed = sum(o.failure is not None for o in outcomes)
    values = [o.measures[measure] for o in outcomes if measure in o.measures]
    if not values:
        return "failed" if failed else "n/a"
    decimals = 1 if measure.endswith(_X100) else 3
    text = f"{statistics.fmean(values):.{decimals}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{decimals}f}"
    return f"{text} ({failed} of {len(outcomes)} failed)" if failed else text
