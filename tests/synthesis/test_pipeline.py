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

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import Completion, Request, RowFailure, RunFailure
from infembed_ray.llm.endpoint import Unanswered, completion_of, parse_completion
from infembed_ray.llm.journal import decode, encode
from infembed_ray.records import tables
from infembed_ray.records.tables import SCENARIOS, Seed
from infembed_ray.synthesis import judge
from infembed_ray.synthesis.pipeline import SCHEMAS, Outcome, Spend, synthesize
from tests.support import stand_in_answers
from tests.synthesis.scripted_model import JUDGING, POOL, SEED, SETTINGS, WRITING, Model, outcome


def fits(row: Mapping[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """Return the row after a round trip through a table of this schema; it must have no other columns."""
    assert set(row) <= set(schema.names)
    return pa.Table.from_pylist([dict(row)], schema=schema).to_pylist()[0]


def test_a_good_seed_becomes_a_whole_record() -> None:
    model = Model()
    got = outcome(model)
    assert got.kind == "kept"
    assert list(model.asked) == WRITING + JUDGING
    row = fits(got.row, tables.RECORD)
    assert [name for name, value in row.items() if value is None] == ["language"]
    assert (row["id"], row["source"], row["topic"], row["split"]) == ("seed-1", "made up", "bees", "train")
    assert (row["query_positive"], row["document_positive"]) == (SEED.query, SEED.passage)
    assert len({row[step] for step in WRITING}) == 5


def test_a_record_has_its_provenance_and_cost() -> None:
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


def test_equal_seeds_send_equal_requests_and_give_equal_outcomes() -> None:
    one, two = Model(), Model()
    assert outcome(one) == outcome(two)
    assert one.asked == two.asked


def test_later_steps_see_only_the_first_line() -> None:
    model = Model(instruction_positive="Instruction: For keepers, nothing else.\nThis works because...")
    row = outcome(model).row
    assert row["instruction_positive"] == "For keepers, nothing else."
    assert "This works because" not in model.prompt("query_negative")


@pytest.mark.parametrize(
    ("step", "text", "reason"),
    [
        ("instruction_positive", "Instruction: Find passages that:\n- help keepers", "a lead-in to a list"),
        ("instruction_negative", f"Instruction: {SEED.query}?", "repeats a text of the prompt"),
        ("instruction_negative", "Instruction: for keepers", "fewer than 3 words"),
        ("query_negative", "Query: How do bees make honey?", "equal to the positive"),
    ],
)
def test_a_useless_line_is_rejected_and_ends_the_row(step: str, text: str, reason: str) -> None:
    model = Model(**{step: text})
    got = outcome(model)
    assert got.kind == "rejected"
    row = fits(got.row, tables.REJECTED)
    assert row["step"] == step == list(model.asked)[-1]
    assert reason in row["reason"]
    assert row["hard_negative_document_1"] is None
    assert got.paid.calls == len(model.asked) == len(row["provenance"]["request_hashes"])


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("instruction_positive", "Instruction:\n\n"),
        ("instruction_positive", "Instruction: <your instruction>"),
        ("instruction_negative", 'Instruction: "Your new instruction."'),
        ("query_negative", "Query: **<your new query>**."),
        ("query_negative", "Query: [insert your query here]"),
        ("query_negative", 'Query: ""'),
        ("query_negative", "Query: Be concise but specific enough to ensure clear differentiation."),
        ("hard_negative_document_1", "Passage: <your passage>"),
        ("hard_negative_document_2", "Passage: ``` ```"),
    ],
)
def test_an_empty_answer_or_an_echo_of_the_prompt_is_asked_again(step: str, text: str) -> None:
    model = Model(
        **{step: lambda request: text if len(request.messages) == 1 else stand_in_answers.answer(request.body)}
    )
    got = outcome(model)
    assert [call.step for call in model.calls].count(step) == 2
    assert "this answer cannot be used" in model.asked[step].messages[-1]["content"].lower()
    assert got.kind in ("kept", "rejected")
    assert text not in str(got.row)


def test_an_answer_without_token_counts_has_no_price() -> None:
    got = outcome(Model(query_negative=Completion("Query: bees compared", "stop", "m", 0, 0)))
    assert (got.paid.usd, got.row["provenance"]["usd"]) == (None, None)


