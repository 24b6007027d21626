import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.evaluation import retrievers
from infembed_ray.evaluation.retrievers import exact_search


def by_lexsort(queries, corpus, ids, depth):
    """All scores at once, sorted with numpy by (score, id), both descending."""
    found = []
    id_order = np.argsort(np.argsort(np.array(ids)))
    for row in queries @ corpus.T:
        order = np.lexsort((-id_order, -row))[:depth]
        found.append({ids[i]: float(row[i]) for i in order})
    return found


@given(
    st.integers(1, 7), st.integers(1, 40), st.integers(1, 50), st.integers(1, 5), st.integers(1, 9), st.integers(0, 99)
)
@settings(deadline=None)
def test_exact_search_equals_a_full_sort_with_ties_in_any_blocks(n, m, depth, query_block, corpus_block, seed):
    rng = np.random.default_rng(seed)
    # Small whole numbers: inner products are exact, and many are equal or zero.
    queries = rng.integers(-2, 3, (n, 3)).astype(np.float32)
    corpus = rng.integers(-2, 3, (m, 3)).astype(np.float32)
    ids = [f"d{number}" for number in rng.permutation(m)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrievers, "QUERY_BLOCK", query_block)
        patch.setattr(retrievers, "CORPUS_BLOCK", corpus_block)
        found = exact_search(queries, corpus, ids, depth)
    expected = by_lexsort(queries, corpus, ids, depth)
    assert found == expected
    assert [list(ranking) for ranking in found] == [list(ranking) for ranking in expected]


def test_exact_search_over_several_real_blocks_of_unit_vectors():
    rng = np.random.default_rng(0)
    corpus = rng.normal(size=(2 * retrievers.CORPUS_BLOCK + 5, 8)).astype(np.float32)
    corpus /= np.linalg.norm(corpus, axis=1, keepdims=True)
    queries = corpus[[0, retrievers.CORPUS_BLOCK, -1]]
    ids = [f"{number:06d}" for number in range(len(corpus))]
    found = exact_search(queries, corpus, ids)
    assert [next(iter(ranking)) for ranking in found] == [ids[0], ids[retrievers.CORPUS_BLOCK], ids[-1]]
    for ranking, expected in zip(found, by_lexsort(queries, corpus, ids, 1000), strict=True):
        assert len(ranking) == retrievers.DEPTH
        assert list(ranking.values()) == pytest.approx(list(expected.values()), abs=1e-6)


def test_zero_and_negative_zero_are_one_score():
    queries = np.array([[1.0, 0.0]], dtype=np.float32)
    corpus = np.array([[-0.0, 1.0], [0.0, 1.0], [-1.0, 0.0]], dtype=np.float32)
    assert list(exact_search(queries, corpus, ["b", "a", "c"])[0]) == ["b", "a", "c"]


def test_an_empty_corpus_gives_empty_rankings():
    empty = np.empty((0, 4), dtype=np.float32)
    assert exact_search(np.ones((2, 4), dtype=np.float32), empty, []) == [{}, {}]
