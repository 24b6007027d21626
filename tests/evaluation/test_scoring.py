from dataclasses import replace

import pytest

from infembed_ray.evaluation.scoring import score_queries, summarise
from infembed_ray.evaluation.tasks import instruction_following
from tests.evaluation.test_tasks import passages, record

POSITIVE, POISONED, OTHER = (f"record/r/{kind}" for kind in ("positive", "negative_instruction", "negative_query"))
TASK = instruction_following([record("r")], passages("noise"))


def test_a_perfect_ranking_scores_one_and_a_swap_of_the_answers_shows_in_p_mrr():
    run = {
        POSITIVE: {POSITIVE: 0.9, POISONED: 0.8, OTHER: 0.7},
        POISONED: {POISONED: 0.9, POSITIVE: 0.8, OTHER: 0.7},
        OTHER: {OTHER: 0.9},
    }
    figures = summarise(score_queries(TASK, run))
    assert figures.ndcg_at_10 == {"positive": 1.0, "negative_instruction": 1.0, "negative_query": 1.0}
    assert figures.map_at_1000 == 1.0
    assert figures.p_mrr == pytest.approx(0.5)  # both answers go from rank 1 to 2 when they become wrong


def test_a_ranking_that_ignores_the_instruction_has_p_mrr_zero():
    ranking = {POSITIVE: 0.9, POISONED: 0.8, OTHER: 0.7}
    scores = score_queries(TASK, {POSITIVE: ranking, POISONED: ranking, OTHER: ranking})
    assert [s.p_mrr for s in scores] == [0.0, 0.0, None]
    assert [s.map_at_1000 for s in scores] == pytest.approx([1, 1 / 2, 1 / 3])
    assert summarise(scores).p_mrr == 0
    assert summarise(scores).map_at_1000 == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


def test_p_mrr_is_unknown_where_nothing_changes():
    task = instruction_following([replace(record("r"), hard_negative_document_1="answer of r")])
    scores = score_queries(task, {q.id: {} for q in task.queries})
    assert summarise(scores).p_mrr is None
    assert summarise(scores).map_at_1000 == 0
