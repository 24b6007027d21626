"""Intervals by the paired percentile bootstrap (Efron & Tibshirani, 1993) and p-values by the paired randomisation test
(Smucker et al., CIKM 2007), over queries.

Queries of one group, such as one query under several instructions, are drawn and exchanged together. A figure over several
tasks is the unweighted mean of the tasks' means; each task is resampled separately.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
LEVEL = 0.05
"""Corrected p-value below which a difference is significant."""
SEED = 42
INTERVALS = (
    f"{CONFIDENCE:.0%} intervals by a paired percentile bootstrap over queries, {RESAMPLES:,} resamples, seed {SEED}"
)
TESTS = (
    f"p-values of a paired two-sided randomisation test ({RESAMPLES:,} exchanges, or all), by Holm's correction over the models "
    "of a column; queries of a group are resampled as one"
)
"""Notes below tables."""

_AT_ONCE = 1 << 21
"""Elements per block of resamples: about 50 MB with copies."""
_TIE = 1e-12
"""Relative tolerance within which exchanges are equally extreme: sums differ by rounding."""


@dataclass(frozen=True)
class Stratum:
    """Values of m models for the queries of one task, summed by group."""

    sums: np.ndarray
    """(g, m) float64."""
    counts: np.ndarray
    """(g) number of queries per group."""

    @classmethod
    def from_values(cls, values: np.ndarray, groups: Sequence[Hashable]) -> Stratum:
        """Sum (n, m) finite values by the group of each query; n > 0."""
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        rows = np.array([numbers[group] for group in groups])
        sums = np.zeros((len(numbers), values.shape[1]))
        np.add.at(sums, rows, values)
        return cls(sums, np.bincount(rows).astype(np.float64))

    @property
    def means(self) -> np.ndarray:
        """Means over queries: (m)."""
        return self.sums.sum(axis=0) / self.counts.sum()


@dataclass(frozen=True)
class IntervalEstimate:
    """A value and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Compared:
    """A model's figure and its difference to the baseline; None for the baseline itself."""

    mean: IntervalEstimate
    difference: IntervalEstimate | None = None
    p: float | None = None
    """p-value of the difference, by Holm's correction over the models."""

    @property
    def significant(self) -> bool:
        """Whether the figure differs significantly from the baseline's."""
        return self.p is not None and self.p < LEVEL


def compare(strata: Sequence[Stratum], resamples: int = RESAMPLES) -> list[Compared]:
    """Estimate the means of m models and their differences to the first.

    Args:
        strata: one or more tasks of the same models. The figure is the unweighted mean of their means.
        resamples: resamples of the bootstrap, and maximum exchanges of the test.
    """
    means = np.mean([stratum.means for stratum in strata], axis=0)
    drawn = _bootstrap(strata, resamples, np.random.default_rng(SEED))
    tails = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tails, 1 - tails], axis=0)
    deltas = drawn - drawn[:, :1]
    low_delta, high_delta = np.quantile(deltas, [tails, 1 - tails], axis=0)
    exchanges = resamples if len(means) > 1 else 0  # one model differs from none
    p_values = holm(_randomisation(strata, exchanges, np.random.default_rng(SEED)).tolist()[1:])
    return [
        Compared(
            IntervalEstimate(float(means[m]), float(low[m]), float(high[m])),
            IntervalEstimate(float(means[m] - means[0]), float(low_delta[m]), float(high_delta[m])) if m else None,
            p_values[m - 1] if m else None,
        )
        for m in range(len(means))
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons (Holm, 1979), which controls the family-wise error rate."""
    adjusted, order = np.array(p_values), np.argsort(p_values, kind="stable")
    adjusted[order] = np.maximum.accumulate(adjusted[order] * np.arange(len(order), 0, -1)).clip(max=1.0)
    return adjusted.tolist()


def _bootstrap(strata: Sequence[Stratum], resamples: int, random: np.random.Generator) -> np.ndarray:
    """Draw queries and compute the figures: (resamples, m)."""
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
    """Compute p-values of the differences to the first model: (m)."""
    # Exchanging the values of a group changes the sign of its contribution to the difference.
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
    # The observed assignment counts as one of the random exchanges, so no p-value is 0.
    return extreme / trials if every else (extreme + 1) / (trials + 1)


def _blocks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _AT_ONCE // width)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
