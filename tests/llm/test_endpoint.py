import email.utils
import json
import math
import time

import pytest

from infembed_ray.llm.endpoint import error_message, parse_completion, retry_after_s


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ({}, 0),
        ({"Retry-After": "1.5"}, 1.5),
        ({"Retry-After": "-3"}, 0),
        ({"Retry-After": "inf"}, 0),
        ({"Retry-After": "soon"}, 0),
    ],
)
def test_retry_after_is_seconds(header: dict[str, str], seconds: float) -> None:
    assert retry_after_s(header) == seconds


@pytest.mark.parametrize(("ahead_s", "seconds"), [(3600, 3600), (-3600, 0)])
def test_retry_after_may_be_a_date(ahead_s: float, seconds: float) -> None:
    header = {"Retry-After": email.utils.formatdate(time.time() + ahead_s, usegmt=True)}
    assert retry_after_s(header) == pytest.approx(seconds, abs=30)


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