@pytest.mark.parametrize("step", ["hard_negative_document_1", "hard_negative_document_2"])
def test_a_negative_passage_equal_to_the_positive_is_rejected_before_the_judge(step: str) -> None:
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
def test_a_wrong_verdict_rejects_the_row_and_ends_it(scenario: str, picked: str) -> None:
    pick = {"none": "Answer: none", "positive": _number_of(SEED.passage), "distractor": _number_of("A passage about")}
    model = Model(**{f"judge_{scenario}": pick[picked]})
    got = outcome(model)
    row = fits(got.row, tables.REJECTED)
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
    row = fits(got.row, tables.DEAD_LETTER)
    assert (got.kind, row["id"], row["source"], row["step"]) == ("dead_letter", "seed-1", "made up", step)
    assert failure.split()[-1] in row["error"] or "tried 7 times" in row["error"]
    asked = model.asked[step]
    journaled = asked.cut_off_key if failure == "cut off" else asked.complete_key
    assert row["request_hash"] == journaled == row["provenance"]["request_hashes"][-1]
    assert list(model.asked)[-1] == step
    assert got.paid.calls == len(model.calls) - (failure == "failed in transit")
    assert len(model.calls) == len(model.asked) + (failure != "failed in transit")


def _first_time(bad: str) -> Callable[[Request], str]:
    """Answer badly at first and well to the repair."""
    return lambda request: bad if len(request.messages) == 1 else stand_in_answers.answer(request.body)


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("step", WRITING + JUDGING)
def test_a_malformed_answer_is_repaired_by_one_more_request(step: str, structured: bool) -> None:
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
def test_an_answer_malformed_twice_is_a_dead_letter_and_both_answers_count(step: str, structured: bool) -> None:
    model = Model(**{step: "Sure! Happy to help."})
    got = outcome(model, _structured() if structured else SETTINGS)
    row = fits(got.row, tables.DEAD_LETTER)
    assert (got.kind, row["step"]) == ("dead_letter", step)
    assert row["error"].startswith("malformed answer: no `")
    assert [call.step for call in model.calls][-2:] == [step, step]
    assert row["request_hash"] == model.calls[-1].key
    assert got.paid.calls == len(model.calls) == len(row["provenance"]["request_hashes"])


def _structured() -> SynthesizeSettings:
    return SynthesizeSettings.from_mapping(
        {
            "seeds": "",
            "output": "",
            "generator": {"model": "gpt-4o-mini", "structured": True},
            "judge": {"model": "o4-mini", "structured": True},
        }
    )


def test_structured_answers_give_the_same_record_as_text() -> None:
    as_text, as_json = Model(), Model()
    text, structured = outcome(as_text), outcome(as_json, _structured())
    assert structured.kind == text.kind == "kept"
    assert structured.row["provenance"]["verdicts"] == text.row["provenance"]["verdicts"]
    for step, request in as_json.asked.items():
        answered = json.loads(stand_in_answers.answer(request.body))
        schema = request.parameters["response_format"]["json_schema"]["schema"]
        jsonschema.validate(answered, schema)
        if step in WRITING:
            assert structured.row[step] == next(iter(answered.values()))
        else:
            assert schema["properties"]["answer"]["enum"] == [*"1234567", "none"]
        assert request.key != as_text.asked[step].key


def test_only_prompts_for_code_name_the_seeds_language() -> None:
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
def test_an_instruction_that_does_not_name_the_language_is_rejected(step: str) -> None:
    good = "Instruction: A C++ solution that sorts first, then scans once."
    model = Model(**{"instruction_positive": good, step: "Instruction: A solution in C, by recursion only."})
    got = outcome(model, seed=replace(SEED, source="my own code", language="cpp"))
    assert (got.kind, got.row["step"]) == ("rejected", step)
    assert got.row["reason"] == "does not name the programming language cpp"


def test_the_prompt_version_names_only_prompts_that_were_asked() -> None:
    model = Model(instruction_negative=RowFailure("no"))
    named = outcome(model).row["provenance"]["prompt_version"]
    assert named == "instruction_generation=1 instruction_poisoning=1"
    assert " ".join(sorted({call.prompt for call in model.calls})) == named


def test_a_run_failure_is_passed_on() -> None:
    with pytest.raises(RunFailure, match="the key"):
        outcome(Model(query_negative=RunFailure("the key is refused")))


