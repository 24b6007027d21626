"""How sure a mean is, and a difference between two models: by resampling queries, without assuming a distribution.

- Intervals: paired percentile bootstrap (Efron & Tibshirani, 1993, chapter 13). Every resample draws the same queries for all
  models.
- Tests: paired randomisation test, two-sided (Smucker et al., CIKM 2007): if two models were the same, it would not matter
  which of them a value came from. All ways to exchange values are tried where there are few, otherwise random ones.

Values are those of queries; queries of one group (a query under several instructions) are drawn and exchanged as one. A figure
over several tasks, such as the average of FollowIR, is the unweighted mean of their means; each task is resampled by itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 42
INTERVALS = (
    f"{CONFIDENCE:.0%} intervals by a paired percentile bootstrap over queries, {RESAMPLES:,} resamples, seed {SEED}"
)
TESTS = (
    f"p-values of a paired two-sided randomisation test ({RESAMPLES:,} exchanges, or all), by Holm's correction over the models "
    "of a column; queries of a group are resampled as one"
)
"""What tables say below themselves."""

_AT_ONCE = 1 << 21
"""Elements of a block of resamples: some 50 MB with its copies."""
_TIE = 1e-12
"""Relative: exchanges that differ only by the rounding of their sums are equally extreme."""


@dataclass(frozen=True)
class Stratum:
    """The values of m models for the queries of one task, summed by group."""

    sums: np.ndarray
    """(g, m) float64."""
    counts: np.ndarray
    """(g) queries of each group."""

    @classmethod
    def of(cls, values: np.ndarray, groups: Sequence[Hashable]) -> Stratum:
        """From (n, m) values, finite, and the group of each query; n > 0."""
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        rows = np.array([numbers[group] for group in groups])
        sums = np.zeros((len(numbers), values.shape[1]))
        np.add.at(sums, rows, values)
        return cls(sums, np.bincount(rows).astype(np.float64))

    @property
    def means(self) -> np.ndarray:
        """(m) means over queries."""
        return self.sums.sum(axis=0) / self.counts.sum()


@dataclass(frozen=True)
class Estimate:
    """A value and its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Compared:
    """A model's figure, and what sets it apart from the baseline's; None of the baseline itself."""

    mean: Estimate
    difference: Estimate | None = None
    p: float | None = None
    """Probability of a difference at least as large between equal models, not corrected."""


def compare(
    strata: Sequence[Stratum],
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = SEED,
) -> list[Compared]:
    """Means of m models, and their differences to the first.

    Args:
        strata: at least one, of the same models. The figure is the unweighted mean of their means.
        resamples: of the bootstrap, and at most of the test.
        confidence: of the intervals, in (0, 1).
        seed: the same one gives the same intervals and p-values.
    """
    means = np.mean([stratum.means for stratum in strata], axis=0)
    drawn = _bootstrap(strata, resamples, np.random.default_rng(seed))
    tails = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tails, 1 - tails], axis=0)
    apart = drawn - drawn[:, :1]
    low_apart, high_apart = np.quantile(apart, [tails, 1 - tails], axis=0)
    p_values = _randomisation(strata, resamples, np.random.default_rng(seed))
    return [
        Compared(
            Estimate(float(means[m]), float(low[m]), float(high[m])),
            Estimate(float(means[m] - means[0]), float(low_apart[m]), float(high_apart[m])) if m else None,
            float(p_values[m]) if m else None,
        )
        for m in range(len(means))
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm, 1979): of those below 0.05, one is wrong in at most 5 % of tables."""
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def _bootstrap(strata: Sequence[Stratum], resamples: int, random: np.random.Generator) -> np.ndarray:
    """(resamples, m) figures of resampled queries."""
    total = np.zeros((resamples, strata[0].sums.shape[1]))
    for stratum in strata:
        size = len(stratum.counts)
        for block in _blocks(resamples, size):
            rows = block.stop - block.start
            drawn = random.integers(0, size, (rows, size)) + np.arange(rows)[:, None] * size
            times = np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size).astype(np.float64)
            total[block] += (times @ stratum.sums) / (times @ stratum.counts)[:, None]
    return total / len(strata)


def _randomisation(strata: Sequence[Stratum], resamples: int, random: np.random.Generator) -> np.ndarray:
    """(m) p-values of the differences to the first model."""
    # Exchanging the values of a group changes the sign of what it adds to the difference of the figures.
    adds = np.concatenate([(s.sums - s.sums[:, :1]) / s.counts.sum() / len(strata) for s in strata])
    size = len(adds)
    least = np.abs(adds.sum(axis=0)) - _TIE * np.abs(adds).sum(axis=0)
    every = size < 63 and 1 << size <= resamples
    trials = 1 << size if every else resamples
    extreme = np.zeros(adds.shape[1])
    for block in _blocks(trials, size):
        if every:
            kept = (np.arange(block.start, block.stop)[:, None] >> np.arange(size)) & 1
        else:
            kept = random.integers(0, 2, (block.stop - block.start, size), dtype=np.int8)
        extreme += (np.abs((2.0 * kept - 1.0) @ adds) >= least).sum(axis=0)
    # Of random exchanges, the one that was observed is one more: no p-value is 0.
    return extreme / trials if every else (extreme + 1) / (trials + 1)


def _blocks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _AT_ONCE // width)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
