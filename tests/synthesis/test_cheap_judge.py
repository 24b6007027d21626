"""The cheap judge: what it settles, what it leaves in doubt, and audits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import Completion
from infembed_ray.records.tables import SCENARIOS
from infembed_ray.synthesis.judge import ORDER
from infembed_ray.synthesis.pipeline import CircuitBreaker, Outcome, Spend, synthesize
from tests.support import stand_in_answers
from tests.synthesis.scripted_model import JUDGING, POOL, SEED, WRITING, Model, outcome
from tests.synthesis.test_pipeline import _number_of

CHEAP = [f"cheap_judge_{scenario}" for scenario in ORDER]
A_DISTRACTOR = _number_of("A passage about")


def settings(audit: float = 0.0, rejects: bool = False, **values: Any) -> SynthesizeSettings:
    cheap = {"model": "gpt-4o-mini", "audit": audit, "rejects": rejects}
    return SynthesizeSettings.from_mapping({"seeds": "", "output": "", "cheap_judge": cheap, **values})


def steps(model: Model) -> list[str]:
    return [call.step for call in model.calls if call.step not in WRITING]


def wrong_at(answer: int) -> Any:
    """Return answers that pick the right passage, but a distractor as answer number `answer`, from 1."""
    answers = iter(range(1, 9))
    return lambda request: A_DISTRACTOR(request) if next(answers) == answer else stand_in_answers.answer(request.body)


def test_a_record_without_doubt_is_settled_by_two_cheap_answers_a_scenario_in_two_orders() -> None:
    model = Model()
    got = outcome(model, settings())
    assert got.kind == "kept"
    assert steps(model) == [step for step in CHEAP for _ in range(2)]
    assert {call.model for call in model.calls if call.step in CHEAP} == {"gpt-4o-mini"}
    orders = [call.messages[0]["content"].split("Candidates:")[1] for call in model.calls if call.step in CHEAP]
    assert len(set(orders)) == 6
    provenance = got.row["provenance"]
    assert provenance["verdicts"] == {scenario: scenario for scenario in SCENARIOS}
    assert provenance["judged_by"] == dict.fromkeys(SCENARIOS, "cheap_judge")
    assert (provenance["judge"], provenance["audit"]) == ("gpt-4o-mini-2026-01-01", None)


@pytest.mark.parametrize("answer", [1, 2])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_judge_decides_only_the_scenario_in_which_two_cheap_answers_differ(scenario: str, answer: int) -> None:
    model = Model(**{f"cheap_judge_{scenario}": wrong_at(answer)})
    got = outcome(model, settings(rejects=True))
    assert got.kind == "kept"
    assert steps(model) == [*(step for step in CHEAP for _ in range(2)), f"judge_{scenario}"]
    by = {each: "judge" if each == scenario else "cheap_judge" for each in SCENARIOS}
    assert got.row["provenance"]["judged_by"] == by


def test_a_cheap_answer_without_a_pick_is_a_doubt_and_not_a_dead_letter() -> None:
    model = Model(cheap_judge_positive="I cannot decide.")
    assert outcome(model, settings()).kind == "kept"
    assert steps(model)[-3:] == ["cheap_judge_positive", "cheap_judge_positive", "judge_positive"]


@pytest.mark.parametrize("finish_reason", ["length", "content_filter", "stop"])
def test_a_cheap_answer_that_is_cut_off_refused_or_empty_is_a_doubt(finish_reason: str) -> None:
    model = Model(cheap_judge_positive=Completion("", finish_reason, "cheap", 9, 9))
    assert outcome(model, settings()).kind == "kept"
    assert steps(model)[-1] == "judge_positive"


def test_two_equal_wrong_picks_reject_the_record_at_once_even_after_a_doubt() -> None:
    model = Model(cheap_judge_negative_query=wrong_at(2), cheap_judge_negative_instruction="Answer: none")
    got = outcome(model, settings(rejects=True))
    assert (got.kind, got.row["step"]) == ("rejected", "cheap_judge_negative_instruction")
    assert got.row["reason"] == "the judge picked none"
    assert steps(model) == [step for step in CHEAP[:2] for _ in range(2)]
    assert got.row["provenance"]["judged_by"]["negative_instruction"] == "cheap_judge"
    assert got.row["provenance"]["verdicts"]["negative_query"] is None


def test_a_cheap_judge_that_may_not_reject_is_asked_once_for_a_wrong_pick() -> None:
    model = Model(cheap_judge_negative_query="Answer: none")
    got = outcome(model, settings())
    assert got.kind == "kept"
    assert steps(model) == [CHEAP[0], *(step for step in CHEAP[1:] for _ in range(2)), JUDGING[0]]


def test_the_judge_decides_an_audited_record() -> None:
    kept = Model(judge_positive="Answer: none")
    got = outcome(kept, settings(audit=1.0))
    assert (got.kind, got.row["step"], got.row["provenance"]["audit"]) == ("rejected", "judge_positive", "kept")
    assert steps(kept)[-3:] == JUDGING
    rejected = Model(cheap_judge_positive="Answer: none")
    got = outcome(rejected, settings(audit=1.0, rejects=True))
    assert (got.kind, got.row["provenance"]["audit"]) == ("kept", "rejected")
    assert got.row["provenance"]["judged_by"] == dict.fromkeys(SCENARIOS, "judge")


def test_a_doubtful_record_is_no_audit() -> None:
    model = Model(cheap_judge_positive=wrong_at(1))
    assert outcome(model, settings(audit=1.0)).row["provenance"]["audit"] is None


@pytest.mark.integration
def test_the_seed_draws_the_audits_in_their_share() -> None:
    def audited(seed: int) -> set[int]:
        rows = (outcome(Model(), settings(0.3, seed=seed), replace(SEED, id=str(row))) for row in range(200))
        return {number for number, row in enumerate(rows) if row.row["provenance"]["audit"]}

    first = audited(0)
    assert 40 <= len(first) <= 80  # 60 +- 3 standard deviations
    assert first == audited(0) != audited(1)


def test_records_that_only_the_cheap_judge_saw_do_not_hide_a_judge_that_fails_always() -> None:
    given = settings(complement=True)
    breaker = CircuitBreaker(given, alike=3)
    model = Model()
    breaker.add(asyncio.run(synthesize(SEED, POOL, given, breaker.watch(model))))
    failed = Outcome("dead_letter", {"step": "judge_negative_query", "error": "HTTP 400: no"}, Spend(), Spend())
    for _ in range(3):
        breaker.add(failed)
    assert breaker.failure is not None
    assert "judge.model=o4-mini" in breaker.failure