def test_replayed_completions_cost_nothing_but_keep_their_price_in_the_record() -> None:
    fresh = Model()
    paid = outcome(fresh)

    async def journaled(request: Request) -> Completion:
        return replace(await fresh(request), replayed=request.step not in JUDGING)

    got = asyncio.run(synthesize(SEED, POOL, SETTINGS, journaled))
    assert got.row == paid.row
    assert (got.paid.calls, got.replayed.calls) == (3, 5)
    assert (got.paid + got.replayed).usd == pytest.approx(paid.paid.usd)


@pytest.mark.parametrize("replayed", [False, True])
def test_a_dead_letter_records_whether_its_last_answer_was_replayed(replayed: bool) -> None:
    cut_off = Completion("Query: ", "length", "small", 10, 10)
    model = Model(query_negative=cut_off)

    async def journaled(request: Request) -> Completion:
        return replace(await model(request), replayed=replayed)

    assert asyncio.run(synthesize(SEED, POOL, SETTINGS, journaled)).from_journal == replayed
    model.answers["query_negative"] = RowFailure("HTTP 400: no")
    assert not asyncio.run(synthesize(SEED, POOL, SETTINGS, journaled)).from_journal


def test_a_step_can_have_its_own_model_and_prices(tmp_path: Path) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text("as_of: 2026-11-01\nmodels:\n  home-made: [2, 3]\n")
    steps = {"query_negative": {"model": "home-made"}, "judge_positive": {"model": "home-made", "structured": True}}
    model = Model()
    got = outcome(
        model, SynthesizeSettings.from_mapping({"seeds": "", "output": "", "steps": steps, "prices": str(table)})
    )
    assert [step for step, request in model.asked.items() if request.model == "home-made"] == list(steps)
    assert "response_format" in model.asked["judge_positive"].parameters
    usd = 4 * (1000 * 0.15 + 100 * 0.60) / 1e6 + 2 * (1000 * 1.10 + 100 * 4.40) / 1e6 + 2 * (1000 * 2 + 100 * 3) / 1e6
    assert got.row["provenance"]["usd"] == pytest.approx(usd)


def test_an_unexpected_exception_makes_a_dead_letter_with_its_traceback() -> None:
    got = outcome(Model(query_negative=KeyError("surprise")))
    assert got.kind == "dead_letter"
    assert (got.row["step"], got.row["error"]) == ("query_negative", "KeyError: 'surprise'")
    assert got.paid.calls == 2
    assert got.traceback is not None
    assert "Traceback" in got.traceback
    assert "scripted_model.py" in got.traceback


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
@settings(max_examples=50)
@given(bodies)
def test_any_json_response_gives_an_outcome_that_can_be_written(structured: bool, body: object) -> None:
    model = {"model": "m", "structured": structured}
    given = SynthesizeSettings.from_mapping({"seeds": "", "output": "", "generator": model})

    async def complete(request: Request) -> Completion:
        try:
            got = parse_completion(json.dumps(body).encode())
        except Unanswered as fault:
            raise RowFailure(str(fault)) from fault
        assert decode(encode(request, got)) == (request.key, replace(got, replayed=True))
        return got

    got = asyncio.run(synthesize(SEED, POOL, given, complete))
    assert got.traceback is None
    fits(got.row, SCHEMAS[got.kind])


def test_with_shared_prefix_the_requests_of_a_row_begin_alike_and_are_other_requests() -> None:
    asked: dict[bool, list[Request]] = {False: [], True: []}

    def run(shared_prefix: bool) -> Outcome:
        async def complete(request: Request) -> Completion:
            asked[shared_prefix].append(request)
            return completion_of(stand_in_answers.completion(request.body))

        settings = SynthesizeSettings(seeds="", output="", shared_prefix=shared_prefix)
        pool = [f"Distractor {number} about other things." for number in range(9)]
        return asyncio.run(synthesize(Seed("1", "maple honey", "Maple trees give syrup."), pool, settings, complete))

    assert run(False).kind == run(True).kind == "kept"
    assert len(asked[False]) == len(asked[True]) == 8
    assert not {request.key for request in asked[False]} & {request.key for request in asked[True]}
    prompts = [request.messages[0]["content"] for request in asked[True]]
    assert all(prompt.startswith("Document: Maple trees give syrup.\n\n") for prompt in prompts[:5])
    candidates = {prompt.partition("\n\nYou are a strict judge")[0] for prompt in prompts[5:]}
    assert len(candidates) == 1
    assert candidates.pop().count("\n\n[") == 7
