"""BM25 against its formula."""

import math
from collections import Counter
from functools import partial

import pyarrow as pa
import pytest
import Stemmer
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.config.evaluation import Bm25
from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.tasks.task import CORPUS, Query, Task

WORDS = ["bread", "aspirin", "doses", "dosing", "flour", "nurse", "nurses", "the", "of", "risk"]
STOP = {"the", "of"}
STEM = Stemmer.Stemmer("english").stemWord


def task(passages: dict[str, str], queries: list[Query], **others) -> Task:
    corpus = pa.Table.from_pylist([{"id": i, "text": text} for i, text in passages.items()], CORPUS)
    return Task("t", corpus, tuple(queries), {q.id: {} for q in queries}, (), **others)


def bm25(**settings):
    return partial(baselines.rank, baselines.resolve("x", {"baseline": "bm25"} | settings))


def terms(text: str) -> list[str]:
    return [STEM(word) for word in text.lower().split() if word not in STOP]


def by_the_formula(passages: dict[str, str], query: str, k1: float, b: float) -> dict[str, float]:
    """Robertson's BM25 with Lucene's idf, which has no negative values, and without its constant factor k1 + 1."""
    documents = {i: terms(text) for i, text in passages.items()}
    mean = sum(map(len, documents.values())) / len(documents)
    scores = {}
    for i, document in documents.items():
        counts, score = Counter(document), 0.0
        for term in terms(query):
            holding = sum(term in other for other in documents.values())
            idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            score += (
                idf * counts[term] / (counts[term] + k1 * (1 - b + b * len(document) / mean)) if counts[term] else 0
            )
        scores[i] = score
    return scores


texts = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


@settings(max_examples=40, deadline=None)
@given(st.lists(texts, min_size=2, max_size=12), texts, st.sampled_from([(1.5, 0.75), (0.9, 0.4), (0.0, 0.0)]))
def test_scores_follow_the_formula_and_documents_without_shared_terms_are_left_out(written, query, how):
    passages = {f"d{row:02}": text for row, text in enumerate([*written, "bread flour"])}
    run = bm25(bm25=Bm25(k1=how[0], b=how[1]))(task(passages, [Query("q", query or "nothing")]), 1000)
    expected = {i: score for i, score in by_the_formula(passages, query, *how).items() if score > 0}
    assert run["q"] == pytest.approx(expected, rel=1e-4)
    assert list(run["q"]) == sorted(run["q"], key=lambda i: (run["q"][i], i), reverse=True)


def test_ties_go_to_the_higher_id_also_at_the_last_place():
    same = dict.fromkeys(("a", "c", "b", "d"), "bread and flour")
    assert list(bm25()(task(same | {"e": "aspirin"}, [Query("q", "bread")]), 2)["q"]) == ["d", "c"]


def test_bm25_ranks_all_candidates_and_never_excluded_documents():
    passages = {"a": "bread", "b": "aspirin", "c": "nurse", "d": "bread bread", "e": "bread flour"}
    queries = [Query("q", "bread"), Query("r", "bread")]
    asked = task(
        passages,
        queries,
        candidates={"q": ["c", "a", "d"], "r": [*"abcde", "not there"]},
        excluded={"q": {"d"}, "r": {"a"}},
    )
    run = bm25()(asked, 10)
    assert list(run["q"]) == ["a", "c"]
    assert run["q"]["c"] == 0.0
    assert set(run["r"]) == {"b", "c", "d", "e"}
    # Of the whole corpus: idf and mean length do not depend on the candidates.
    assert run["q"]["a"] == pytest.approx(bm25()(task(passages, queries), 10)["q"]["a"])


def test_the_instruction_is_part_of_the_query_or_not():
    passages = {"a": "bread", "b": "nurse"}
    asked = task(passages, [Query("q", "bread", "for nurses")])
    assert set(bm25()(asked, 10)["q"]) == {"a", "b"}
    assert set(bm25(baseline="bm25-query-only")(asked, 10)["q"]) == {"a"}


def test_the_stemmer_applies():
    passages = {"a": "dosing of drugs", "b": "the doses"}
    asked = task(passages, [Query("q", "dose of the drug")])
    assert set(bm25()(asked, 10)["q"]) == {"a", "b"}
    assert set(bm25(bm25=Bm25(stemmer=None))(asked, 10)["q"]) == set()


def test_texts_and_queries_without_terms_are_allowed():
    passages = {"a": "", "b": "the of", "c": "bread"}
    run = bm25()(task(passages, [Query("q", "the"), Query("r", "?"), Query("s", "bread")]), 10)
    assert run["q"] == {}
    assert run["r"] == {}
    assert list(run["s"]) == ["c"]
    blank = task(
        {"a": "", "b": "the"}, [Query("q", "bread"), Query("r", "bread")], candidates={"q": ["a", "b"], "r": []}
    )
    assert bm25()(blank, 10) == {"q": {"b": 0.0, "a": 0.0}, "r": {}}


def test_an_unknown_stemmer_is_refused_before_work_starts():
    with pytest.raises(InputError, match="did you mean english"):
        baselines.inputs(baselines.resolve("x", {"baseline": "bm25", "bm25": {"stemmer": "englisch"}}), "models.x")
