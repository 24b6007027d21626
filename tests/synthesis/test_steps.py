import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray import records
from infembed_ray.config import SynthesizeSettings
from infembed_ray.records import SCENARIOS, Seed
from infembed_ray.synthesis import judge
from infembed_ray.synthesis.chat import Completion, Request, RowFailure, RunFailure
from infembed_ray.synthesis.client import Unanswered, completion_of
from infembed_ray.synthesis.journal import decode, encode
from infembed_ray.synthesis.steps import SCHEMAS, STEPS, Outcome, Spend, synthesize
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
        self.calls: list[Request] = []

    async def __call__(self, request: Request) -> Completion:
        self.asked[request.step] = request
        self.calls.append(request)
        special = self.answers.get(request.step)
        if isinstance(special, Exception):
            raise special
        if isinstance(special, Completion):
            return special
        text = special or stand_in_llm.answer(request.body)
        return Completion(text(request) if callable(text) else text, "stop", f"{request.model}-2026-01-01", 1000, 100)

    def prompt(self, step: str) -> str:
        return self.asked[step].messages[0]["content"]


def outcome(model: Model, settings: SynthesizeSettings = SETTINGS, seed: Seed = SEED) -> Outcome:
    return asyncio.run(synthesize(seed, POOL, settings, model))


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
    assert [name for name, value in row.items() if value is None] == ["language"]
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


@pytest.mark.parametrize("step", ["hard_negative_document_1", "hard_negative_document_2"])
def test_a_negative_passage_that_repeats_the_positive_is_rejected_before_the_judge_is_asked(step: str) -> None:
    model = Model(**{step: f"Passage: {SEED.passage.upper()}"})
    got = outcome(model)
    assert got.kind == "rejected"
    assert got.row["reason"] == "equal to the positive passage"
    assert list(model.asked)[-1] == step


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


def _first_time(bad: str) -> Callable[[Request], str]:
    """A bad answer to the first request, a good one to its repair."""
    return lambda request: bad if len(request.messages) == 1 else stand_in_llm.answer(request.body)


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("step", WRITING + JUDGING)
def test_a_malformed_answer_is_mended_by_one_more_request_that_says_what_is_wrong(step: str, structured: bool) -> None:
    settings = _structured() if structured else SETTINGS
    flawless, model = Model(), Model(**{step: _first_time("Sure! Happy to help.")})
    got, wanted = outcome(model, settings), outcome(flawless, settings)
    assert {**got.row, "provenance": None} == {**wanted.row, "provenance": None}
    assert [call.step for call in model.calls].count(step) == 2
    first, again = (call for call in model.calls if call.step == step)
    assert again.messages[:2] == (*first.messages, {"role": "assistant", "content": "Sure! Happy to help."})
    assert "Sure! Happy to help." in again.messages[2]["content"]
    assert (again.prompt, again.parameters) == (f"{first.prompt} repair=1", first.parameters)
    assert got.paid.calls == 9
    assert got.row["provenance"]["request_hashes"] == [call.key for call in model.calls]
    assert len(set(got.row["provenance"]["request_hashes"])) == 9


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("step", WRITING + JUDGING)
def test_what_is_malformed_twice_is_a_dead_letter_and_both_answers_are_accounted_for(
    step: str, structured: bool
) -> None:
    model = Model(**{step: "Sure! Happy to help."})
    got = outcome(model, _structured() if structured else SETTINGS)
    row = fits(got.row, records.DEAD_LETTER)
    assert (got.kind, row["step"]) == ("dead_letter", step)
    assert row["error"].startswith("malformed answer: no `")
    assert [call.step for call in model.calls][-2:] == [step, step]
    assert row["request_hash"] == model.calls[-1].key
    assert got.paid.calls == len(model.calls) == len(row["provenance"]["request_hashes"])


def _structured() -> SynthesizeSettings:
    return SynthesizeSettings.of(
        {
            "seeds": "",
            "output": "",
            "generator": {"model": "gpt-4o-mini", "structured": True},
            "judge": {"model": "o4-mini", "structured": True},
        }
    )


def test_json_by_a_schema_makes_the_record_that_text_makes() -> None:
    as_text, as_json = Model(), Model()
    text, structured = outcome(as_text), outcome(as_json, _structured())
    assert structured.kind == text.kind == "kept"
    assert structured.row["provenance"]["verdicts"] == text.row["provenance"]["verdicts"]
    for step, request in as_json.asked.items():
        answered = json.loads(stand_in_llm.answer(request.body))
        schema = request.parameters["response_format"]["json_schema"]["schema"]
        jsonschema.validate(answered, schema)
        if step in WRITING:
            assert structured.row[step] == next(iter(answered.values()))
        else:
            assert schema["properties"]["answer"]["enum"] == [*"1234567", "none"]
        assert request.key != as_text.asked[step].key


