"""Scores rankings of a task: values per query, and their means."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from infembed_ray.evaluation.metrics import Run, p_mrr, robustness, trec_measures
from infembed_ray.evaluation.tasks.task import Task

Scores = Mapping[str, Mapping[str, float]]
"""Figure -> query, or group for Robustness@k -> value, not scaled by 100."""

Obedience = Mapping[str, Scores]
"""Condition of the obedience controls -> figure -> query -> value."""


def score(task: Task, run: Run) -> dict[str, dict[str, float]]:
    """Compute the values whose means are the task's figures.

    p-MRR has a value per changed query, under the id of the original query; Robustness@k one per group; all other
    measures one per query, also for queries without a ranking in `run`.
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
            ndcg = {q: trec[q][figure.measure.replace("Robustness", "nDCG")] for q in groups}
            scores[figure.name] = robustness(ndcg, groups)
        else:
            counted = (q for q, kind in kinds.items() if figure.kind in (None, kind))
            scores[figure.name] = {q: trec[q][figure.measure] for q in counted}
    return scores


def means(scores: Scores) -> dict[str, float | None]:
    """Average each figure; None if it has no values."""
    return {name: fmean(values.values()) if values else None for name, values in scores.items()}
