"""From a task and a ranking of every query to figures: first a value a query, then their means."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from infembed_ray.evaluation.metrics import Run, p_mrr, robustness, trec_measures
from infembed_ray.evaluation.tasks.task import Task

Scores = Mapping[str, Mapping[str, float]]
"""Name of a figure -> query (or what else it is a mean over) -> value. Values are in their own units: nothing x100."""


def score(task: Task, run: Run) -> dict[str, dict[str, float]]:
    """The values of which the task's figures are the means.

    p-MRR is over the queries whose documents change (by the id of the original query), Robustness@k over groups of
    queries (by the group), everything else over queries, those without an answer in `run` included.
    """
    kinds = {query.id: query.kind for query in task.queries}
    groups = {query.id: query.group for query in task.queries if query.group is not None}
    plain = {figure.measure for figure in task.figures} - {"p-MRR"}
    needed = {measure.replace("Robustness", "nDCG") for measure in plain}
    trec = trec_measures({q: task.qrels[q] for q in kinds}, run, sorted(needed))
    scores: dict[str, dict[str, float]] = {}
    for figure in task.figures:
        if figure.measure == "p-MRR":
            scores[figure.name] = p_mrr(task.changes, run)
        elif figure.measure.startswith("Robustness@"):
            of_query = {q: trec[q][figure.measure.replace("Robustness", "nDCG")] for q in groups}
            scores[figure.name] = robustness(of_query, groups)
        else:
            counted = (q for q, kind in kinds.items() if figure.kind in (None, kind))
            scores[figure.name] = {q: trec[q][figure.measure] for q in counted}
    return scores


def means(scores: Scores) -> dict[str, float | None]:
    """Name of a figure -> its mean; None where it is a mean over nothing."""
    return {name: fmean(values.values()) if values else None for name, values in scores.items()}