def test_code_is_written_in_the_seeds_language_and_only_its_prompts_say_so() -> None:
    seed = replace(SEED, source="leetcode", language="Python3")
    model = Model(
        instruction_positive="Instruction: A Python solution that counts foragers, flowers and nectar; no brute force.",
        instruction_negative="Instruction: A Python 3 solution by recursion with memoisation instead.",
    )
    got = outcome(model, seed=seed)
    assert (got.kind, got.row["language"]) == ("kept", "Python3")
    for step in WRITING:
        assert "Python3" in model.prompt(step)
    for step in JUDGING:
        assert "Python3" not in model.prompt(step)
    assert model.asked["query_negative"].prompt == "query_poisoning=1 leetcode/query_poisoning=1"
    assert "leetcode/query_poisoning=1" in got.row["provenance"]["prompt_version"].split()


@pytest.mark.parametrize("step", ["instruction_positive", "instruction_negative"])
def test_an_instruction_that_loses_the_language_is_rejected(step: str) -> None:
    good = "Instruction: A C++ solution that sorts first, then scans once."
    model = Model(**{"instruction_positive": good, step: "Instruction: A solution in C, by recursion only."})
    got = outcome(model, seed=replace(SEED, source="my own code", language="cpp"))
    assert (got.kind, got.row["step"]) == ("rejected", step)
    assert got.row["reason"] == "does not name the programming language cpp"


def test_metamath_asks_for_a_strategy_in_its_instructions_alone() -> None:
    model = Model()
    outcome(model, seed=replace(SEED, source="MetaMath"))
    assert [step for step in model.asked if "strategy" in model.prompt(step)] == WRITING[:2]


def test_the_versions_of_the_prompts_are_those_that_were_asked() -> None:
    model = Model(instruction_negative=RowFailure("no"))
    named = outcome(model).row["provenance"]["prompt_version"]
    assert named == "instruction_generation=1 instruction_poisoning=1"
    assert " ".join(sorted({call.prompt for call in model.calls})) == named


COMPLEMENT = SETTINGS.model_copy(update={"complement": True})


def test_the_complement_turns_the_hard_negative_into_the_positive_and_the_record_stays_as_it_is() -> None:
    model = Model()
    plain, got = outcome(Model()), outcome(model, COMPLEMENT)
    assert plain.complement is None
    assert got.complement is not None
    row = fits(got.complement, records.COMPLEMENT)
    assert row["fault"] is None
    for column in ("id", "source", "query_positive", "hard_negative_document_1", "document_positive"):
        assert row[column] == got.row[column]
    assert {**got.row, "provenance": None} == {**plain.row, "provenance": None}
    assert list(model.asked) == [*WRITING, *JUDGING, "instruction_complement", "judge_complement"] == list(STEPS)
    assert f"Instruction: {row['instruction_complement']}\n" in model.prompt("judge_complement")
    assert got.paid.calls == 10 == len(got.row["provenance"]["request_hashes"])
    assert got.row["provenance"]["judge"] == "o4-mini-2026-01-01"


@pytest.mark.parametrize(
    ("step", "answer", "fault"),
    [
        ("instruction_complement", "Instruction: \nNothing", "empty before the first newline"),
        ("instruction_complement", RowFailure("HTTP 500; tried 7 times"), "tried 7 times"),
        ("judge_complement", "Answer: none", "the judge picked none"),
        ("judge_complement", "The third.", "malformed answer"),
        ("instruction_complement", KeyError("surprise"), "KeyError: 'surprise'"),
    ],
)
def test_a_complement_that_fails_leaves_its_record_kept(step: str, answer: str | Exception, fault: str) -> None:
    got = outcome(Model(**{step: answer}), COMPLEMENT)
    assert got.kind == "kept"
    assert got.complement is not None
    row = fits(got.complement, records.COMPLEMENT)
    assert fault in row["fault"]
    assert (row["instruction_complement"] is None) == isinstance(answer, Exception)


def test_no_complement_is_asked_for_a_row_that_is_not_kept() -> None:
    model = Model(judge_positive="Answer: none")
    assert outcome(model, COMPLEMENT).complement is None
    assert "instruction_complement" not in model.asked


