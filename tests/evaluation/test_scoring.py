from dataclasses import replace

import pyarrow as pa
import pytest

from infembed_ray.evaluation.tasks.infir import instruction_following
from infembed_ray.evaluation.tasks.task import CORPUS, Figure, Query, Task, means, score
from tests.evaluation.tasks.test_infir import passages, record

POSITIVE, POISONED, OTHER = (f"record/r/{kind}" for kind in ("positive", "negative_instruction", "negative_query"))
TASK = instruction_following([record("r")], passages("noise"))
NDCG = ("nDCG@10 (I+,Q+)", "nDCG@10 (I-,Q+)", "nDCG@10 (I+,Q-)")


def test_a_perfect_ranking_scores_one_and_a_swap_of_the_answers_shows_in_p_mrr():
    run = {
        POSITIVE: {POSITIVE: 0.9, POISONED: 0.8, OTHER: 0.7},
        POISONED: {POISONED: 0.9, POSITIVE: 0.8, OTHER: 0.7},
        OTHER: {OTHER: 0.9},
    }
    # Both answers go from rank 1 to 2 when they become wrong.
    assert means(score(TASK, run)) == {"p-MRR": pytest.approx(0.5), **dict.fromkeys(NDCG, 1.0), "MAP@1000": 1.0}


def test_p_mrr_is_0_for_rankings_that_ignore_the_instruction():
    ranking = {POSITIVE: 0.9, POISONED: 0.8, OTHER: 0.7}
    scores = score(TASK, {POSITIVE: ranking, POISONED: ranking, OTHER: ranking})
    assert scores["p-MRR"] == {POSITIVE: 0.0, POISONED: 0.0}  # no document depends on the instruction of the third
    assert scores["MAP@1000"] == pytest.approx({POSITIVE: 1, POISONED: 1 / 2, OTHER: 1 / 3})
    assert [list(scores[name]) for name in NDCG] == [[POSITIVE], [POISONED], [OTHER]]
    assert means(scores)["MAP@1000"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


def test_p_mrr_is_null_without_changes_and_0_without_results():
    task = instruction_following([replace(record("r"), hard_negative_document_1="answer of r")])
    values = means(score(task, {q.id: {} for q in task.queries}))
    assert values["p-MRR"] is None
    assert values["MAP@1000"] == 0


def test_robustness_is_over_groups_and_recall_over_queries():
    groups = {"a1": "a", "a2": "a", "b1": "b", "alone": None}
    task = Task(
        name="t",
        corpus=pa.table({"id": ["x", "y"], "text": ["one", "two"]}, schema=CORPUS),
        queries=tuple(Query(name, name, "an instruction", group=group) for name, group in groups.items()),
        qrels={name: {"x": 1} for name in groups},
        figures=(Figure("Robustness@10", "Robustness@10"), Figure("recall@1", "recall@1")),
    )
    first, second = {"x": 2.0, "y": 1.0}, {"x": 1.0, "y": 2.0}
    scores = score(task, {"a1": first, "a2": second, "b1": first, "alone": second})
    assert scores["Robustness@10"] == {"a": pytest.approx(0.6309, abs=1e-4), "b": 1.0}
    assert scores["recall@1"] == {"a1": 1, "a2": 0, "b1": 1, "alone": 0}


@pytest.mark.parametrize(
    ("first", "second", "right"),
    [
        ({"x": 2.0, "y": 1.0}, {"x": 1.0, "y": 2.0}, 1),
        ({"x": 2.0, "y": 1.0}, {"x": 2.0, "y": 1.0}, 0),  # one document is preferred whatever the query
        ({"x": 1.0, "y": 1.0}, {"x": 1.0, "y": 1.0}, 0),
        ({"other": 3.0, "x": 2.0, "y": 1.0}, {"other": 3.0, "y": 2.0}, 1),  # a run over the whole corpus
        ({"x": 2.0}, {}, 0),
    ],
)
def test_a_pair_counts_if_each_query_ranks_its_own_document_above_the_others(first, second, right):
    task = Task(
        name="t",
        corpus=pa.table({"id": ["x", "y"], "text": ["one", "two"]}, schema=CORPUS),
        queries=(Query("p_q1", "one?", group="p"), Query("p_q2", "two?", group="p")),
        qrels={"p_q1": {"x": 1, "y": 0}, "p_q2": {"x": 0, "y": 1}},
        figures=(Figure("paired accuracy", "paired accuracy"),),
    )
    assert score(task, {"p_q1": first, "p_q2": second}) == {"paired accuracy": {"p": right}}
