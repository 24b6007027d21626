"""`infembed compare`: runs of any systems against TREC judgements, with significance, without a model or Ray."""

from __future__ import annotations

import re
from collections.abc import Sequence

from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import trec_measures
from infembed_ray.evaluation.paper.report import of_evaluation
from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.retrievers import runs as files
from infembed_ray.evaluation.tasks import trec
from infembed_ray.evaluation.tasks.checks import judgements
from infembed_ray.evaluation.tasks.task import Figure
from infembed_ray.storage.steps import find_input

DEPTH = 1000


def run(runs: Sequence[str], qrels: str, measures: str) -> None:
    """Print each measure of each run with its interval, and the difference to the first run, marked if significant.

    Args:
        runs: paths or URIs of two or more runs in TREC's format.
        qrels: judgements: TREC's four columns, or BEIR's three with a header.
        measures: names of ir_measures, separated by commas: nDCG@10, MAP@1000, P@5, bpref.

    Raises:
        InputError: a file or a measure cannot be used, or a run has none of the judged queries.
    """
    print(compare(runs, qrels, re.split(r",(?![^(]*\))", measures)))


def compare(runs: Sequence[str], qrels: str, measures: Sequence[str]) -> str:
    """Return the table that `run` prints, as Markdown."""
    if len(runs) < 2:
        raise InputError(f"runs={runs[0]}: one run cannot be compared; give two or more")
    judged = judgements("qrels", trec.read_qrels(find_input(qrels, "qrels"), "qrels"))
    values = {}
    for number, path in enumerate(runs):
        found = files.read(find_input(path, "runs"), "runs")
        if not found.keys() & judged.keys():
            raise InputError(f"runs={path}: has none of the queries of {qrels}; give judgements of the same queries")
        label = path if path not in values else f"{path} ({number + 1})"
        of_query = trec_measures(judged, found, measures)
        values[label] = {measure: {query: of_query[query][measure] for query in judged} for measure in measures}
    task = TaskSummary(tuple(Figure(measure, measure) for measure in measures), {}, {"judged queries": len(judged)})
    scores = {label: {"qrels": of_run} for label, of_run in values.items()}
    report = of_evaluation(qrels, Results({"qrels": task}, {label: {} for label in values}, scores, DEPTH))
    return report.as_markdown(with_paper=False)
