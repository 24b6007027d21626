"""The table of a sweep: mean and spread over seeds, in the shape of the paper's Tables 3 and 6."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MEASURES = ("p-MRR x100", "nDCG@10 (I+,Q+)", "nDCG@10 (I-,Q+)", "nDCG@10 (I+,Q-)", "MAP@1000")
_SHORT = ("nDCG@10 (I+,Q+)", "p-MRR x100")
"""Of the overview, as in Table 3: one of retrieval, one of obedience."""


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes:
        row, model: its place in the table.
        seed: None: of a backbone as it is.
        measures: name -> value, by `MEASURES`; empty if it failed.
        failure: why it failed, in one line; None: it did not.
    """

    row: str
    model: str
    seed: int | None
    measures: Mapping[str, float]
    failure: str | None = None


def measures_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """The measures among an evaluation's figures of one model."""
    ndcg = list(figures["ndcg_at_10"].values())
    values = [None if figures["p_mrr"] is None else 100 * figures["p_mrr"], *ndcg, figures["map_at_1000"]]
    return {name: value for name, value in zip(MEASURES, values, strict=True) if value is not None}


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """An overview of all backbones, then all measures of each: mean and sample standard deviation over seeds."""
    models = list(dict.fromkeys(outcome.model for outcome in outcomes))
    parts = []
    if len(models) > 1:
        header = ["", *(f"{model}: {measure}" for model in models for measure in _SHORT)]
        parts.append(_table(header, outcomes, [(model, measure) for model in models for measure in _SHORT]))
    for model in models:
        parts.append(_table([model, *MEASURES], outcomes, [(model, measure) for measure in MEASURES]))
    failed = [f"- {o.row}, {o.model}, seed {o.seed}: {o.failure}" for o in outcomes if o.failure is not None]
    if failed:
        parts.append("Failed:\n\n" + "\n".join(failed))
    seeds = sorted({outcome.seed for outcome in outcomes if outcome.seed is not None})
    parts.append(f"Mean ± sample standard deviation over seeds {', '.join(map(str, seeds))}.")
    return "\n\n".join(parts) + "\n"


def as_csv(outcomes: Sequence[Outcome]) -> str:
    """One line a trial."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "model", "seed", *MEASURES, "failure"])
    for o in outcomes:
        values = [o.measures.get(measure, "") for measure in MEASURES]
        writer.writerow([o.row, o.model, "" if o.seed is None else o.seed, *values, o.failure or ""])
    return text.getvalue()


def as_plain(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One object a cell: mean, standard deviation (None of a single seed) and the single values of each measure."""
    cells = []
    for row, model in dict.fromkeys((o.row, o.model) for o in outcomes):
        of_cell = [o for o in outcomes if (o.row, o.model) == (row, model)]
        summary = {}
        for measure in MEASURES:
            values = [o.measures[measure] for o in of_cell if measure in o.measures]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else None
                summary[measure] = {"mean": statistics.fmean(values), "stdev": spread, "values": values}
        failures = {str(o.seed): o.failure for o in of_cell if o.failure is not None}
        seeds = [o.seed for o in of_cell if o.failure is None]
        cells.append({"row": row, "model": model, "seeds": seeds, "measures": summary, "failures": failures})
    return cells


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
    decimals = 1 if measure.startswith("p-MRR") else 3
    text = f"{statistics.fmean(values):.{decimals}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{decimals}f}"
    return f"{text} ({failed} of {len(outcomes)} failed)" if failed else text
