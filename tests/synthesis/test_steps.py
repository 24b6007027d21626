import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pyarrow as pa
import pytest

from infembed_ray import records
from infembed_ray.config import SynthesizeSettings
from infembed_ray.records import SCENARIOS, Seed
from infembed_ray.synthesis import judge
from infembed_ray.synthesis.chat import Completion, Request, RowFailure, RunFailure
from infembed_ray.synthesis.steps import Outcome, Spend, synthesize
from tests import stand_in_llm

SEED = Seed(
    "seed-1",
    "how do bees make honey",
    "Foragers suck nectar from flowers and carry it home, where house bees dry it and seal it with wax.",
    source="made up",
    topic="bees",
    split="train",
)
POOL = [SEED.passage, *(f"A passage about number {number}, and about nothing else." for number in range(9))]
SETTINGS = SynthesizeSettings(seeds="", output="")
WRITING = [
    "instruction_positive",
    "instruction_negative",
    "query_negative",
    "hard_negative_document_1",
    "hard_negative_document_2",
]
JUDGING = [f"judge_{scenario}" for scenario in judge.ORDER]


class Model:
    """Answers by the stand-in's rules, except where a step has an answer of its own."""

    def __init__(self, **answers: str | Completion | Exception | Callable[[Request], str]) -> None:
        self.answers = answers
        self.asked: dict[str, Request] = {}

    async def __call__(self, request: Request) -> Completion:
        self.asked[request.step] = request
        special = self.answers.get(request.step)
        if isinstance(special, Exception):
            raise special
        if isinstance(special, Completion):
            return special
        prompt = request.messages[0]["content"]
        text = special or stand_in_llm.say(prompt)
        return Completion(text(request) if callable(text) else text, "stop", f"{request.model}-2026-01-01", 1000, 100)

    def prompt(self, step: str) -> str:
        return self.asked[step].messages[0]["content"]


def outcome(model: Model, settings: SynthesizeSettings = SETTINGS) -> Outcome:
    return asyncio.run(synthesize(SEED, POOL, settings, model))


