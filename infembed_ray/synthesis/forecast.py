"""Forecast of a run from a canary: a random sample of its seeds that went through all steps."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from infembed_ray.config.llm import Limits
from infembed_ray.config.synthesis import Canary
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis.outcome import Outcome

CONFIDENCE = 0.95
RESAMPLES = 2000

Interval = tuple[float, float, float]
"""A figure, and the low and the high end of its interval of CONFIDENCE."""


@dataclass(frozen=True)
class Forecast:
    """What all seeds will take.

    Shares of records have Wilson's interval; the others have a percentile bootstrap over the sampled seeds.

    Attributes:
        sampled: seeds of the sample; `seeds`: of the run.
        usd_per_1000_kept: None if the sample has no kept record or a price is unknown.
        hours: of requests, at the sample's mean latency with all slots in use, and no faster than the limits per minute
            allow; its interval is that of the calls. None if journals answered the sample.
    """

    sampled: int
    seeds: int
    share_kept: Interval
    usd_per_1000_kept: Interval | None
    usd: Interval | None
    calls: Interval
    tokens: Interval
    hours: Interval | None

    def __str__(self) -> str:
        parts = [
            f"{_shown(self.share_kept, '.0%')} kept",
            f"{_shown(self.usd_per_1000_kept, ',.2f')} USD per 1,000 kept",
            f"{_shown(self.usd, ',.2f')} USD",
            f"{_shown(self.calls, ',.0f')} calls",
            f"{_shown(self.tokens, ',.0f')} tokens",
            f"{_shown(self.hours, ',.2f')} hours",
        ]
        return f"forecast for {self.seeds:,} seeds from {self.sampled:,}: {'; '.join(parts)}"

    def refusal(self, canary: Canary, failure: str) -> str | None:
        """Return why the run must end here by its settings; None if it may go on. `failure`: of the first row not kept."""
        share, usd, most = self.share_kept[0], self.usd_per_1000_kept, canary.max_usd_per_1000_kept
        if not share:
            return f"no record of the canary is kept ({failure})"
        if canary.min_kept is not None and share < canary.min_kept:
            return f"canary.min_kept={canary.min_kept:g}: {share:.0%} of the canary's records are kept"
        if most is not None and (usd is None or usd[0] > most):
            shown = "unknown, as a price is" if usd is None else f"{usd[0]:,.2f}"
            return f"canary.max_usd_per_1000_kept={most:g}: the forecast is {shown}"
        return "canary.stop=true: the run ends after its forecast" if canary.stop else None


def sample(seeds: Iterable[Seed], size: int, seed: int) -> list[Seed]:
    """Draw `size` seeds at random, the same ones in any order of the seeds; memory holds only these."""

    def draw(each: Seed) -> bytes:
        return hashlib.sha256(f"canary\0{seed}\0{each.id}".encode()).digest()

    return heapq.nsmallest(size, seeds, key=draw)


def forecast(
    rows: Sequence[Outcome], seeds: int, latency_s: float | None, slots: int, limits: Limits, price: float, seed: int
) -> Forecast:
    """Make a forecast.

    Args:
        rows: outcomes of the sample, at least one.
        latency_s: mean latency of the sample's requests; None if journals answered all.
        price: of the run's answers, as a share of the list price.
    """
    spends = [row.paid + row.replayed for row in rows]
    known = all(spend.usd is not None for spend in spends)
    figures = np.array(
        [
            (row.kind == "kept", spend.calls, spend.prompt_tokens + spend.completion_tokens, price * spend.list_usd)
            for row, spend in zip(rows, spends, strict=True)
        ]
    )
    counts = np.random.default_rng(seed).multinomial(len(rows), [1 / len(rows)] * len(rows), size=RESAMPLES)
    sums = np.vstack([figures.sum(axis=0), counts @ figures])  # the sample itself first
    kept, calls, tokens, usd = sums.T
    scale = seeds / len(rows)
    seconds = calls * (latency_s or 0.0) / slots
    if limits.requests_per_minute is not None:
        seconds = np.maximum(seconds, 60 * calls / limits.requests_per_minute)
    if limits.tokens_per_minute is not None:
        seconds = np.maximum(seconds, 60 * tokens / limits.tokens_per_minute)
    some = kept > 0  # of the sample and of almost all resamples
    return Forecast(
        sampled=len(rows),
        seeds=seeds,
        share_kept=wilson(int(kept[0]), len(rows)),
        usd_per_1000_kept=_interval(1000 * usd[some] / kept[some]) if known and some[0] else None,
        usd=_interval(scale * usd) if known else None,
        calls=_interval(scale * calls),
        tokens=_interval(scale * tokens),
        hours=None if latency_s is None else _interval(scale * seconds / 3600),
    )


def wilson(successes: int, trials: int) -> Interval:
    """Return a share and its Wilson score interval (Wilson, 1927)."""
    z2 = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) ** 2
    share = successes / trials
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = (z2 * share * (1 - share) / trials + (z2 / (2 * trials)) ** 2) ** 0.5 / (1 + z2 / trials)
    return share, max(0.0, middle - half), min(1.0, middle + half)


def _interval(values: np.ndarray) -> Interval:
    """Return the first value, and the quantiles of the others, which are resamples."""
    low, high = np.quantile(values[1:], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(values[0]), float(low), float(high)


def _shown(figure: Interval | None, form: str) -> str:
    return "unknown" if figure is None else "{0:{3}} ({1:{3}} to {2:{3}})".format(*figure, form)
