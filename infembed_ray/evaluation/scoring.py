"""From a task and a ranking of every query to figures: first a score a query, then their means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from infembed_ray.evaluation.metrics import Run, p_mrr, trec_measures
from infembed_ray.evaluation.tasks import Task
from infembed_ray.records import SCENARIOS


@dataclass(frozen=True)
class QueryScore:
    """The measures of one query."""

    query: str
    kind: str
    ndcg_at_10: float
    map_at_1000: float
    p_mrr: float | None
    """None where no document's relevance changes with the instruction."""


@dataclass(frozen=True)
class Figures:
    """The measures of one model on one task: means over queries, in their own units (nothing x100)."""

    p_mrr: float | None
    ndcg_at_10: dict[str, float]
    """Kind of query -> mean."""
    map_at_1000: float
    """Mean over the queries of all kinds."""


def score_queries(task: Task, run: Run) -> list[QueryScore]:
    """Score every query of the task, in its order."""
    trec = trec_measures(task.qrels, run, ("nDCG@10", "MAP@1000"))
    changed = p_mrr(task.changes, run)
    return [
        QueryScore(q.id, q.kind, trec[q.id]["nDCG@10"], trec[q.id]["MAP@1000"], changed.get(q.id)) for q in task.queries
    ]


def summarise(scores: Sequence[QueryScore]) -> Figures:
    """Mean of every measure over its queries."""
    changed = [s.p_mrr for s in scores if s.p_mrr is not None]
    return Figures(
        p_mrr=fmean(changed) if changed else None,
        ndcg_at_10={kind: fmean(s.ndcg_at_10 for s in scores if s.kind == kind) for kind in SCENARIOS},
        map_at_1000=fmean(s.map_at_1000 for s in scores),
    )
