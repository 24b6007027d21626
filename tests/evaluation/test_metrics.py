"""Measures against trec_eval, mteb, and slow definitions in double precision, written independently of the code."""

from __future__ import annotations

import math
import random
import re
from statistics import fmean

import ir_measures
import numpy as np
import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import Change, p_mrr, rank_change, ranks, robustness, trec_measures

DOCUMENTS = [f"d{n}" for n in range(8)]
scores = st.dictionaries(
    st.sampled_from(DOCUMENTS),
    st.integers(-3, 3).map(lambda eighths: eighths / 8),  # few values: many ties; exact in single precision
    max_size=len(DOCUMENTS),
)
judgements = st.dictionaries(st.sampled_from(DOCUMENTS), st.integers(0, 3))


# ------------------------------------------------------------------------------------------- definitions, slowly


def ranking(run):
    """Bubble sort by (score, id) descending."""
    order = list(run)
    for _ in order:
        for i in range(len(order) - 1):
            a, b = order[i], order[i + 1]
            if run[a] < run[b] or (run[a] == run[b] and a < b):
                order[i], order[i + 1] = b, a
    return order


def in_single_precision(run):
    return sorted(run, key=lambda d: (np.float32(run[d]), d), reverse=True)


def ndcg(judged, order, k):
    gained = sum(judged.get(d, 0) / math.log2(i + 2) for i, d in enumerate(order[:k]))
    ideal = sum(gain / math.log2(i + 2) for i, gain in enumerate(sorted(judged.values(), reverse=True)[:k]))
    return gained / ideal if ideal else 0.0


def average_precision(judged, order, k):
    relevant = [d for d in judged if judged[d] > 0]
    hits, total = 0, 0.0
    for place, d in enumerate(order[:k], start=1):
        if d in relevant:
            hits += 1
            total += hits / place
    return total / len(relevant) if relevant else 0.0


def recall(judged, order, k):
    relevant = [d for d in judged if judged[d] > 0]
    return sum(d in order[:k] for d in relevant) / len(relevant) if relevant else 0.0


def reciprocal_rank(judged, order, k):
    return next((1 / place for place, d in enumerate(order[:k], start=1) if judged.get(d, 0) > 0), 0.0)


DEFINITIONS = {"nDCG": ndcg, "MAP": average_precision, "recall": recall, "MRR": reciprocal_rank}


def slow_p_mrr(documents, before, after):
    def rank(document, run):
        return ranking(run).index(document) + 1 if document in run else len(run) + 1

    total = 0.0
    for document in documents:
        og, new = rank(document, before), rank(document, after)
        # FollowIR writes it with the reciprocal ranks MRR = 1 / rank.
        total += (1 / og) / (1 / new) - 1 if og >= new else 1 - (1 / new) / (1 / og)
    return total / len(documents)


# ------------------------------------------------------------------------------------------ trec_eval's measures


@given(judgements, scores, st.sampled_from([1, 3, 10]))
def test_trec_measures_equal_their_definitions_with_ties_also_at_the_cut_off(judged, run, k):
    found = trec_measures({"q": judged}, {"q": run}, [f"{name}@{k}" for name in DEFINITIONS])["q"]
    for name, definition in DEFINITIONS.items():
        assert found[f"{name}@{k}"] == pytest.approx(definition(judged, ranking(run), k), abs=1e-12), name


@pytest.fixture(scope="module")
def cranfield(shared_data):
    """Judgements of Cranfield and a TF-IDF run with ties, 100 documents per query."""
    folder = shared_data / "cranfield"
    qrels: dict[str, dict[str, int]] = {}
    for line in (folder / "cranqrel.trec.txt").read_text().splitlines():
        query, _, document, grade = line.split()
        qrels.setdefault(query, {})[document] = int(grade)
    documents = re.findall(
        r"<docno>\s*(\d+)\s*</docno>.*?<text>(.*?)</text>", (folder / "cran.all.1400.xml").read_text(), re.S
    )
    queries = re.findall(r"<title>(.*?)</title>", (folder / "cran.qry.xml").read_text(), re.S)
    vectorizer = TfidfVectorizer()
    matrix = vectorizer.fit_transform(text for _, text in documents)
    similarity = (vectorizer.transform(queries) @ matrix.T).toarray().round(2)
    ids = np.array([document for document, _ in documents])
    run = {}
    for number, row in enumerate(similarity, start=1):
        best = np.argsort(-row, kind="stable")[:100]
        run[str(number)] = dict(zip(ids[best].tolist(), row[best].tolist(), strict=True))
    return qrels, run


