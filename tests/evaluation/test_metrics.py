"""Measures against trec_eval, mteb, and values computed by hand."""

import random
import re
from statistics import fmean

import numpy as np
import pytest
import pytrec_eval

from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import Change, p_mrr, rank_change, ranks, right_rank, robustness, trec_measures

# ------------------------------------------------------------------------------------------ trec_eval's measures


@pytest.fixture(scope="module")
def chance():
    """200 queries with graded, irrelevant or no judgements, few or no results, ties and unjudged documents."""
    rng = random.Random(0)
    documents = [f"d{n}" for n in range(60)]
    qrels, run = {}, {}
    for n in range(200):
        top = 0 if n % 20 == 0 else 3
        qrels[f"q{n}"] = {d: rng.randint(0, top) for d in rng.sample(documents, rng.randint(1, 40))}
        ranked = rng.sample(documents, rng.randint(0, 50))
        run[f"q{n}"] = {d: rng.randint(0, 9) / 8 if n % 2 else rng.random() for d in ranked}
    return qrels, run


def test_a_query_without_results_or_without_relevant_documents_counts_zero():
    qrels = {"relevant": {"a": 1}, "empty": {"a": 1}, "absent": {"a": 1}, "irrelevant": {"a": 0}, "unjudged": {}}
    run = {"relevant": {"a": 1.0}, "empty": {}, "irrelevant": {"a": 1.0}, "unjudged": {"a": 1.0}, "unasked": {"a": 1.0}}
    for measure in ("nDCG@10", "MAP@1000", "recall@10", "MRR@10"):
        values = {query: value[measure] for query, value in trec_measures(qrels, run, [measure]).items()}
        assert values == {"relevant": 1.0, "empty": 0.0, "absent": 0.0, "irrelevant": 0.0, "unjudged": 0.0}


def test_numpy_scores_work_and_equal_in_single_precision_is_a_tie():
    run = {"q": {"a": np.float32(0.5), "b": np.float64(0.5) - 1e-12}}
    assert trec_measures({"q": {"a": 1}}, run, ["MRR@10"]) == {"q": {"MRR@10": 0.5}}


def test_a_score_that_is_not_a_number_is_rejected():
    with pytest.raises(InputError, match=r"query q: .* document b is NaN"):
        trec_measures({"q": {"a": 1}}, {"q": {"a": 1.0, "b": float("nan")}}, ["MRR@10"])
    changes = [Change("q", "p", ("a",))]
    for before, after in (({"a": float("nan")}, {"a": 1.0}), ({"a": 1.0}, {"a": float("nan")})):
        with pytest.raises(InputError, match=r"query [qp]: .* document a is NaN"):
            p_mrr(changes, {"q": before, "p": after})


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        ("nDGC@10", "no measure of ir_measures; did you mean nDCG"),
        ("MAP@", "write it like nDCG@10"),
        ("P(rell=2)@5", "write it like nDCG@10"),
        ("nDCG@0", "trec_eval cannot compute it"),
        ("Judged@10", "trec_eval cannot compute it"),
        ("MRR@-1", "write it like nDCG@10"),
    ],
)
def test_an_unusable_measure_is_rejected(measure, message):
    with pytest.raises(InputError, match=f"^measures={re.escape(measure)}: .*{message}"):
        trec_measures({"q": {"a": 1}}, {"q": {"a": 1.0}}, (measure,))


def test_measures_by_ir_measures_names_equal_trec_evals(chance):
    """Also with many ties."""
    qrels, run = chance
    names = {
        "nDCG@10": "ndcg_cut_10",
        "MAP@1000": "map_cut_1000",
        "recall@10": "recall_10",
        "P@5": "P_5",
        "AP": "map",
        "bpref": "bpref",
        "RR": "recip_rank",
        "Rprec": "Rprec",
        "Success@5": "success_5",
    }
    measured = trec_measures(qrels, run, [*names, "RR@3", "P(rel=2)@5"])
    asked = {"ndcg_cut.10", "map_cut.1000", "recall.10", "P.5", "map", "bpref", "recip_rank", "Rprec", "success.5"}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, asked).evaluate(run)
    strict = pytrec_eval.RelevanceEvaluator(qrels, {"P.5"}, relevance_level=2).evaluate(run)
    for query, values in theirs.items():
        order = sorted(run[query], key=lambda d: (np.float32(run[query][d]), d), reverse=True)
        relevant = [place for place, d in enumerate(order[:3], start=1) if qrels[query].get(d, 0) > 0]
        expected = {ours: values[name] for ours, name in names.items()} | {
            "RR@3": 1 / relevant[0] if relevant else 0.0,
            "P(rel=2)@5": strict[query]["P_5"],
        }
        assert measured[query] == pytest.approx(expected, abs=1e-12), query


# ----------------------------------------------------------------------------------------------- p-MRR, robustness


@pytest.fixture(scope="module")
def mteb_metrics():
    """mteb's measures as its FollowIR and InstructIR tasks use them."""
    return pytest.importorskip("mteb._evaluators.retrieval_metrics", reason="pip install 'mteb'")


