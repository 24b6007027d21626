from itertools import combinations, product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.evaluation import significance
from infembed_ray.evaluation.significance import Stratum, compare, holm


def values(queries, models, seed=0):
    random = np.random.default_rng(seed)
    return random.beta(0.7, 0.5, (queries, models)) + np.linspace(0, 0.2, models)


def alone(table):
    return Stratum.from_values(table, range(len(table)))


def test_intervals_of_means_and_differences_are_scipys():
    table = values(40, 3)
    cells = compare([alone(table)], resamples=2000)
    for model, compared in enumerate(cells):
        for sample, estimate in (
            (table[:, model], compared.mean),
            (table[:, model] - table[:, 0], compared.difference),
        ):
            if estimate is None:
                continue
            theirs = scipy.stats.bootstrap(
                (sample,),
                np.mean,
                n_resamples=2000,
                method="percentile",
                rng=np.random.default_rng(significance.SEED),
            ).confidence_interval
            assert estimate.value == pytest.approx(sample.mean())
            assert (estimate.low, estimate.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert cells[0].difference is None
    assert cells[0].p is None


def test_p_values_of_few_queries_are_the_exact_ones_of_scipy():
    table = values(10, 3)
    cells = compare([alone(table)], resamples=1024)
    theirs = [
        scipy.stats.permutation_test(
            (table[:, model], table[:, 0]), lambda a, b: np.mean(a - b), permutation_type="samples", n_resamples=np.inf
        ).pvalue
        for model in (1, 2)
    ]
    assert [compared.p for compared in cells[1:]] == pytest.approx(holm(theirs))


def test_groups_are_resampled_whole_as_in_an_enumeration():
    table, groups = values(7, 2, seed=1), ["a", "a", "b", "c", "c", "c", "d"]
    other, singles = values(3, 2, seed=2), ["x", "y", "z"]
    means = []
    for first in product("abcd", repeat=4):
        rows = [row for group in first for row in range(7) if groups[row] == group]
        for second in product(range(3), repeat=3):
            means.append((table[rows].mean(0) + other[list(second)].mean(0)) / 2)
    means = np.array(means)
    cells = compare([Stratum.from_values(table, groups), Stratum.from_values(other, singles)], resamples=100_000)
    drawn = significance._bootstrap(
        [Stratum.from_values(table, groups), Stratum.from_values(other, singles)], 100_000, np.random.default_rng(0)
    )
    assert drawn.mean(0) == pytest.approx(means.mean(0), abs=0.003)
    assert drawn.std(0) == pytest.approx(means.std(0), abs=0.003)
    low, high = np.quantile(means[:, 1] - means[:, 0], [0.025, 0.975])
    assert (cells[1].difference.low, cells[1].difference.high) == pytest.approx((low, high), abs=0.01)

    observed = (table.mean(0) + other.mean(0)) / 2
    extreme = 0
    for signs in product((1, -1), repeat=7):
        sign = dict(zip("abcdxyz", signs, strict=True))
        one = np.mean([sign[g] * (b - a) for g, (a, b) in zip(groups, table, strict=True)])
        two = np.mean([sign[g] * (b - a) for g, (a, b) in zip(singles, other, strict=True)])
        extreme += abs(one + two) / 2 >= abs(observed[1] - observed[0]) - 1e-12
    assert cells[1].p == extreme / 2**7


def test_equal_models_are_not_different():
    table = np.repeat(values(30, 1), 2, axis=1)
    _, same = compare([alone(table)], resamples=500)
    assert (same.difference.value, same.difference.low, same.difference.high, same.p) == (0, 0, 0, 1)


def test_the_same_seed_gives_the_same_numbers_whatever_the_blocks(monkeypatch):
    strata = [alone(values(20, 2)), alone(values(30, 2, seed=9))]
    whole = compare(strata, resamples=300)
    monkeypatch.setattr(significance, "_AT_ONCE", 100)
    parted = compare(strata, resamples=300)
    assert parted[1].difference.low == pytest.approx(whole[1].difference.low, abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_the_closed_test_of_bonferroni(p_values):
    # A hypothesis is rejected if every set of hypotheses that holds it is, each by Bonferroni.
    for index, adjusted in enumerate(holm(p_values)):
        sets = (
            s for size in range(1, len(p_values) + 1) for s in combinations(range(len(p_values)), size) if index in s
        )
        assert adjusted == pytest.approx(max(min(1.0, len(s) * min(p_values[i] for i in s)) for s in sets))
