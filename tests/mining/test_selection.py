"""Positive-aware thresholds against their definitions, and the choice among what is left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.config.mining import MineSettings
from infembed_ray.mining.selection import bound, select


def settings(**changes):
    return MineSettings(records="-", index="-", output="-", **changes)


@pytest.mark.parametrize(
    ("positive", "changes", "expected"),
    [
        (0.8, {"max_share": 0.95}, 0.76),  # TopK-PercPos
        (0.8, {"max_share": 1.0, "margin": 0.05}, 0.75),  # TopK-MarginPos
        (0.8, {"max_share": 0.9, "margin": 0.05}, 0.72),  # the stricter one
        (0.8, {"max_share": 1.0}, 0.8),
        (-0.2, {"max_share": 0.9}, -0.22),  # never above the positive
    ],
)
def test_the_bound_is_that_of_the_paper(positive, changes, expected):
    assert bound(positive, settings(**changes)) == pytest.approx(expected)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=3),
    st.lists(st.floats(-1, 1), max_size=12).map(lambda scores: sorted(scores, reverse=True)),
    st.integers(1, 5),
    st.sampled_from(["top", "random"]),
)
def test_negatives_are_below_the_bound_of_the_lowest_positive(positives, candidates, most, sample):
    chosen = select(settings(negatives=most, sample=sample), "x", positives, candidates)
    limit = bound(min(positives), settings())
    below = [place for place, score in enumerate(candidates) if score < limit]
    assert chosen.too_similar == len(candidates) - len(below)
    assert len(chosen.places) == min(most, len(below))
    assert chosen.places == sorted(set(chosen.places))
    assert set(chosen.places) <= set(below)
    if sample == "top":
        assert chosen.places == below[:most]
    assert chosen == select(settings(negatives=most, sample=sample), "x", positives, candidates)


def test_a_random_sample_differs_by_tuple_and_seed():
    scores = [0.5 - n / 100 for n in range(30)]
    drawn = {
        tuple(select(settings(sample="random", seed=seed), identity, [0.9], scores).places)
        for seed in (1, 2)
        for identity in ("a", "b")
    }
    assert len(drawn) == 4