@pytest.fixture(scope="module")
def chance():
    """200 queries with graded, irrelevant or no judgements, few or no results, ties and unjudged documents."""
    rng = random.Random(0)
    documents = [f"d{n}" for n in range(60)]
    qrels, run = {}, {}
    for n in range(200):
        top = 0 if n % 20 == 0 else 3
        qrels[f"q{n}"] = {d: rng.randint(0, top) for d in rng.sample(documents, rng.randint(1, 40))}
        found = rng.sample(documents, rng.randint(0, 50))
        run[f"q{n}"] = {d: rng.randint(0, 9) / 8 if n % 2 else rng.random() for d in found}
    return qrels, run


MEASURES = ["nDCG@5", "nDCG@10", "MAP@1000", "MAP@10", "recall@10", "recall@100", "MRR@1", "MRR@10", "MRR@100"]


@pytest.mark.parametrize("data", ["cranfield", "chance"])
def test_trec_measures_equal_trec_eval_and_their_definitions(data, request):
    qrels, run = request.getfixturevalue(data)
    found = trec_measures(qrels, run, MEASURES)
    assert set(found) == set(qrels)
    # A double-precision loop of our own, for every query and measure.
    for query, judged in qrels.items():
        order = in_single_precision(run[query])
        for measure in MEASURES:
            name, k = measure.split("@")
            expected = DEFINITIONS[name](judged, order, int(k))
            assert found[query][measure] == pytest.approx(expected, abs=1e-6), (query, measure)
    # trec_eval itself, asked for other names: measures without a cut-off on a run that is cut before.
    asked = {"ndcg_cut.5,10", "map", "recall.10,100", "recip_rank"}
    plain = pytrec_eval.RelevanceEvaluator(qrels, asked).evaluate(run)
    shallow = {q: {d: run[q][d] for d in in_single_precision(run[q])[:10]} for q in run}
    cut = pytrec_eval.RelevanceEvaluator(qrels, {"map", "recip_rank"}).evaluate(shallow)
    for q in plain:
        expected = {
            "nDCG@5": plain[q]["ndcg_cut_5"],
            "nDCG@10": plain[q]["ndcg_cut_10"],
            "MAP@1000": plain[q]["map"],
            "MAP@10": cut[q]["map"],
            "recall@10": plain[q]["recall_10"],
            "recall@100": plain[q]["recall_100"],
            "MRR@10": cut[q]["recip_rank"],
            "MRR@100": plain[q]["recip_rank"],
        }
        assert {m: found[q][m] for m in expected} == pytest.approx(expected, abs=1e-12)
    # ir_measures, which names and averages them as papers do.
    names = {"nDCG@10": "nDCG@10", "MAP@1000": "AP@1000", "recall@100": "R@100", "MRR@100": "RR"}
    parsed = {measure: ir_measures.parse_measure(name) for measure, name in names.items()}
    means = ir_measures.calc_aggregate(list(parsed.values()), qrels, run)
    for measure, theirs in parsed.items():
        assert fmean(values[measure] for values in found.values()) == pytest.approx(means[theirs], abs=5e-5), measure
        assert 0.1 < means[theirs] < 0.95


def test_a_query_without_results_or_without_relevant_documents_counts_zero():
    qrels = {"found": {"a": 1}, "empty": {"a": 1}, "absent": {"a": 1}, "irrelevant": {"a": 0}, "unjudged": {}}
    run = {"found": {"a": 1.0}, "empty": {}, "irrelevant": {"a": 1.0}, "unjudged": {"a": 1.0}, "unasked": {"a": 1.0}}
    for measure in ("nDCG@10", "MAP@1000", "recall@10", "MRR@10"):
        values = {query: value[measure] for query, value in trec_measures(qrels, run, [measure]).items()}
        assert values == {"found": 1.0, "empty": 0.0, "absent": 0.0, "irrelevant": 0.0, "unjudged": 0.0}


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
        ("p-MRR", "no measure of ir_measures; did you mean MRR"),
        ("", "no measure of ir_measures; valid: AP, "),
        ("MAP@all", "write it like nDCG@10"),
        ("MAP@", "write it like nDCG@10"),
        ("P(rell=2)@5", "write it like nDCG@10"),
        ("bpref@10", "write it like nDCG@10"),
        ("recall", "write it like nDCG@10"),
        ("nDCG@0", "cannot be computed with these parameters"),
        ("MRR@0", "cannot be computed with these parameters"),
        ("MRR@-1", "write it like nDCG@10"),
    ],
)
def test_an_unusable_measure_is_rejected(measure, message):
    with pytest.raises(InputError, match=f"^measures={re.escape(measure)}: .*{message}"):
        trec_measures({"q": {"a": 1}}, {"q": {"a": 1.0}}, (measure,))


