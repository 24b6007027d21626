"""Table of a sweep: mean and standard deviation over seeds, in the shape of the paper's Tables 3 and 6."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_X100 = " x100"


@dataclass(frozen=True)
class TrialFigures:
    """Figures of a trial: labels of its row and backbone, seed (None: untrained), name -> value, and why it failed.

    `place` is that of the results of its evaluation.
    """

    row: str
    model: str
    seed: int | None
    measures: Mapping[str, float]
    failure: str | None = None
    place: str = ""


def measures_of(figures: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """Select the measures of one model from an evaluation's figures, task by task; p-MRR is x100, as usual."""
    measures = {}
    for task, of_task in figures.items():
        for figure, value in of_task.items():
            if value is not None:
                name = figure if len(figures) == 1 else f"{task} {figure}"
                measures[name + _X100 * (figure == "p-MRR")] = 100 * value if figure == "p-MRR" else value
    return measures


def as_markdown(trials: Sequence[TrialFigures]) -> str:
    """Format an overview of all backbones, then all measures of each: mean and sample standard deviation over seeds."""
    models = list(dict.fromkeys(trial.model for trial in trials))
    names = list(dict.fromkeys(name for trial in trials for name in trial.measures))
    parts = []
    if len(models) > 1:  # as in Table 3: the first measure of retrieval and the first of instruction following
        firsts = [next((n for n in names if n.endswith(_X100) is follows), None) for follows in (False, True)]
        columns = [(model, name) for model in models for name in firsts if name is not None]
        parts.append(_table(["", *(f"{model}: {name}" for model, name in columns)], trials, columns))
    parts += [_table([model, *names], trials, [(model, name) for name in names]) for model in models]
    failed = [f"- {t.row}, {t.model}, seed {t.seed}: {t.failure}" for t in trials if t.failure is not None]
    if failed:
        parts.append("Failed:\n\n" + "\n".join(failed))
    seeds = sorted({trial.seed for trial in trials if trial.seed is not None})
    parts.append(f"Mean ± sample standard deviation over seeds {', '.join(map(str, seeds))}.")
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], trials: Sequence[TrialFigures], columns: Sequence[tuple[str, str]]) -> str:
    lines = [header, ["---", *["---:"] * len(columns)]]
    for row in dict.fromkeys(trial.row for trial in trials):
        of_row = [trial for trial in trials if trial.row == row]
        lines.append([row, *(_cell([t for t in of_row if t.model == model], name) for model, name in columns)])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _cell(trials: Sequence[TrialFigures], measure: str) -> str:
    failed = sum(trial.failure is not None for trial in trials)
    values = [trial.measures[measure] for trial in trials if measure in trial.measures]
    if not values:
        return "failed" if failed else "n/a"
    decimals = 1 if measure.endswith(_X100) else 3
    text = f"{statistics.fmean(values):.{decimals}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{decimals}f}"
    return f"{text} ({failed} of {len(trials)} failed)" if failed else text
