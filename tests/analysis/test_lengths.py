import statistics

import pytest

from infembed_ray.analysis.lengths import PAPER_SIZE, lengths, sizes
from tests.analysis.samples import record


def test_lengths_are_white_space_separated_words_by_kind_and_by_column():
    queries = [" ".join(["word"] * n) for n in (1, 2, 3, 4, 10)]
    rows = [record(f"r{n}", query_positive=q, query_negative="two\n words ") for n, q in enumerate(queries)]
    found = {(n.kind, n.column): n for n in lengths(rows)}
    assert len(found) == 3 + 7
    positive, pooled = found["query", "query_positive"], found["query", None]
    assert (positive.mean, positive.p50) == (4.0, 3.0)
    # numpy's default, between the order statistics
    assert (positive.p5, positive.p95) == (pytest.approx(1.2), pytest.approx(8.8))
    words = [1, 2, 3, 4, 10, *[2] * 5]
    assert (pooled.mean, pooled.p50) == (statistics.fmean(words), statistics.median(words))
    assert found["query", "query_negative"].p95 == 2


def test_lengths_have_the_papers_means():
    papers = {n.kind: n.paper_mean for n in lengths([record("a")]) if n.column is None}
    assert papers == {"instruction": 35.57, "query": 8.06, "passage": 55.2}  # Table 1


def test_no_records_have_no_lengths():
    assert lengths([]) == []


def test_sizes_are_distinct_texts_and_mean_words_in_all_and_per_source():
    rows = [
        record(f"r{n}", source="large" if n else "small", query_positive=f"{n} two", query_negative="the same one")
        for n in range(3)
    ]
    all_of_them, large, small = sizes(rows)
    assert [size.source for size in (all_of_them, large, small)] == [None, "large", "small"]
    assert [size.texts["query"] for size in (all_of_them, large, small)] == [4, 3, 2]
    assert all_of_them.texts["passage"] == 9
    assert all_of_them.mean_words["query"] == 2.5
    assert sizes(rows[:1])[0].source is None
    assert sizes([]) == []


def test_the_papers_set_has_two_instructions_two_queries_and_three_passages_a_record():
    texts = PAPER_SIZE.texts
    assert texts["instruction"] == texts["query"] == pytest.approx(texts["passage"] * 2 / 3, rel=1e-3)
