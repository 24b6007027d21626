import math
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.tasks.task import CORPUS, Query, Task
from infembed_ray.retrieval import lexical
from infembed_ray.retrieval.lexical import DeltaTerms, Lexical, terms_of

TEXTS = [
    "The cat sat on the mat.",
    "Dogs chase cats; cats chase mice.",
    "",
    "Quantum field theory of cats",
    "the of and",
    "Mice, mice and more mice: a study of mice.",
]


@pytest.fixture
def index(tmp_path: Path) -> Lexical:
    lexical.write(tmp_path, TEXTS)
    return Lexical.open(tmp_path)


@pytest.mark.parametrize("query", ["cats and mice", "mice mice", "quantum theory", "nothing known", "the", ""])
def test_scores_are_those_of_the_evaluation_by_bm25s(index: Lexical, query: str) -> None:
    corpus = pa.table({"id": [str(n) for n in range(len(TEXTS))], "text": TEXTS}, schema=CORPUS)
    task = Task("t", corpus, (Query("q", query),), {}, ())
    expected = baselines.rank(baselines.resolve("BM25", "bm25"), task, 10)["q"]
    scores = index.scores(terms_of(query))
    assert {str(n): score for n, score in enumerate(scores.tolist()) if score} == pytest.approx(expected)


def test_passages_of_the_delta_are_scored_by_lucenes_formula_with_the_statistics_of_the_shard(index: Lexical) -> None:
    put = ["Cats like mice and new words", "unrelated"]
    delta = DeltaTerms()
    delta.add(0, put)
    documents = [terms_of(text) for text in TEXTS]
    average = sum(map(len, documents)) / len(documents)
    query = terms_of("mice cats words")
    for text, score in zip(put, delta.scores(index, query, 2), strict=True):
        terms = terms_of(text)
        expected = 0.0
        for term in query:
            frequency = sum(term in document for document in documents)
            idf = math.log(1 + (len(documents) - frequency + 0.5) / (frequency + 0.5))
            count = Counter(terms)[term]
            expected += idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(terms) / average))
        assert score == pytest.approx(expected, rel=1e-5)


def test_a_text_scores_the_same_in_the_delta_and_in_the_shard(index: Lexical) -> None:
    delta = DeltaTerms()
    delta.add(0, TEXTS)
    query = terms_of("cats chase mice in quantum fields")
    assert delta.scores(index, query, len(TEXTS)) == pytest.approx(index.scores(query), rel=1e-5)
    assert delta.scores(index, query, 2) == pytest.approx(index.scores(query)[:2], rel=1e-5)  # an older snapshot


@pytest.mark.parametrize("texts", [[], ["the", ""]])
def test_a_shard_without_terms_scores_nothing(tmp_path: Path, texts: list[str]) -> None:
    lexical.write(tmp_path, texts)
    index = Lexical.open(tmp_path)
    assert index.scores(terms_of("cats")).tolist() == [0.0] * len(texts)
    delta = DeltaTerms()
    delta.add(0, ["cats"])
    assert np.isfinite(delta.scores(index, ["cat"], 1)).all()
    assert delta.scores(index, ["cat"], 1)[0] > 0
