"""Where the seeds went: kept, rejected by step and reason, dead letters by error; and what the judge said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from infembed_ray.analysis.material import Material
from infembed_ray.records import SCENARIOS

STEPS = (
    "seed",  # its own texts, before anything is asked
    "instruction_positive",
    "instruction_negative",
    "query_negative",
    "hard_negative_document_1",
    "hard_negative_document_2",
    "judge_negative_query",
    "judge_negative_instruction",
    "judge_positive",
)
"""The steps of synthesis that can lose a row, in their order."""


@dataclass(frozen=True)
class Loss:
    """Rows that one step lost for one reason."""

    step: str
    why: str
    """The reason of a rejection or the error of a dead letter."""
    rows: int


@dataclass(frozen=True)
class Flow:
    """What became of the rows that reached one step."""

    step: str
    reached: int
    rejected: int
    dead_letter: int
    passed: int


@dataclass(frozen=True)
class Funnel:
    """From seeds to records. kept + rejected + dead_letter = seeds, always."""

    seeds: int | None
    """None for records that come from no synthesis output."""
    kept: int
    rejected: int
    dead_letter: int
    unaccounted: int
    """Seeds that are in none of the three: anything but 0 is a fault of the output."""
    rejections: list[Loss]
    """Most frequent first."""
    errors: list[Loss]
    steps: list[Flow]
    """In their order; empty for records that come from no synthesis output."""
    complements: int
    """Kept records for which a complement was asked for."""
    complements_fit: int
    complement_faults: list[Loss]
    """Why the others are of no use, most frequent first."""


def funnel(material: Material) -> Funnel:
    """Count where the rows went."""
    kept, rejected, dead = len(material.kept), len(material.rejected), len(material.dead_letter)
    seeds = material.counts.get("seeds")
    return Funnel(
        seeds=seeds,
        kept=kept,
        rejected=rejected,
        dead_letter=dead,
        unaccounted=0 if seeds is None else seeds - kept - rejected - dead,
        rejections=_losses((row["step"], row["reason"]) for row in material.rejected),
        errors=_losses((row["step"], row["error"]) for row in material.dead_letter),
        steps=[] if seeds is None else _steps(kept, material),
        complements=len(material.complements),
        complements_fit=sum(row["fault"] is None for row in material.complements),
        complement_faults=_losses(
            ("complement", row["fault"]) for row in material.complements if row["fault"] is not None
        ),
    )


def _steps(kept: int, material: Material) -> list[Flow]:
    rejected = Counter(row["step"] or "unknown" for row in material.rejected)
    dead = Counter(row["step"] or "unknown" for row in material.dead_letter)
    reached = kept + rejected.total() + dead.total()
    flows = []
    for step in (*STEPS, *sorted((rejected.keys() | dead.keys()) - set(STEPS))):
        passed = reached - rejected[step] - dead[step]
        flows.append(Flow(step, reached, rejected[step], dead[step], passed))
        reached = passed
    return flows


def _losses(reasons: Iterable[tuple[str | None, str | None]]) -> list[Loss]:
    counted = Counter((step or "unknown", why or "unknown") for step, why in reasons)
    return [Loss(step, why, rows) for (step, why), rows in sorted(counted.items(), key=lambda item: (-item[1], item))]


@dataclass(frozen=True)
class Verdicts:
    """The judge's answers in one scenario, over all rows that came so far."""

    scenario: str
    judged: int
    """Rows with an answer: judging ends at the first scenario that fails."""
    right: int
    """Rows in which the judge picked the passage that answers this scenario."""
    picks: dict[str, int]
    """What was picked -> rows, most frequent first."""


def verdicts(material: Material) -> list[Verdicts]:
    """Count the judge's picks in every scenario; empty where no row carries a verdict."""
    given = [row["verdicts"] for rows in material.provenance.values() for row in rows if row["verdicts"]]
    found = []
    for scenario in SCENARIOS:
        picks = Counter(verdict[scenario] for verdict in given if verdict[scenario] is not None)
        if picks:
            found.append(Verdicts(scenario, picks.total(), picks[scenario], dict(picks.most_common())))
    return found