@pytest.mark.parametrize("data", ["cranfield", "chance"])
def test_measures_by_ir_measures_names_equal_trec_evals(data, request):
    """Also with many ties, which other implementations than trec_eval's break by the other order of document ids."""
    qrels, run = request.getfixturevalue(data)
    names = {
        "P@5": "P_5",
        "AP": "map",
        "bpref": "bpref",
        "RR": "recip_rank",
        "Rprec": "Rprec",
        "ndcg": "ndcg",
        "R@10": "recall_10",
        "Success@5": "success_5",
        "NumRet(rel=1)": "num_rel_ret",
    }
    found = trec_measures(qrels, run, [*names, "RR@3", "Judged@10", "P(rel=2)@5"])
    asked = {"P.5", "map", "bpref", "recip_rank", "Rprec", "ndcg", "recall.10", "success.5", "num_rel_ret"}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, asked).evaluate(run)
    strict = pytrec_eval.RelevanceEvaluator(qrels, {"P.5"}, relevance_level=2).evaluate(run)
    for query, values in theirs.items():
        order = in_single_precision(run[query])
        expected = {ours: values[name] for ours, name in names.items()} | {
            "RR@3": reciprocal_rank(qrels[query], order, 3),
            "Judged@10": fmean(d in qrels[query] for d in order[:10]) if order else 0.0,
            "P(rel=2)@5": strict[query]["P_5"],
        }
        assert found[query] == pytest.approx(expected, abs=1e-12), query


# ----------------------------------------------------------------------------------------------- p-MRR, robustness


@pytest.fixture(scope="module")
def mteb_metrics():
    """mteb's measures as its FollowIR and InstructIR tasks use them."""
    return pytest.importorskip("mteb._evaluators.retrieval_metrics", reason="pip install 'infembed-ray[mteb]'")


@pytest.mark.integration
def test_p_mrr_equals_that_of_mteb_in_1000_random_cases_with_ties_and_missing_documents(mteb_metrics):
    rng = random.Random(0)
    documents = [f"d{n}" for n in range(30)]

    def a_ranking():
        found = rng.sample(documents, rng.randint(0, len(documents)))
        return {d: rng.randint(0, 6) / 8 for d in found}

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


ASCENDING = {"0": 1.0, "1": 2.0, "2": 3.0, "3": 4.0}
PROMOTED = {"0": 4.0, "1": 1.0, "2": 2.0, "3": 3.0}
TIED = {"0": 0.5, "1": 0.5, "2": 0.5}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("before", "after", "value"),
    [
        (ASCENDING, ASCENDING, 0.0),
        (ASCENDING, PROMOTED, -0.75),
        (PROMOTED, ASCENDING, 0.75),
        (TIED, dict(reversed(TIED.items())), 0.0),
    ],
)
def test_p_mrr_gives_the_published_values_of_mteb_s_examples(before, after, value, mteb_metrics):
    """Cases and values of embeddings-benchmark/mteb, tests/test_evaluators/test_retrieval_metrics.py."""
    assert p_mrr([Change("a-og", "a-changed", ("0",))], {"a-og": before, "a-changed": after}) == {"a-og": value}
    assert mteb_metrics.calculate_pmrr({"a-og": before}, {"a-changed": after}, {"a": ["0"]}) == value


@given(st.lists(st.sampled_from(DOCUMENTS), min_size=1, unique=True), scores, scores)
def test_p_mrr_equals_its_definition_with_ties_and_missing_documents(documents, before, after):
    run = {"og": before, "changed": after}
    found = p_mrr([Change("og", "changed", tuple(documents))], run)
    assert found == {"og": pytest.approx(slow_p_mrr(documents, before, after), abs=1e-12)}
    assert -1 < found["og"] < 1
    undone = p_mrr([Change("changed", "og", tuple(documents))], run)
    assert undone == {"changed": pytest.approx(-found["og"], abs=1e-12)}


@pytest.mark.parametrize(
    ("original", "changed", "value"),
    [(1, 4, 0.75), (4, 1, -0.75), (2, 3, 1 / 3), (3, 2, -1 / 3), (5, 5, 0.0), (1, 1001, 1 - 1 / 1001)],
)
def test_p_mrr_of_one_document_by_hand(original, changed, value):
    assert rank_change(original, changed) == pytest.approx(value)


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
