"""What the cheap judge settled, and its agreement with the judge on the audited records."""

from __future__ import annotations

from collections import Counter
from statistics import NormalDist
from typing import Any

from infembed_ray.synthesis.outcome import Kind, Outcome


class JudgeAudit:
    """Counts records by which judge decided them."""

    def __init__(self) -> None:
        self._settled: Counter[Kind] = Counter()
        self._in_doubt: Counter[Kind] = Counter()
        self._audited: Counter[tuple[Kind, Kind]] = Counter()
        """(outcome by the cheap judge, outcome by the judge) -> records."""

    def add(self, outcome: Outcome) -> None:
        """Count an outcome; a dead letter, or a record that was not judged, does not count."""
        provenance = outcome.row.get("provenance") or {}
        judges = set((provenance.get("judged_by") or {}).values()) - {None}
        if outcome.kind == "dead_letter" or not judges:
            return
        if provenance["audit"] is not None:
            self._settled[provenance["audit"]] += 1
            self._audited[provenance["audit"], outcome.kind] += 1
        else:
            (self._in_doubt if "judge" in judges else self._settled)[outcome.kind] += 1

    def facts(self) -> dict[str, Any] | None:
        """Return the manifest's figures; None without a cheap judge.

        `agreement` is the share of the audited records on which the judges agree; `wrongly_kept` is the share of those
        that the cheap judge would have kept and the judge rejects, and `wrongly_rejected` the reverse. Each has Wilson's
        95 % interval, and is null without such records.
        """
        if not self._settled and not self._in_doubt:
            return None
        audited = self._audited
        alike = audited["kept", "kept"] + audited["rejected", "rejected"]

        def share(part: int, of: int) -> list[float] | None:
            return list(wilson(part, of)) if of else None

        def wrong(by: Kind, instead: Kind) -> list[float] | None:
            return share(audited[by, instead], audited[by, by] + audited[by, instead])

        return {
            "settled": {kind: self._settled[kind] for kind in ("kept", "rejected")},
            "in_doubt": {kind: self._in_doubt[kind] for kind in ("kept", "rejected")},
            "audited": audited.total(),
            "agreement": share(alike, audited.total()),
            "wrongly_kept": wrong("kept", "rejected"),
            "wrongly_rejected": wrong("rejected", "kept"),
        }


def described(facts: dict[str, Any]) -> str:
    """Return one line of the figures."""
    settled, in_doubt = (sum(facts[name].values()) for name in ("settled", "in_doubt"))
    line = f"the cheap judge settled {settled:,} of {settled + in_doubt:,} judged records"
    if facts["agreement"] is None:
        return line
    share, low, high = facts["agreement"]
    return f"{line} and agrees with the judge on {share:.0%} ({low:.0%} to {high:.0%}) of {facts['audited']:,} audited ones"


def wilson(successes: int, trials: int) -> tuple[float, float, float]:
    """Return a share and the ends of its 95 % Wilson score interval (Wilson, 1927)."""
    z2 = NormalDist().inv_cdf(0.975) ** 2
    share = successes / trials
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = (z2 * share * (1 - share) / trials + (z2 / (2 * trials)) ** 2) ** 0.5 / (1 + z2 / trials)
    return share, max(0.0, middle - half), min(1.0, middle + half)
