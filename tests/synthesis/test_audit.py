"""Counts of what the cheap judge settled, and its agreement with the judge."""

from __future__ import annotations

from typing import Any

from infembed_ray.synthesis.outputs import JudgeAudit, described, wilson
from infembed_ray.synthesis.pipeline import Outcome, Spend


def row(kind: Any, *judges: str | None, audit: str | None = None) -> Outcome:
    judged_by = dict(zip(("positive", "negative_instruction", "negative_query"), judges, strict=False))
    return Outcome(kind, {"provenance": {"judged_by": judged_by, "audit": audit}}, Spend(), Spend())


def test_records_are_counted_by_the_judge_that_decided_them() -> None:
    audit = JudgeAudit()
    for each, number in (
        (row("kept", *["cheap_judge"] * 3), 80),
        (row("rejected", None, None, "cheap_judge"), 20),
        (row("kept", "judge", "cheap_judge", "cheap_judge"), 7),
        (row("rejected", None, None, "judge"), 3),
        (row("kept", *["judge"] * 3, audit="kept"), 9),
        (row("rejected", None, None, "judge", audit="kept"), 1),
        (row("kept", *["judge"] * 3, audit="rejected"), 2),
        (row("rejected", None, None, "judge", audit="rejected"), 8),
        (row("dead_letter", None, None, "cheap_judge"), 5),
        (row("rejected", None, None, None), 5),
    ):
        for _ in range(number):
            audit.add(each)
    facts = audit.facts()
    assert facts == {
        "settled": {"kept": 90, "rejected": 30},
        "in_doubt": {"kept": 7, "rejected": 3},
        "audited": 20,
        "agreement": list(wilson(17, 20)),
        "wrongly_kept": list(wilson(1, 10)),
        "wrongly_rejected": list(wilson(2, 10)),
    }
    assert described(facts) == (
        "the cheap judge settled 120 of 130 judged records and agrees with the judge on 85% (64% to 95%) of 20 audited ones"
    )


def test_a_run_without_a_cheap_judge_has_no_figures() -> None:
    audit = JudgeAudit()
    audit.add(row("kept", None, None, None))
    assert audit.facts() is None


def test_a_run_without_audits_has_no_agreement() -> None:
    audit = JudgeAudit()
    audit.add(row("kept", *["cheap_judge"] * 3))
    facts = audit.facts()
    assert facts is not None
    assert facts["agreement"] is None
    assert described(facts) == "the cheap judge settled 1 of 1 judged records"