@pytest.mark.integration
def test_p_mrr_equals_that_of_mteb_in_1000_random_cases_with_ties_and_missing_documents(mteb_metrics):
    rng = random.Random(0)
    documents = [f"d{n}" for n in range(30)]

    def a_ranking():
        ranked = rng.sample(documents, rng.randint(0, len(documents)))
        return {d: rng.randint(0, 6) / 8 for d in ranked}

    tied = missing = 0
    for _ in range(1000):
        queries = [f"{n}" for n in range(rng.randint(1, 3))]
        changed = {q: rng.sample(documents, rng.randint(1, 5)) for q in queries}
        before, after = ({f"{q}-{kind}": a_ranking() for q in queries} for kind in ("og", "changed"))
        ours = p_mrr([Change(f"{q}-og", f"{q}-changed", tuple(changed[q])) for q in queries], before | after)
        assert fmean(ours.values()) == pytest.approx(mteb_metrics.calculate_pmrr(before, after, changed), abs=1e-12)
        missing += any(d not in before[f"{q}-og"] for q in queries for d in changed[q])
        tied += any(len(set(run.values())) < len(run) for run in (before | after).values())
    assert min(tied, missing) > 500


@pytest.mark.parametrize(
    ("original", "changed", "value"),
    [(1, 4, 0.75), (2, 3, 1 / 3), (5, 5, 0.0), (1, 1001, 1 - 1 / 1001)],
)
def test_p_mrr_of_one_document_by_hand(original, changed, value):
    assert rank_change(original, changed) == pytest.approx(value)
    assert rank_change(changed, original) == pytest.approx(-value)


def test_p_mrr_averages_documents_and_ranks_a_missing_document_last():
    run = {"og": {"a": 0.9, "b": 0.8, "c": 0.7}, "changed": {"c": 0.9, "b": 0.8}}
    # a: 1 -> missing from 2, so 3: 1 - 1/3. b: 2 -> 2: 0. c is not among the changed.
    assert p_mrr([Change("og", "changed", ("a", "b"))], run) == {"og": pytest.approx((2 / 3 + 0) / 2)}


def test_queries_without_changes_are_left_out_and_missing_rankings_are_empty():
    run = {"q1": {"a": 1.0, "b": 0.5}, "q2": {"b": 1.0, "a": 0.5}}
    assert p_mrr([Change("q1", "q2", ("a",)), Change("q2", "q1", ())], run) == {"q1": pytest.approx(0.5)}
    assert p_mrr([Change("q1", "q3", ("b",))], run) == p_mrr([Change("q1", "q3", ("b",))], run | {"q3": {}})


def test_ties_rank_by_document_id_descending_as_in_trec_eval():
    tied = {"a": 0.5, "c": 0.5, "b": 0.5, "é": 0.5, "\U0001f600": 0.5, "z": 0.1}
    places = ranks(tied)
    assert list(places) == ["\U0001f600", "é", "c", "b", "a", "z"]
    for document, place in places.items():
        assert trec_measures({"q": {document: 1}}, {"q": tied}, ("MRR@10",))["q"]["MRR@10"] == pytest.approx(1 / place)


@pytest.mark.integration
def test_robustness_equals_that_of_mteb(mteb_metrics):
    rng = random.Random(0)
    documents = [f"d{n}" for n in range(20)]
    ids = [f"{query}_{instruction}" for query in range(50) for instruction in range(rng.randint(1, 10))]
    qrels = {q: {d: rng.randint(0, 2) for d in rng.sample(documents, 5)} for q in ids}
    run = {q: {d: rng.randint(0, 9) / 8 for d in rng.sample(documents, 15)} for q in ids}
    theirs = mteb_metrics.calculate_retrieval_scores(run, qrels, [10]).all_scores
    of_query = {q: values["nDCG@10"] for q, values in trec_measures(qrels, run, ["nDCG@10"]).items()}
    of_group = robustness(of_query, {q: q.split("_")[0] for q in ids})
    assert len(of_group) == 50
    assert fmean(of_group.values()) == pytest.approx(mteb_metrics.robustness_at_10(qrels, run, theirs), abs=1e-12)


def test_right_rank_equals_that_of_excluirs_authors():
    """Written down from `compute_right_rank` of their src/utils.py: `index` is [excluded, relevant], results are ten."""
    rng = random.Random(2)
    documents = [f"d{n:02}" for n in range(14)]
    for case in range(1000):
        excluded, relevant = rng.sample(documents, 2)
        scores = {d: rng.choice((1.0, 2.0, 3.0)) for d in rng.sample(documents, case % 15)}
        results = sorted(scores, key=lambda d: (scores[d], d), reverse=True)[:10]
        if excluded in results and relevant in results:
            expected = results.index(relevant) < results.index(excluded)
        else:
            expected = relevant in results
        value = right_rank({"q": {excluded: 0, relevant: 1}}, {"q": scores}, "right rank@10")
        assert value == {"q": float(expected)}