def test_a_label_without_a_passage_is_malformed() -> None:
    got = outcome(Model(hard_negative_document_2="Passage:\n"))
    assert (got.kind, got.row["step"]) == ("dead_letter", "hard_negative_document_2")


@pytest.mark.parametrize("name", ["query", "passage"])
def test_a_seed_that_lacks_its_text_is_a_dead_letter_before_anything_is_asked(name: str) -> None:
    model = Model()
    got = asyncio.run(synthesize(replace(SEED, **{name: " "}), POOL, SETTINGS, model))
    row = fits(got.row, records.DEAD_LETTER)
    assert (got.kind, row["step"], row["error"]) == ("dead_letter", "seed", f"its {name} is empty")
    assert model.asked == {}


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


@pytest.mark.parametrize("replayed", [False, True])
def test_a_dead_letter_says_whether_a_journal_answered_its_last_request(replayed: bool) -> None:
    cut_off = Completion("Query: ", "length", "small", 10, 10)
    model = Model(query_negative=cut_off)

    async def journaled(request: Request) -> Completion:
        return replace(await model(request), replayed=replayed)

    assert asyncio.run(synthesize(SEED, POOL, SETTINGS, journaled)).from_journal == replayed
    model.answers["query_negative"] = RowFailure("HTTP 400: no")
    assert not asyncio.run(synthesize(SEED, POOL, SETTINGS, journaled)).from_journal


def test_a_step_may_have_a_model_of_its_own_and_own_prices(tmp_path: Path) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text("as_of: 2026-11-01\nmodels:\n  home-made: [2, 3]\n")
    steps = {"query_negative": {"model": "home-made"}, "judge_positive": {"model": "home-made", "structured": True}}
    model = Model()
    got = outcome(model, SynthesizeSettings.of({"seeds": "", "output": "", "steps": steps, "prices": str(table)}))
    assert [step for step, request in model.asked.items() if request.model == "home-made"] == list(steps)
    assert "response_format" in model.asked["judge_positive"].parameters
    usd = 4 * (1000 * 0.15 + 100 * 0.60) / 1e6 + 2 * (1000 * 1.10 + 100 * 4.40) / 1e6 + 2 * (1000 * 2 + 100 * 3) / 1e6
    assert got.row["provenance"]["usd"] == pytest.approx(usd)


def test_an_unknown_model_costs_an_unknown_sum() -> None:
    settings = SynthesizeSettings.of({"seeds": "", "output": "", "generator": {"model": "home-made"}})
    got = outcome(Model(), settings)
    assert got.row["provenance"]["usd"] is None
    assert got.paid.usd is None
    assert got.paid.prompt_tokens == 8000


def test_an_unexpected_exception_makes_a_dead_letter_that_says_where_it_came_from() -> None:
    got = outcome(Model(query_negative=KeyError("surprise")))
    assert got.kind == "dead_letter"
    assert (got.row["step"], got.row["error"]) == ("query_negative", "KeyError: 'surprise'")
    assert got.paid.calls == 2
    assert got.traceback is not None
    assert "Traceback" in got.traceback
    assert __file__ in got.traceback


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
texts = json_values | st.sampled_from(["Instruction: \ud83d here and there", "Query: \udc00", '{"query": "\\ud83d"}'])
messages = st.fixed_dictionaries({"content": texts}, optional={"refusal": json_values})
choices = st.fixed_dictionaries({"message": messages | json_values}, optional={"finish_reason": json_values})
usages = st.fixed_dictionaries({}, optional={"prompt_tokens": json_values, "completion_tokens": json_values})
bodies = json_values | st.fixed_dictionaries(
    {"choices": st.lists(choices, max_size=2) | json_values},
    optional={"usage": usages | json_values, "model": json_values},
)


@pytest.mark.parametrize("structured", [False, True])
@settings(max_examples=300)
@given(bodies)
def test_whatever_json_an_endpoint_answers_every_row_has_an_outcome_that_can_be_written(
    structured: bool, body: object
) -> None:
    model = {"model": "m", "structured": structured}
    given = SynthesizeSettings.of({"seeds": "", "output": "", "generator": model})

    async def complete(request: Request) -> Completion:
        try:
            got = completion_of(json.dumps(body).encode())
        except Unanswered as fault:
            raise RowFailure(str(fault)) from fault
        assert decode(encode(request, got)) == (request.key, replace(got, replayed=True))
        return got

    got = asyncio.run(synthesize(SEED, POOL, given, complete))
    assert got.traceback is None
    fits(got.row, SCHEMAS[got.kind])
