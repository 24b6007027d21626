from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.retrieval.answers import ShardRanking, best, merge, merge_rankings
from infembed_ray.retrieval.passages import TEXT
from infembed_ray.retrieval.shards import Hit

IDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
SCORES = st.sampled_from([-1.0, -0.0, 0.0, 0.5, 0.75, 1.0])
HITS = st.builds(Hit, IDS, SCORES, st.just("text"))
QUERIES = 3


def ranking_of(results: list[list[Hit]]) -> ShardRanking:
    """The ranking of a shard that has these hits for each vector."""
    ordered = [hit for hits in results for hit in sorted(hits, key=lambda hit: (hit.score, hit.id), reverse=True)]
    return ShardRanking(
        np.cumsum([len(hits) for hits in results]).tolist(),
        pa.array([hit.id for hit in ordered], TEXT),
        np.array([hit.score for hit in ordered], np.float32),
        np.arange(len(ordered)) + 100,
        7,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.lists(HITS, max_size=6), min_size=QUERIES, max_size=QUERIES), min_size=1, max_size=4),
    st.integers(1, 20),
)
def test_merging_is_sorting_everything_by_score_and_id(shards: list[list[list[Hit]]], k: int) -> None:
    rankings = [ranking_of(results) for results in shards]
    for vector in range(QUERIES):
        everything = [hit for results in shards for hit in results[vector]]
        expected = sorted(((hit.score, hit.id) for hit in everything), reverse=True)[:k]
        assert [(hit.score, hit.id) for hit in merge([results[vector] for results in shards], k)] == expected
        merged = merge_rankings(rankings, vector, k)
        assert list(zip(merged.scores, merged.ids, strict=True)) == expected
        for id, ranking, place in zip(merged.ids, merged.rankings, merged.places, strict=True):
            assert rankings[ranking].ids[place - 100].as_py() == id


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SCORES, IDS), max_size=30), st.integers(1, 10))
def test_the_best_are_those_of_a_full_sort(pairs: list[tuple[float, str]], k: int) -> None:
    scores = np.array([score for score, _ in pairs], np.float32)
    chosen = best(scores, k, pa.array([id for _, id in pairs], TEXT)).tolist()
    assert [pairs[place] for place in chosen] == sorted(pairs, reverse=True)[:k]
    assert len(set(chosen)) == len(chosen)


def test_a_part_of_a_ranking_is_that_of_its_vectors_and_ships_no_more() -> None:
    hits = [[Hit(f"{vector}-{n}", float(n), "") for n in range(vector)] for vector in range(5)]
    whole = ranking_of(hits)
    for start, end in [(0, 2), (2, 2), (2, 5), (0, 5)]:
        part, expected = whole.part(start, end), ranking_of(hits[start:end])
        assert (part.ends, part.ids, part.scores.tolist()) == (expected.ends, expected.ids, expected.scores.tolist())
    large = ranking_of([[Hit("x" * 1000, 0.0, "") for _ in range(100)], [Hit("y", 0.0, "")]])
    assert len(pickle.dumps(large.part(1, 2))) < 2000
