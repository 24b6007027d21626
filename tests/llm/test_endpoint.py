import email.utils
import json
import math
import time

import pytest
from multidict import CIMultiDict

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.chat import UNREADABLE
from infembed_ray.llm.endpoint import (
    ErrorBody,
    Route,
    ServerError,
    completion_of,
    error_message,
    parse_completion,
    retry_after_s,
)


@pytest.mark.parametrize("usage", [math.inf, -1, {"prompt_tokens": math.inf}, {"prompt_tokens": math.nan}, "12", [7]])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_implausible_token_counts_count_as_none(usage: object, name: str) -> None:
    for wrong in (usage, {"prompt_tokens": 7, "completion_tokens": 3, name: usage}):
        body = {"choices": [{"message": {"content": "yes"}}], "usage": wrong}
        got = parse_completion(json.dumps(body).encode())
        if wrong not in (
            {"prompt_tokens": "12", "completion_tokens": 3},
            {"prompt_tokens": 7, "completion_tokens": "12"},
        ):
            assert (got.prompt_tokens, got.completion_tokens) == (0, 0)
        assert got.text == "yes"


def test_an_error_with_a_lone_surrogate_can_be_written() -> None:
    message, _ = error_message(b'{"error": {"message": "no \\ud83d"}}')
    assert message == "no ?"
    assert error_message(b"[" * 10_000)[0].startswith("[[")


@pytest.mark.parametrize("extra", ["[" * 10_000 + "]" * 10_000, "1" * 10_000], ids=["deep", "long number"])
def test_a_response_beyond_pythons_parser_is_an_unreadable_answer_and_not_asked_for_again(extra: str) -> None:
    body = f'{{"choices": [{{"message": {{"content": "yes"}}}}], "extra": {extra}}}'
    assert parse_completion(body.encode()).finish_reason == UNREADABLE


def test_azure_has_deployment_version_and_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_KEY", "mine")
    where = Endpoint(base_url="https://here/", api_key_env="AZURE_KEY", api_version="2024-10-21")
    target = Route(where).target("o p")
    assert str(target.url) == "https://here/openai/deployments/o%20p/chat/completions?api-version=2024-10-21"
    assert target.headers == {"Content-Type": "application/json", "api-key": "mine"}


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"cached_tokens": 64}, 64),
        ({"cached_tokens": 1000}, 100),
        ({"cached_tokens": -1}, 0),
        ({}, 0),
        (None, 0),
        (3, 0),
    ],
)
def test_cached_tokens_are_at_most_the_prompts(details: object, cached: int) -> None:
    message = {"message": {"content": "x"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": details}
    assert completion_of({"choices": [message], "usage": usage}).cached_tokens == cached


@pytest.mark.parametrize(("total", "tokens"), [(30, 20), (13, 3), (0, 3), (None, 3)])
def test_reasoning_that_only_the_total_counts_is_paid_for(total: int | None, tokens: int) -> None:
    message = {"message": {"content": "x"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": total}
    assert completion_of({"choices": [message], "usage": usage}).completion_tokens == tokens


def test_text_parts_are_joined_and_parts_with_reasoning_are_left_out() -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Answer: 1"}]},
        {"type": "reasoning", "text": "Answer: 1"},
        {"type": "text", "text": "Answer"},
        {"type": "output_text", "text": ": 2"},
        "!",
    ]
    body = {"choices": [{"message": {"content": parts, "reasoning_content": "Answer: 1", "reasoning": "Answer: 1"}}]}
    assert parse_completion(json.dumps(body).encode()).text == "Answer: 2!"
    body["choices"][0]["message"]["content"] = [{"type": "refusal", "refusal": "I will not"}]
    assert parse_completion(json.dumps(body).encode()).refusal == "I will not"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": "slow down", "code": 429}, 429),
        ({"message": "Provider returned error", "code": "502"}, 502),
        ("something", 502),
    ],
)
def test_an_error_in_a_response_with_status_200_keeps_its_own_meaning(error: object, status: int) -> None:
    for body in (
        {"error": error},
        {"choices": [], "error": error},
        {"choices": [{"error": error, "finish_reason": "error", "message": {"content": "ha"}}]},
    ):
        with pytest.raises(ErrorBody) as raised:
            parse_completion(json.dumps(body).encode())
        assert raised.value.status == status
        assert str(error["message"] if isinstance(error, dict) else error) in str(raised.value)


def test_an_interrupted_answer_is_asked_again() -> None:
    body = {"choices": [{"message": {"content": "ha"}, "finish_reason": "error"}]}
    with pytest.raises(ServerError, match="finish_reason=error"):
        parse_completion(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({}, 0),
        ({"Retry-After": "1.5"}, 1.5),
        ({"Retry-After": "-3"}, 0),
        ({"Retry-After": "inf"}, 0),
        ({"Retry-After": "soon"}, 0),
        ({"retry-after-ms": "250", "Retry-After": "1"}, 0.25),
        ({"retry-after-ms": "x", "Retry-After": "1"}, 1),
    ],
)
def test_a_refusal_says_how_long_to_wait(header: dict[str, str], expected: float) -> None:
    assert retry_after_s(CIMultiDict(header)) == pytest.approx(expected, abs=0)


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_refusal_may_name_a_time(ahead_s: int) -> None:
    header = {"Retry-After": email.utils.formatdate(time.time() + ahead_s, usegmt=True)}
    assert retry_after_s(CIMultiDict(header)) == pytest.approx(max(0, ahead_s), abs=600 if ahead_s > 0 else 0)
