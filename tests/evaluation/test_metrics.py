"""Measures against definitions written out slowly, in double precision, by somebody who has not read the code."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.evaluation.metrics import Change, p_mrr, rank_change, ranks, trec_measures

DOCUMENTS = [f"d{n}" for n in range(8)]
scores = st.dictionaries(
    st.sampled_from(DOCUMENTS),
    st.integers(-3, 3).map(lambda eighths: eighths / 8),  # few values: many ties; exact in single precision
    max_size=len(DOCUMENTS),
)
judgements = st.dictionaries(st.sampled_from(DOCUMENTS), st.integers(0, 3), min_size=1)


def ranking(run):
    """Bubble sort by (score, id) descending."""
    order = list(run)
    for _ in order:
        for i in range(len(order) - 1):
            a, b = order[i], order[i + 1]
            if run[a] < run[b] or (run[a] == run[b] and a < b):
                order[i], order[i + 1] = b, a
    return order


def brute_force_ndcg(judged, run, k):
    gained = sum(judged.get(d, 0) / math.log2(i + 2) for i, d in enumerate(ranking(run)[:k]))
    ideal = sum(gain / math.log2(i + 2) for i, gain in enumerate(sorted(judged.values(), reverse=True)[:k]))
    return gained / ideal if ideal else 0.0


def brute_force_map(judged, run, k):
    order = ranking(run)[:k]
    relevant = [d for d in judged if judged[d] > 0]
    precisions = [sum(x in relevant for x in order[: i + 1]) / (i + 1) for i, d in enumerate(order) if d in relevant]
    return sum(precisions) / len(relevant) if relevant else 0.0


def brute_force_p_mrr(documents, before, after):
    def rank(document, run):
        return ranking(run).index(document) + 1 if document in run else len(run) + 1

    total = 0.0
    for document in documents:
        og, new = rank(document, before), rank(document, after)
        # FollowIR writes it with the reciprocal ranks MRR = 1 / rank.
        total += (1 / og) / (1 / new) - 1 if og >= new else 1 - (1 / new) / (1 / og)
    return total / len(documents)


@given(judgements, scores, st.sampled_from([1, 3, 10]))
def test_ndcg_and_map_equal_their_definitions_with_ties(judged, run, k):
    found = trec_measures({"q": judged}, {"q": run}, (f"nDCG@{k}", f"MAP@{k}"))["q"]
    assert found[f"nDCG@{k}"] == pytest.approx(brute_force_ndcg(judged, run, k), abs=1e-12)
    assert found[f"MAP@{k}"] == pytest.approx(brute_force_map(judged, run, k), abs=1e-12)


def test_a_query_without_results_counts_zero():
    qrels = {"found": {"a": 1}, "empty": {"a": 1}, "absent": {"a": 1}}
    values = trec_measures(qrels, {"found": {"a": 1.0}, "empty": {}}, ("nDCG@10",))
    assert {query: value["nDCG@10"] for query, value in values.items()} == {"found": 1.0, "empty": 0.0, "absent": 0.0}


@pytest.mark.parametrize("measure", ["ndcg@10", "MAP", "MAP@all", "P@5"])
def test_an_unknown_measure_is_refused(measure):
    with pytest.raises(ValueError, match=r"nDCG@k or MAP@k"):
        trec_measures({"q": {"a": 1}}, {"q": {"a": 1.0}}, (measure,))


@given(st.lists(st.sampled_from(DOCUMENTS), min_size=1, unique=True), scores, scores)
def test_p_mrr_equals_its_definition_with_ties_and_missing_documents(documents, before, after):
    run = {"og": before, "changed": after}
    found = p_mrr([Change("og", "changed", tuple(documents))], run)
    assert found == {"og": pytest.approx(brute_force_p_mrr(documents, before, after), abs=1e-12)}
    assert -1 < found["og"] < 1
    undone = p_mrr([Change("changed", "og", tuple(documents))], run)
    assert undone == {"changed": pytest.approx(-found["og"], abs=1e-12)}


@pytest.mark.parametrize(
    ("original", "changed", "value"),
    [(1, 4, 0.75), (4, 1, -0.75), (2, 3, 1 / 3), (3, 2, -1 / 3), (5, 5, 0.0), (1, 1001, 1 - 1 / 1001)],
)
def test_p_mrr_of_one_document_by_hand(original, changed, value):
    assert rank_change(original, changed) == pytest.approx(value)


def test_p_mrr_is_a_mean_over_documents_and_a_missing_document_stands_behind_the_last():
    run = {"og": {"a": 0.9, "b": 0.8, "c": 0.7}, "changed": {"c": 0.9, "b": 0.8}}
    # a: 1 -> missing from 2, so 3: 1 - 1/3. b: 2 -> 2: 0. c is not among the changed.
    assert p_mrr([Change("og", "changed", ("a", "b"))], run) == {"og": pytest.approx((2 / 3 + 0) / 2)}


def test_queries_without_changed_documents_drop_out():
    run = {"q1": {"a": 1.0, "b": 0.5}, "q2": {"b": 1.0, "a": 0.5}}
    assert p_mrr([Change("q1", "q2", ("a",)), Change("q2", "q1", ())], run) == {"q1": pytest.approx(0.5)}


def test_ties_rank_by_document_id_descending_as_in_trec_eval():
    assert ranks({"a": 0.5, "c": 0.5, "b": 0.5, "z": 0.1}) == {"c": 1, "b": 2, "a": 3, "z": 4}
    reciprocal = trec_measures({"q": {"a": 1}}, {"q": {"a": 0.5, "c": 0.5, "b": 0.5, "z": 0.1}}, ("MAP@1000",))
    assert reciprocal["q"]["MAP@1000"] == pytest.approx(1 / 3)
