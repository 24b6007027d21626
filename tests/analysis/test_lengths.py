import statistics

import pytest

from infembed_ray.analysis.lengths import lengths
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
