"""Tokens, USD and latency of a synthesis, from the provenance of its rows and its manifest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infembed_ray.analysis.inputs import RecordSet, Rows


@dataclass(frozen=True)
class Spent:
    """Cost of rows at list prices, also for answers from a journal; USD is None without a price for every model."""

    rows: int
    prompt_tokens: int
    completion_tokens: int
    usd: float | None


@dataclass(frozen=True)
class SynthesisCost:
    """Cost of a synthesis.

    Attributes:
        kept, rejected, dead_letter, total: cost of these rows.
        usd_per_1000_kept: total cost per 1,000 kept records.
        calls: requests of the run that made the output; None without a manifest.
        replayed: answers that this run took from a journal.
        latency_s: `p50`, `p90` and `p99` latency of the requests; empty if not recorded.
    """

    kept: Spent
    rejected: Spent
    dead_letter: Spent
    total: Spent
    usd_per_1000_kept: float | None
    calls: int | None
    replayed: int | None
    latency_s: dict[str, float]


def cost(records: RecordSet) -> SynthesisCost | None:
    """Add up the cost of the rows; None if no row has a provenance."""
    everything = [row for rows in records.provenance.values() for row in rows]
    if not everything:
        return None
    total = _spent(everything)
    latencies = records.manifest.get("traffic", {}).get("latency_s", {})
    return SynthesisCost(
        kept=_spent(records.provenance["kept"]),
        rejected=_spent(records.provenance["rejected"]),
        dead_letter=_spent(records.provenance["dead_letter"]),
        total=total,
        usd_per_1000_kept=1000 * total.usd / len(records.kept) if records.kept and total.usd is not None else None,
        calls=records.counts.get("calls"),
        replayed=records.counts.get("replayed"),
        latency_s={name: s for name, s in latencies.items() if s is not None},
    )


def _spent(provenance: Rows) -> Spent:
    usd = [row["usd"] for row in provenance]
    return Spent(
        rows=len(provenance),
        prompt_tokens=sum(row["prompt_tokens"] or 0 for row in provenance),
        completion_tokens=sum(row["completion_tokens"] or 0 for row in provenance),
        usd=None if None in usd else math.fsum(usd),
    )
