import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.retrieval.answers import ShardAnswer, fuse, merge
from infembed_ray.retrieval.shards import Hit

IDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
SCORES = st.sampled_from([-1.0, -0.0, 0.0, 0.5, 0.75, 1.0])
HITS = st.builds(Hit, IDS, SCORES, st.just("text"))
QUERIES = 3


@pytest.mark.integration
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.lists(HITS, max_size=6), min_size=QUERIES, max_size=QUERIES), min_size=1, max_size=4),
    st.integers(1, 20),
)
def test_merging_is_sorting_everything_by_score_and_id(shards: list[list[list[Hit]]], k: int) -> None:
    answers = [ShardAnswer(results, 7) for results in shards]
    for vector in range(QUERIES):
        everything = [hit for results in shards for hit in results[vector]]
        expected = sorted(((hit.score, hit.id) for hit in everything), reverse=True)[:k]
        assert [(hit.score, hit.id) for hit in merge(answers, vector, k)] == expected


def test_candidates_are_merged_by_their_fused_scores() -> None:
    """BM25 is divided by the largest of all shards."""
    one = ShardAnswer([[], [Hit("a", 0.8, ""), Hit("b", 0.4, "")]], 1, [np.zeros(0), np.array([0.0, 12.0])])
    other = ShardAnswer([[], [Hit("c", 0.6, "")]], 1, [np.zeros(0), np.array([3.0])])
    assert [(hit.id, hit.score) for hit in merge([one, other], 1, 2, 0.25)] == [
        ("a", pytest.approx(0.6)),
        ("b", pytest.approx(0.55)),
    ]
    assert merge([one, other], 0, 2, 0.25) == []
    assert [hit.id for hit in merge([one.part(1, 2), other.part(1, 2)], 0, 3, 1.0)] == ["b", "c", "a"]


def test_fused_scores_are_weighted_means_with_relative_bm25() -> None:
    dense, lexical = np.array([0.8, 0.4, 0.6], np.float32), np.array([0.0, 12.0, 3.0], np.float32)
    assert fuse(dense, lexical, 0.25).tolist() == pytest.approx([0.6, 0.55, 0.5125])
    assert fuse(dense, lexical, 1.0).tolist() == pytest.approx([0, 1, 0.25])
    assert fuse(dense, np.zeros(3, np.float32), 0.5).argmax() == 0  # without words in common the cosine decides
