"""`infembed compare`: runs of any systems against TREC judgements, with significance, without a model or Ray."""

from __future__ import annotations

from collections.abc import Sequence

from infembed_ray.errors import InputError
from infembed_ray.evaluation import tables
from infembed_ray.evaluation.metrics import trec_measures
from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.retrievers import runs as files
from infembed_ray.evaluation.tables import Column
from infembed_ray.evaluation.tasks.checks import judgements
from infembed_ray.evaluation.tasks.task import Figure
from infembed_ray.storage import find_input

DEPTH = 1000


def run(runs: Sequence[str], qrels: str, measures: str) -> None:
    """Print each measure of each run, its interval, and the difference to the first run with its p-value.

    Args:
        runs: paths or URIs of two or more runs in TREC's format.
        qrels: judgements: TREC's four columns, or BEIR's three with a header.
        measures: names separated by commas: nDCG@10, MAP@1000, recall@100, MRR@10.

    Raises:
        InputError: a file or a measure cannot be used, or a run has none of the judged queries.
    """
    print(compare(runs, qrels, measures.split(",")))


def compare(runs: Sequence[str], qrels: str, measures: Sequence[str]) -> str:
    """Return the table that `run` prints, as Markdown."""
    if len(runs) < 2:
        raise InputError(f"runs={runs[0]}: one run cannot be compared; give two or more")
    judged = judgements("qrels", files.read_qrels(find_input(qrels, "qrels"), "qrels"))
    values = {}
    for number, path in enumerate(runs):
        found = files.read(find_input(path, "runs"), "runs")
        if not found.keys() & judged.keys():
            raise InputError(f"runs={path}: has none of the queries of {qrels}; give judgements of the same queries")
        label = path if path not in values else f"{path} ({number + 1})"
        try:
            of_query = trec_measures(judged, found, measures)
        except ValueError as error:
            raise InputError(f"measures: {error}") from error
        values[label] = {measure: {query: of_query[query][measure] for query in judged} for measure in measures}
    task = TaskSummary(tuple(Figure(measure, measure) for measure in measures), {})
    results = Results(
        {"qrels": task}, {label: {} for label in values}, {r: {"qrels": v} for r, v in values.items()}, DEPTH
    )
    lines = [["measure", "run", "mean", "95% interval", "difference", "95% interval", "p", "p (Holm)"]]
    for measure in measures:
        column = Column(measure, (("qrels", measure),), decimals=4)
        for label, cell in tables.cells(results, column).items():
            mean, delta = cell.compared.mean, cell.compared.difference
            line = [
                measure,
                label,
                column.number(mean.value),
                f"{column.number(mean.low)} to {column.number(mean.high)}",
            ]
            if delta is not None:
                between = f"{column.number(delta.low, sign=True)} to {column.number(delta.high, sign=True)}"
                line += [
                    column.number(delta.value, sign=True),
                    between,
                    f"{cell.compared.p:.3g}",
                    f"{cell.adjusted:.3g}",
                ]
            lines.append(line + [""] * (len(lines[0]) - len(line)))
    lines.insert(1, ["---"] * len(lines[0]))
    shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{shown}\n\n{len(judged)} judged queries; one without a ranking counts 0. {tables.note(repr(runs[0]))}"
