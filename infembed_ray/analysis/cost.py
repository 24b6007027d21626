"""Tokens and USD, from the provenance of the rows, and how long their answers took."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infembed_ray.analysis.material import Material, Rows


@dataclass(frozen=True)
class Spent:
    """What some rows cost, whether their answers were paid in this run or came from a journal."""

    rows: int
    prompt_tokens: int
    completion_tokens: int
    usd: float | None
    """At list prices; None as soon as one row's models are in no price table."""


@dataclass(frozen=True)
class Cost:
    """What the records cost, the rows that were lost on the way included."""

    kept: Spent
    rejected: Spent
    dead_letter: Spent
    total: Spent
    usd_per_1000_kept: float | None
    calls: int | None
    """Requests sent in the run that made the output; None where no manifest says."""
    replayed: int | None
    """Answers taken from a journal in that run."""
    latency_s: dict[str, float]
    """`p50`, `p90`, `p99`: seconds within which that share of the requests was answered; empty where nobody says."""


def cost(material: Material) -> Cost | None:
    """Add up what the rows cost; None where no row says."""
    everything = [row for rows in material.provenance.values() for row in rows]
    if not everything:
        return None
    total = _spent(everything)
    latencies = material.manifest.get("traffic", {}).get("latency_s", {})
    return Cost(
        kept=_spent(material.provenance["kept"]),
        rejected=_spent(material.provenance["rejected"]),
        dead_letter=_spent(material.provenance["dead_letter"]),
        total=total,
        usd_per_1000_kept=1000 * total.usd / len(material.kept) if material.kept and total.usd is not None else None,
        calls=material.counts.get("calls"),
        replayed=material.counts.get("replayed"),
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
