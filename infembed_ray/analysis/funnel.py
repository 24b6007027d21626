"""The funnel from seeds to records: kept, rejected by step and reason, dead letters by error; and the judge's verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from infembed_ray.analysis.inputs import RecordSet
from infembed_ray.records.tables import SCENARIOS

STEPS = (
    "seed",  # checks of its own texts
    "instruction_positive",
    "instruction_negative",
    "query_negative",
    "hard_negative_document_1",
    "hard_negative_document_2",
    "cheap_judge_negative_query",
    "cheap_judge_negative_instruction",
    "cheap_judge_positive",
    "judge_negative_query",
    "judge_negative_instruction",
    "judge_positive",
)
"""Steps of synthesis that can lose a row, in order."""


@dataclass(frozen=True)
class Loss:
    """Rows that a step lost for one reason: that of a rejection, or the error of a dead letter."""

    step: str
    why: str
    rows: int


@dataclass(frozen=True)
class Flow:
    """Outcome of the rows that reached a step."""

    step: str
    reached: int
    rejected: int
    dead_letter: int
    passed: int


@dataclass(frozen=True)
class Funnel:
    """From seeds to records: kept + rejected + dead_letter = seeds.

    Attributes:
        seeds: number of seeds; None for records without a synthesis output.
        kept, rejected, dead_letter: number of rows.
        unaccounted: seeds in none of the three; other than 0 means that the output is damaged.
        rejections, errors: losses, most frequent first.
        steps: outcome of each step, in order; empty without a synthesis output.
        complements: kept records for which a complement was asked for.
        complements_fit: complements that passed.
        complement_faults: why the others were rejected, most frequent first.
    """

    seeds: int | None
    kept: int
    rejected: int
    dead_letter: int
    unaccounted: int
    rejections: list[Loss]
    errors: list[Loss]
    steps: list[Flow]
    complements: int
    complements_fit: int
    complement_faults: list[Loss]


def funnel(records: RecordSet) -> Funnel:
    """Count kept, rejected and failed rows."""
    kept, rejected, dead = len(records.kept), len(records.rejected), len(records.dead_letter)
    seeds = records.counts.get("seeds")
    return Funnel(
        seeds=seeds,
        kept=kept,
        rejected=rejected,
        dead_letter=dead,
        unaccounted=0 if seeds is None else seeds - kept - rejected - dead,
        rejections=_losses((row["step"], row["reason"]) for row in records.rejected),
        errors=_losses((row["step"], row["error"]) for row in records.dead_letter),
        steps=[] if seeds is None else _steps(kept, records),
        complements=len(records.complements),
        complements_fit=sum(row["fault"] is None for row in records.complements),
        complement_faults=_losses(
            ("complement", row["fault"]) for row in records.complements if row["fault"] is not None
        ),
    )


def _steps(kept: int, records: RecordSet) -> list[Flow]:
    rejected = Counter(row["step"] or "unknown" for row in records.rejected)
    dead = Counter(row["step"] or "unknown" for row in records.dead_letter)
    reached = kept + rejected.total() + dead.total()
    flows = []
    lost = rejected.keys() | dead.keys()
    steps = (step for step in STEPS if not step.startswith("cheap_judge_") or step in lost)
    for step in (*steps, *sorted(lost - set(STEPS))):
        passed = reached - rejected[step] - dead[step]
        flows.append(Flow(step, reached, rejected[step], dead[step], passed))
        reached = passed
    return flows


def _losses(reasons: Iterable[tuple[str | None, str | None]]) -> list[Loss]:
    counted = Counter((step or "unknown", why or "unknown") for step, why in reasons)
    return [Loss(step, why, rows) for (step, why), rows in sorted(counted.items(), key=lambda item: (-item[1], item))]


@dataclass(frozen=True)
class Verdicts:
    """The judge's answers in one scenario.

    Attributes:
        judged: rows with an answer; judging ends at the first scenario that fails.
        right: rows in which the judge picked the scenario's own passage.
        picks: picked passage -> rows, most frequent first.
    """

    scenario: str
    judged: int
    right: int
    picks: dict[str, int]


def verdicts(record_set: RecordSet) -> list[Verdicts]:
    """Count the judge's picks in every scenario; empty if no row has a verdict."""
    given = [row["verdicts"] for rows in record_set.provenance.values() for row in rows if row["verdicts"]]
    counted = []
    for scenario in SCENARIOS:
        picks = Counter(verdict[scenario] for verdict in given if verdict[scenario] is not None)
        if picks:
            counted.append(Verdicts(scenario, picks.total(), picks[scenario], dict(picks.most_common())))
    return counted
