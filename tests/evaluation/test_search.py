import weakref

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.evaluation import search
from infembed_ray.evaluation.search import exact_search


def by_lexsort(queries, corpus, ids, depth):
    """Rank by a full sort with numpy by (score, id), both descending."""
    rankings = []
    id_order = np.argsort(np.argsort(np.array(ids)))
    for row in queries @ corpus.T:
        order = np.lexsort((-id_order, -row))[:depth]
        rankings.append({ids[i]: float(row[i]) for i in order})
    return rankings


sizes = (st.integers(1, 7), st.integers(1, 40), st.integers(1, 50), st.integers(1, 5), st.integers(1, 9))


def small_whole_numbers(n, m, seed):
    """Draw integer vectors: inner products are exact, and many are equal or zero."""
    rng = np.random.default_rng(seed)
    queries = rng.integers(-2, 3, (n, 3)).astype(np.float32)
    corpus = rng.integers(-2, 3, (m, 3)).astype(np.float32)
    return rng, queries, corpus, [f"d{number}" for number in rng.permutation(m)]


def in_blocks(query_block, corpus_block, *args, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "QUERY_BLOCK", query_block)
        patch.setattr(search, "CORPUS_BLOCK", corpus_block)
        return exact_search(*args, **options)


@given(*sizes, st.integers(0, 99))
@settings(deadline=None)
def test_exact_search_equals_a_full_sort_with_ties_in_any_blocks(n, m, depth, query_block, corpus_block, seed):
    _, queries, corpus, ids = small_whole_numbers(n, m, seed)
    rankings = in_blocks(query_block, corpus_block, queries, corpus, ids, depth)
    expected = by_lexsort(queries, corpus, ids, depth)
    assert rankings == expected
    assert [list(ranking) for ranking in rankings] == [list(ranking) for ranking in expected]


@given(*sizes, st.integers(0, 99))
@settings(deadline=None)
def test_only_candidates_are_ranked_and_excluded_documents_never(n, m, depth, query_block, corpus_block, seed):
    rng, queries, corpus, ids = small_whole_numbers(n, m, seed)
    candidates, excluded = ([[d for d in ids if rng.random() < p] for _ in range(n)] for p in (0.6, 0.2))
    rankings = in_blocks(
        query_block, corpus_block, queries, corpus, ids, depth, candidates=candidates, excluded=excluded
    )
    for ranking, whole, among, without in zip(
        rankings, by_lexsort(queries, corpus, ids, m), candidates, excluded, strict=True
    ):
        left = [(d, score) for d, score in whole.items() if d in among and d not in without]
        assert list(ranking.items()) == left[:depth]


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 9), st.integers(0, 99))
@settings(deadline=None)
def test_a_corpus_in_pieces_gives_the_same_rankings(pieces, corpus_block, seed):
    _, queries, corpus, ids = small_whole_numbers(2, sum(pieces), seed)
    stream = (part for part in np.split(corpus, np.cumsum(pieces)[:-1]) if pieces)
    assert in_blocks(2, corpus_block, queries, stream, ids, 5) == by_lexsort(queries, corpus, ids, 5)


def test_search_holds_one_block_of_a_corpus_in_pieces():
    alive = []

    def pieces():
        for number in range(40):
            piece = np.full((4, 2), number, dtype=np.float32)
            alive.append(weakref.ref(piece))
            yield piece
            assert sum(reference() is not None for reference in alive) <= 16 // 4 + 1

    ids = [f"{number:03d}" for number in range(160)]
    rankings = in_blocks(2, 16, np.ones((3, 2), dtype=np.float32), pieces(), ids, 2)
    assert rankings == [{"159": 78.0, "158": 78.0}] * 3


def test_ids_may_be_arrow_chunks_and_unknown_candidates_are_ignored():
    _, queries, corpus, ids = small_whole_numbers(2, 9, 0)
    chunks = pa.chunked_array([ids[:4], [], ids[4:]], pa.string())
    assert exact_search(queries, corpus, chunks, 5) == exact_search(queries, corpus, ids, 5)
    assert exact_search(queries, corpus, chunks, candidates=[["no such document"], [ids[3]]])[0] == {}


def test_zero_and_negative_zero_are_one_score():
    queries = np.array([[1.0, 0.0]], dtype=np.float32)
    corpus = np.array([[-0.0, 1.0], [0.0, 1.0], [-1.0, 0.0]], dtype=np.float32)
    assert list(exact_search(queries, corpus, ["b", "a", "c"])[0]) == ["b", "a", "c"]
