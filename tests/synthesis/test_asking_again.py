"""Further requests after cut-off, refused and empty answers, with a real journal."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import CAP, Completion, Request
from infembed_ray.llm.journal import Journal, replaying
from infembed_ray.synthesis.pipeline import Outcome, synthesize
from tests.support import stand_in_answers
from tests.synthesis.scripted_model import JUDGING, POOL, SEED, WRITING, Model

STEPS = WRITING + JUDGING
REFUSED = Completion("", "stop", "m", 10, 1, refusal="no")
EMPTY = Completion("<think>hm</think>\n", "stop", "m", 10, 1)
FILTERED = Completion("Sure", "SAFETY", "m", 10, 1)
INTERRUPTED = Completion("Sure", "network_error", "m", 10, 1)


def settings(**model: Any) -> SynthesizeSettings:
    values = {"model": "m", "max_tokens": 100, **model}
    return SynthesizeSettings.from_mapping({"seeds": "", "output": "", "generator": values, "judge": values})


def run(model: Model, given: SynthesizeSettings, directory: Path) -> Outcome:
    """Make the record of the seed, with a journal in front of the model."""
    journal = Journal(directory)

    async def complete(request: Request) -> Completion:
        completion = journal.get(*request.keys)
        if completion is None:
            completion = await model(request)
            await journal.append(request, completion)
        return completion

    got = asyncio.run(synthesize(SEED, POOL, given, complete))
    journal.close()
    return got


def columns(got: Outcome) -> Mapping[str, Any]:
    return {**got.row, "provenance": None}


def assert_replayed(got: Outcome, given: SynthesizeSettings, directory: Path) -> None:
    """The journal alone gives the same outcome, at no cost."""
    again = asyncio.run(synthesize(SEED, POOL, given, replaying(Journal(directory))))
    assert (again.kind, again.row) == (got.kind, got.row)
    assert (again.paid.calls, again.replayed.calls) == (0, got.paid.calls + got.replayed.calls)
    assert all(Journal(directory).get(key) for key in got.row["provenance"]["request_hashes"])


def needs(tokens: int) -> Any:
    """An answer that needs this many tokens; a lower cap cuts it off."""

    def answer(request: Request) -> str | Completion:
        text = stand_in_answers.answer(request.body)
        cap = request.parameters.get(CAP, 16)  # this provider's cap where the request has none
        return text if cap >= tokens else Completion(text[: len(text) // 2], "length", "m", 10, cap)

    return answer


@pytest.mark.parametrize("step", STEPS)
def test_a_cut_off_answer_is_asked_for_once_more_with_a_higher_cap(tmp_path: Path, step: str) -> None:
    model, given = Model(**{step: needs(200)}), settings()
    got = run(model, given, tmp_path)
    assert columns(got) == columns(run(Model(), settings(), tmp_path / "flawless"))
    assert [call.parameters[CAP] for call in model.calls if call.step == step] == [100, 200]
    assert got.paid.calls == len(STEPS) + 1 == len(set(got.row["provenance"]["request_hashes"]))
    assert_replayed(got, given, tmp_path)


def test_an_answer_cut_off_twice_is_a_dead_letter_and_a_higher_cap_asks_only_for_it(tmp_path: Path) -> None:
    model, given = Model(judge_positive=needs(1000)), settings()
    got = run(model, given, tmp_path)
    assert (got.kind, got.row["step"], got.paid.calls) == ("dead_letter", "judge_positive", len(STEPS) + 1)
    assert "cut off at the token limit (200 tokens)" in got.row["error"]
    assert_replayed(got, given, tmp_path)
    model.calls.clear()
    higher = run(model, settings(max_tokens=2000), tmp_path)
    assert [(call.step, call.parameters[CAP]) for call in model.calls] == [("judge_positive", 2000)]
    assert (higher.kind, higher.replayed.calls) == ("kept", len(STEPS) - 1)
    model.calls.clear()
    for given in (settings(max_tokens=50), settings(max_tokens=None)):
        assert run(model, given, tmp_path).row == higher.row
    assert not model.calls


def test_without_max_tokens_a_cut_off_answer_is_sampled_again_and_a_cap_asks_only_for_it(tmp_path: Path) -> None:
    uncapped = settings(max_tokens=None)
    model = Model(judge_positive=needs(100))
    got = run(model, uncapped, tmp_path)
    assert (got.kind, got.row["step"]) == ("dead_letter", "judge_positive")
    assert [call.prompt[-11:] for call in model.calls if call.step == "judge_positive"][1] == " resample=1"
    assert_replayed(got, uncapped, tmp_path)
    model.calls.clear()
    capped = run(model, settings(), tmp_path)
    assert [(call.step, call.parameters[CAP]) for call in model.calls] == [("judge_positive", 100)]
    assert capped.kind == "kept"
    assert_replayed(capped, settings(), tmp_path)


def test_an_answer_whose_reasoning_uses_up_the_higher_cap_is_not_sampled_again(tmp_path: Path) -> None:
    model = Model(query_negative=Completion("<think>hm, let me", "length", "m", 10, 100))
    got = run(model, settings(), tmp_path)
    assert [call.parameters[CAP] for call in model.calls if call.step == "query_negative"] == [100, 200]
    assert "cut off at the token limit" in got.row["error"]


def test_an_answer_without_sampling_is_not_asked_for_again(tmp_path: Path) -> None:
    model = Model(instruction_positive=REFUSED)
    got = run(model, settings(temperature=0.0), tmp_path)
    assert (got.kind, len(model.calls)) == ("dead_letter", 1)


@pytest.mark.parametrize(
    "unlucky", [REFUSED, EMPTY, FILTERED, INTERRUPTED], ids=["refused", "empty", "filtered", "interrupted"]
)
def test_a_refused_or_empty_answer_is_sampled_again(tmp_path: Path, unlucky: Completion) -> None:
    def lucky_at_last(request: Request) -> str | Completion:
        return stand_in_answers.answer(request.body) if request.prompt.endswith("resample=1") else unlucky

    model, given = Model(query_negative=lucky_at_last), settings()
    got = run(model, given, tmp_path)
    assert columns(got) == columns(run(Model(), settings(), tmp_path / "flawless"))
    asked = [call for call in model.calls if call.step == "query_negative"]
    assert len(asked) == 2 == len({call.key for call in asked})
    assert len({call.sent for call in asked}) == 1
    assert_replayed(got, given, tmp_path)
