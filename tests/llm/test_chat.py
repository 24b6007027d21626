import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.llm.chat import AnswerFormat, Completion, RowFailure, usable_text
from tests.support.chat import completion, request

QUERY = AnswerFormat("Query", "<your query>")


def test_the_key_depends_on_everything_that_decides_the_answer() -> None:
    base = replace(request(), parameters={"temperature": 1.0})
    others = [
        replace(base, model="large"),
        replace(base, messages=({"role": "user", "content": "hello "},)),
        replace(base, parameters={"temperature": 0.5}),
        replace(base, parameters={}),
        replace(base, prompt="test=2"),
    ]
    assert len({each.key for each in [base, *others]}) == len(others) + 1


def test_the_key_ignores_row_step_and_the_order_of_parameters() -> None:
    base = replace(request(), parameters={"temperature": 1.0, "max_completion_tokens": 9})
    same = replace(base, parameters={"max_completion_tokens": 9, "temperature": 1.0}, row="other", step="other")
    assert same.key == base.key


def test_the_key_of_a_known_request_never_changes() -> None:
    assert request("héllo").key == "66354a24737ea465c40f1681e22b43974e5ae4e0400f62281ede211fed83281c"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (Completion("", "stop", "m", 1, 0, refusal="I will not"), "refused: I will not"),
        (Completion("half", "content_filter", "m", 1, 1), "content filter"),
        (Completion("half an ans", "length", "m", 1, 5), r"token limit \(5 tokens\)"),
        (Completion(" \n", "stop", "m", 1, 1), "empty answer"),
    ],
)
def test_an_answer_that_did_not_end_normally_fails_the_row(bad: Completion, said: str) -> None:
    with pytest.raises(RowFailure, match=said):
        usable_text(bad)


ENDS = {
    "cut off": "length LENGTH max_tokens MAX_TOKENS maxTokens FinishReason.MAX_TOKENS model_length max_new_tokens",
    "refused": "SAFETY RECITATION content_filtered refusal content-filter guardrail_intervened FINISH_REASON_SAFETY",
    "": "stop STOP end_turn eos eos_token COMPLETE stop_sequence FinishReason.STOP eosFound endoftext",
    "interrupted": "model_context_window_exceeded network_error timeout cancelled unknown OTHER pause_turn tool_calls stopped_by_user",
}


@pytest.mark.parametrize(("end", "reason"), [(end, each) for end, given in ENDS.items() for each in given.split()])
def test_the_end_of_an_answer_is_understood_in_every_providers_words(end: str, reason: str) -> None:
    answer = Completion("Query: x", reason, "m", 1, 1)
    with pytest.raises(RowFailure, match=end) if end else contextlib.nullcontext():
        assert usable_text(answer) == "Query: x"
    assert (answer.cut_off, answer.refused, answer.interrupted) == tuple(
        end == each for each in list(ENDS)[:2] + list(ENDS)[3:]
    )


@given(st.from_regex(r"zz[A-Za-z_. -]*", fullmatch=True))
def test_no_unheard_of_end_is_a_normal_one(reason: str) -> None:
    assert Completion("x", reason, "m", 1, 1).interrupted


@pytest.mark.parametrize("answer", ["Query: x", '{"query": "x"}', "Passage: a < b, and <b>bold</b>\n[think]"])
@pytest.mark.parametrize(
    "around",
    [
        "<think>{0}</think>\n\n{1}",
        "{0}</think>\n{1}",
        "<think>{0}<think>{0}</think>{0}</think>{1}",
        "\n{1}\n<think>{0}",
        "<reasoning>{0}</reasoning>{1}\n<thinking>{0}</thinking>",
        "{0}So it is the first.</think>{1}<|im_end|>\n<|im_start|>user\n",
        "[THINK]{0}[/THINK]{1}",
        "◁think▷{0}◁/think▷{1}",
        "<seed:think>{0}</seed:think>{1}",
        "<|channel|>analysis<|message|>{0}<|end|><|start|>assistant<|channel|>final<|message|>{1}<|return|>",
        "<|channel|>analysis<|message|>{0}<|end|><|start|>assistant<|channel|>final json<|message|>{1}",
        "analysis{0}assistantfinal{1}",
    ],
)
def test_reasoning_is_no_part_of_an_answer(around: str, answer: str) -> None:
    text = usable_text(completion(around.format("Answer: 9 or Query: y?\n", answer))).strip()
    if answer.startswith("{"):
        text = QUERY.as_text(text)  # reasoning after JSON stays: JSON is found wherever it is
    assert text == ("Query: x" if answer.startswith("{") else answer)


@pytest.mark.parametrize(
    "text",
    [
        "Passage: GPT-2 ends each text with <|endoftext|>, one token of its own.\nSo does `<|endoftext|>`.",
        "Passage: Let it plan in <thinking> tags, and close them with </thinking> before the answer.",
        "Passage: Write <thinking>the plan</thinking>\nand then the rest.",
        "Passage: R1 writes </think> before its answer, and (</think>) ends its reasoning.",
        "Query: what does <think> mean",
    ],
)
def test_an_answer_about_reasoning_stays_whole(text: str) -> None:
    assert usable_text(completion(text)) == text
    assert usable_text(completion(f"<think>Passage: y</think>\n{text}")).strip() == text


@pytest.mark.parametrize(
    "text", ["<think>Answer: 1", "<think>Answer: 1</think>\n", "<|channel|>analysis<|message|>Answer: 1<|end|>"]
)
def test_reasoning_without_an_answer_is_an_empty_answer(text: str) -> None:
    with pytest.raises(RowFailure, match="empty answer"):
        usable_text(completion(text))


def test_a_complete_answer_has_a_key_without_the_cap_and_a_cut_off_one_has_it() -> None:
    base = replace(request(), parameters={"temperature": 1.0})
    small, large = (replace(base, parameters={**base.parameters, "max_completion_tokens": cap}) for cap in (9, 99))
    assert small.complete_key == large.complete_key == base.key == base.complete_key
    assert len({small.key, large.key, base.key}) == 3
    assert small.keys == (small.key, base.key)
    assert base.keys == (base.cut_off_key, base.key)
    assert small.journal_key(completion("x")) == base.key
    assert small.journal_key(Completion("x", "length", "m", 1, 1)) == small.key
    assert base.journal_key(Completion("x", "length", "m", 1, 1)) not in (*small.keys, *large.keys)
