from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.retrieval import searcher as room
from infembed_ray.retrieval.factory import build
from infembed_ray.retrieval.searcher import Neighbours, Searcher, calibrate
from tests.retrieval.vectors import clustered_vectors, unit_vectors

KINDS = (
    "Flat",
    "HNSW16",
    "HNSW16_SQ8",
    "IVF16,Flat",
    "IVF16_HNSW8,SQ8",
    "IVF16,PQ8x4fs",
    "OPQ4_16,IVF16,PQ4x4",
    "PCAR8,HNSW16",
)
LOSSLESS = ("Flat", "HNSW16", "IVF16,Flat")


@cache
def searcher_of(kind: str, n: int, d: int) -> Searcher:
    vectors = clustered_vectors(n, d, 40)
    made = Searcher(build(kind, vectors), vectors)
    parameters, _ = calibrate(made)
    made.use({name: min(value, 16) for name, value in parameters.items()})  # or so few would be searched exactly
    return made


def brute_force(searcher: Searcher, queries: np.ndarray, keep: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Exact products in float64, and the k-th best of those kept (or the least there is)."""
    products = queries.astype(np.float64) @ searcher.originals.astype(np.float64).T
    kept = np.sort(np.where(keep, products, -np.inf), axis=1)[:, ::-1][:, : min(k, int(keep.sum()))]
    return products, kept


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(data=st.data(), share=st.sampled_from([0.0, 0.001, 0.05, 0.5, 0.97, 1.0]), k=st.sampled_from([1, 7, 40]))
def test_only_kept_rows_are_found_as_many_as_there_are_with_exact_scores(
    kind: str, data: st.DataObject, share: float, k: int
) -> None:
    searcher = searcher_of(kind, 1500, 16)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    keep = rng.random(len(searcher)) < share
    queries = np.concatenate([unit_vectors(2, 16, int(rng.integers(2**32))), searcher.originals[:2]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "EXACT_BELOW", data.draw(st.sampled_from([0, 10_000])))
        scores, rows = searcher.search(queries, k, keep)
    products, best = brute_force(searcher, queries, keep, k)
    assert scores.shape == rows.shape == (4, k)
    found = rows >= 0
    assert (found.sum(axis=1) == best.shape[1]).all()
    assert keep[rows[found]].all()
    np.testing.assert_allclose(
        scores[found], np.take_along_axis(products, np.maximum(rows, 0), axis=1)[found], atol=1e-5
    )
    for row, score in zip(rows, scores, strict=True):
        assert len(set(row[row >= 0])) == best.shape[1]
        ranking = list(zip(score.tolist(), row.tolist(), strict=True))
        assert ranking == sorted(ranking, reverse=True)
    if searcher.exact or share < 0.05:
        np.testing.assert_allclose(scores[:, : best.shape[1]], best, atol=1e-5)


@pytest.mark.parametrize("kind", ["HNSW32", "IVF128,Flat"])
@pytest.mark.parametrize("least", [-1.0, -0.2, 0.2, 0.6, 0.9])
def test_what_is_near_the_query_may_all_be_left_out(kind: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters go with topics: here all that is nearer than `least` is dropped, a large part or a small one."""
    monkeypatch.setattr(room, "EXACT_BELOW", 100)
    searcher = searcher_of(kind, 12_000, 32)
    shares = []
    for query in searcher.originals[::1200]:
        products = searcher.originals.astype(np.float64) @ query
        keep = products < least
        scores, rows = searcher.search(query[None], 10, keep)
        assert keep[rows[rows >= 0]].all()
        best = np.sort(products[keep])[::-1][:10]
        shares += (scores[0, : len(best)] >= best[-1:] - 1e-6).tolist()
    assert not shares or np.mean(shares) >= 0.97


@pytest.mark.parametrize("kind", ["HNSW32", "IVF128,Flat"])
def test_more_hits_are_looked_for_harder(kind: str) -> None:
    """Parameters that find ten of the nearest ten would find half of the nearest two hundred."""
    searcher = searcher_of(kind, 12_000, 32)
    queries = searcher.originals[::600]
    scores, _ = searcher.search(queries, 200)
    _, best = brute_force(searcher, queries, np.ones(len(searcher), bool), 200)
    assert (scores >= best[:, -1:] - 1e-6).mean() >= 0.95


def test_equal_scores_come_by_row_descending() -> None:
    same = np.repeat(unit_vectors(3, 8), 5, axis=0)
    searcher = Searcher(build("Flat", same))
    _, rows = searcher.search(same[:1], 5)
    assert rows.tolist() == [[4, 3, 2, 1, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_come_back_as_they_were_added(kind: str) -> None:
    searcher = searcher_of(kind, 1500, 16)
    expected = clustered_vectors(1500, 16, 40)
    np.testing.assert_array_equal(searcher.vectors(np.array([1499, 0, 7])), expected[[1499, 0, 7]])
    np.testing.assert_array_equal(searcher.vectors(slice(10, 20)), expected[10:20])


def test_a_lossy_index_without_its_vectors_is_no_searcher() -> None:
    with pytest.raises(ValueError, match="does not hold its vectors"):
        Searcher(build("IVF4,SQ8", unit_vectors(100, 8)))


# ------------------------------------------------------------------------------------------------------- recall


@pytest.mark.parametrize("kind", KINDS)
def test_calibration_reaches_its_aim_and_says_what_an_oracle_finds(kind: str) -> None:
    searcher = searcher_of(kind, 1500, 16)
    parameters, recall = calibrate(searcher)
    wanted = set() if kind == "Flat" else {"efSearch" if "HNSW16" in kind else "nprobe"}
    assert set(parameters) == wanted | (set() if kind in LOSSLESS else {"rerank"})
    assert recall >= 0.98
    queries = np.arange(0, 1500, 5)
    products = searcher.originals.astype(np.float64) @ searcher.originals[queries].T.astype(np.float64)
    products[queries, np.arange(len(queries))] = -2  # themselves
    shares = []
    for column, row in enumerate(queries):
        nearest = set(np.argsort(-products[:, column])[:10].tolist())
        _, found = searcher.search(searcher.originals[row][None], 11)
        shares.append(len(nearest & set([r for r in found[0].tolist() if r != row][:10])) / 10)
    assert np.mean(shares) == pytest.approx(recall, abs=0.02)


def test_the_cheapest_parameters_that_do_are_taken() -> None:
    searcher = searcher_of("IVF16,Flat", 1500, 16)
    (nprobe,) = calibrate(searcher)[0].values()
    assert 1 <= nprobe < 16
    assert calibrate(searcher, aim=0.0)[0] == {"nprobe": 4}
    assert calibrate(searcher, aim=1.1)[0] == {"nprobe": 16}
    calibrate(searcher)


def test_recall_tells_a_poor_index_from_an_exact_one() -> None:
    vectors = unit_vectors(1000, 32)
    near = Neighbours(vectors, np.arange(0, 1000, 4))
    assert near.recall(Searcher(build("Flat", vectors))) == 1.0
    assert near.recall(Searcher(build("IVF64,Flat", vectors), vectors, {"nprobe": 1})) < 0.5


def test_a_passage_that_stands_often_is_as_good_as_its_copies() -> None:
    """Which of the copies are the ten nearest is chance, and no index finds the same ones."""
    vectors = np.repeat(unit_vectors(40, 16), 50, axis=0)
    made = Searcher(build("IVF8,Flat", vectors), vectors)
    assert calibrate(made)[1] >= 0.98


@pytest.mark.parametrize("n", [1, 2, 3, 9, 30])
def test_few_vectors_are_found_all(n: int) -> None:
    made = Searcher(build("HNSW8", unit_vectors(n, 4)))
    assert calibrate(made)[1] == 1.0