def fits(row: Mapping[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """The row as it comes back from a table of this schema; it must hold no other columns."""
    assert set(row) <= set(schema.names)
    return pa.Table.from_pylist([dict(row)], schema=schema).to_pylist()[0]


def test_a_good_seed_becomes_a_whole_record() -> None:
    model = Model()
    got = outcome(model)
    assert got.kind == "kept"
    assert list(model.asked) == WRITING + JUDGING
    row = fits(got.row, records.RECORD)
    assert all(value is not None for value in row.values())
    assert (row["id"], row["source"], row["topic"], row["split"]) == ("seed-1", "made up", "bees", "train")
    assert (row["query_positive"], row["document_positive"]) == (SEED.query, SEED.passage)
    assert len({row[step] for step in WRITING}) == 5


def test_a_record_says_where_it_comes_from_and_what_it_cost() -> None:
    model = Model()
    got = outcome(model)
    provenance = got.row["provenance"]
    assert provenance["generator"] == "gpt-4o-mini-2026-01-01"
    assert provenance["judge"] == "o4-mini-2026-01-01"
    assert provenance["request_hashes"] == [model.asked[step].key for step in WRITING + JUDGING]
    assert provenance["verdicts"] == {scenario: scenario for scenario in SCENARIOS}
    assert (provenance["prompt_tokens"], provenance["completion_tokens"]) == (8000, 800)
    usd = 5 * (1000 * 0.15 + 100 * 0.60) / 1e6 + 3 * (1000 * 1.10 + 100 * 4.40) / 1e6
    assert provenance["usd"] == pytest.approx(usd)
    assert got.paid == Spend(8, 8000, 800, provenance["usd"])
    assert got.replayed == Spend()


def test_each_negative_passage_answers_its_own_pair() -> None:
    model = Model()
    row = outcome(model).row
    first, second = model.prompt("hard_negative_document_1"), model.prompt("hard_negative_document_2")
    assert f"Query: {SEED.query}\n" in first
    assert f"Instruction: {row['instruction_negative']}\n" in first
    assert f"Query: {row['query_negative']}\n" in second
    assert f"Instruction: {row['instruction_positive']}\n" in second


def test_the_judge_sees_each_scenarios_pair_and_all_three_passages() -> None:
    model = Model()
    row = outcome(model).row
    pairs = {
        "positive": ("instruction_positive", "query_positive"),
        "negative_instruction": ("instruction_negative", "query_positive"),
        "negative_query": ("instruction_positive", "query_negative"),
    }
    for scenario, (instruction, query) in pairs.items():
        prompt = model.prompt(f"judge_{scenario}")
        assert f"Query: {row[query]}\n\nInstruction: {row[instruction]}\n" in prompt
        for document in ("document_positive", "hard_negative_document_1", "hard_negative_document_2"):
            assert row[document] in prompt
        assert prompt.count("\n[") == 3 + SETTINGS.distractors


def test_the_same_seed_asks_the_same_and_ends_the_same() -> None:
    one, two = Model(), Model()
    assert outcome(one) == outcome(two)
    assert one.asked == two.asked


def test_another_seed_of_the_settings_shuffles_for_the_judge_only() -> None:
    one, two = Model(), Model()
    outcome(one)
    outcome(two, SETTINGS.model_copy(update={"seed": 1}))
    changed = [step for step in one.asked if one.asked[step].key != two.asked[step].key]
    assert changed == JUDGING


def test_text_after_the_first_newline_is_cut_and_later_steps_see_what_is_left() -> None:
    model = Model(instruction_positive="Instruction: For keepers, nothing else.\nThis works because...")
    row = outcome(model).row
    assert row["instruction_positive"] == "For keepers, nothing else."
    assert "This works because" not in model.prompt("query_negative")


@pytest.mark.parametrize(
    ("step", "text", "reason"),
    [
        ("instruction_positive", "Instruction: Find passages that:\n- help keepers", "a lead-in to a list"),
        ("instruction_negative", "Instruction: \nGive me a note", "empty before the first newline"),
        ("instruction_negative", "Instruction: for keepers", "fewer than 3 words"),
        ("query_negative", "Query: How do bees make honey?", "equal to the positive"),
    ],
)
def test_a_useless_line_is_rejected_before_anything_more_is_asked(step: str, text: str, reason: str) -> None:
    model = Model(**{step: text})
    got = outcome(model)
    assert got.kind == "rejected"
    row = fits(got.row, records.REJECTED)
    assert row["step"] == step == list(model.asked)[-1]
    assert reason in row["reason"]
    assert row["hard_negative_document_1"] is None
    assert got.paid.calls == len(model.asked) == len(row["provenance"]["request_hashes"])


def _number_of(text: str) -> Callable[[Request], str]:
    def pick(request: Request) -> str:
        shown = request.messages[0]["content"]
        return next(f"Answer: {number}" for number in range(1, 10) if f"[{number}] {text}" in shown)

    return pick


@pytest.mark.parametrize(
    ("scenario", "picked"),
    [*product(SCENARIOS, ["none", "distractor"]), ("negative_instruction", "positive"), ("negative_query", "positive")],
)
def test_a_wrong_verdict_rejects_the_row_and_is_the_last_thing_asked(scenario: str, picked: str) -> None:
    pick = {"none": "Answer: none", "positive": _number_of(SEED.passage), "distractor": _number_of("A passage about")}
    model = Model(**{f"judge_{scenario}": pick[picked]})
    got = outcome(model)
    row = fits(got.row, records.REJECTED)
    assert (got.kind, row["step"], row["reason"]) == ("rejected", f"judge_{scenario}", f"the judge picked {picked}")
    asked = [judge.ORDER[number] for number in range(judge.ORDER.index(scenario) + 1)]
    assert list(model.asked) == [*WRITING, *(f"judge_{each}" for each in asked)]
    assert row["provenance"]["verdicts"] == {
        each: picked if each == scenario else each if each in asked else None for each in SCENARIOS
    }


FAILURES = {
    "failed in transit": RowFailure("HTTP 500: overloaded; tried 7 times"),
    "refused": Completion("", "stop", "m", 10, 1, refusal="no"),
    "cut off": Completion("Instruction: for those who", "length", "m", 10, 5),
    "empty": Completion("", "stop", "m", 10, 0),
    "malformed": Completion("Sure! Happy to help.", "stop", "m", 10, 6),
}


@pytest.mark.parametrize("step", WRITING + JUDGING)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_call_makes_the_row_a_dead_letter_that_names_the_request(step: str, failure: str) -> None:
    model = Model(**{step: FAILURES[failure]})
    got = outcome(model)
    row = fits(got.row, records.DEAD_LETTER)
    assert (got.kind, row["id"], row["source"], row["step"]) == ("dead_letter", "seed-1", "made up", step)
    assert failure.split()[-1] in row["error"] or "tried 7 times" in row["error"]
    assert row["request_hash"] == model.asked[step].key == row["provenance"]["request_hashes"][-1]
    assert list(model.asked)[-1] == step
    assert got.paid.calls == len(model.asked) - (failure == "failed in transit")


def test_a_label_without_a_passage_is_malformed() -> None:
    got = outcome(Model(hard_negative_document_2="Passage:\n"))
    assert (got.kind, got.row["step"]) == ("dead_letter", "hard_negative_document_2")


def test_what_ends_the_run_is_no_outcome() -> None:
    with pytest.raises(RunFailure, match="the key"):
        outcome(Model(query_negative=RunFailure("the key is refused")))


def test_replayed_completions_cost_nothing_now_but_keep_their_price_in_the_record() -> None:
    fresh = Model()
    paid = outcome(fresh)

    async def journaled(request: Request) -> Completion:
        return replace(await fresh(request), replayed=request.step not in JUDGING)

    got = asyncio.run(synthesize(SEED, POOL, SETTINGS, journaled))
    assert got.row == paid.row
    assert (got.paid.calls, got.replayed.calls) == (3, 5)
    assert (got.paid + got.replayed).usd == pytest.approx(paid.paid.usd)


def test_an_unknown_model_costs_an_unknown_sum() -> None:
    settings = SynthesizeSettings.of({"seeds": "", "output": "", "generator": {"model": "home-made"}})
    got = outcome(Model(), settings)
    assert got.row["provenance"]["usd"] is None
    assert got.paid.usd is None
    assert got.paid.prompt_tokens == 8000
