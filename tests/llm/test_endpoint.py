import contextlib
import email.utils
import json
import math
import time
from collections.abc import Callable
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.chat import UNREADABLE, RowFailure, RunFailure
from infembed_ray.llm.endpoint import (
    LONGEST_WAIT_S,
    ErrorBody,
    RateLimited,
    Route,
    Unanswered,
    completion_of,
    error_message,
    parse_completion,
    proxy_of,
    retry_after_s,
)
from tests.support.chat import request


def test_an_error_with_a_lone_surrogate_can_be_written() -> None:
    message, _ = error_message(b'{"error": {"message": "no \\ud83d"}}')
    assert message == "no ?"
    assert error_message(b"[" * 10_000)[0].startswith("[[")


@pytest.mark.parametrize("extra", ["[" * 10_000 + "]" * 10_000, "1" * 10_000], ids=["deep", "long number"])
def test_a_response_beyond_pythons_parser_is_an_unreadable_answer_and_not_asked_for_again(extra: str) -> None:
    body = f'{{"choices": [{{"message": {{"content": "yes"}}}}], "extra": {extra}}}'
    assert parse_completion(body.encode()).finish_reason == UNREADABLE


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 64}}, (100, 1, 64, None)),
        ({"prompt_tokens_details": {"cached_tokens": 1000}}, (100, 1, 100, None)),
        ({"prompt_tokens_details": {"cached_tokens": -1}}, (100, 1, 0, None)),
        ({"prompt_tokens_details": 3, "prompt_cache_hit_tokens": 60}, (100, 1, 60, None)),  # DeepSeek
        ({"prompt_tokens_details": None, "cost": 0.25}, (100, 1, 0, 0.25)),  # OpenRouter
        ({"cost": math.nan}, (100, 1, 0, None)),
        ({"cost": {"total": 1}}, (100, 1, 0, None)),
        ({"completion_tokens": 0, "total_tokens": 130}, (100, 30, 0, None)),  # reasoning is in the total only
        *(({"prompt_tokens": bad, "cost": 1.0}, (0, 0, 0, None)) for bad in (0, -5, math.inf, math.nan, "x", [7])),
        *(({"completion_tokens": bad}, (0, 0, 0, None)) for bad in (None, -1, math.inf, "x", {}, 10**9)),
        ({"completion_tokens": "12"}, (100, 12, 0, None)),
    ],
)
def test_usage_counts_wholly_or_not_at_all(usage: dict[str, object], expected: tuple[object, ...]) -> None:
    choice = {"message": {"content": "x"}, "finish_reason": "stop"}
    assert completion_of({"choices": [choice], "usage": usage and [7]}).prompt_tokens == 0
    got = completion_of({"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 1, **usage}})
    assert (got.prompt_tokens, got.completion_tokens, got.cached_tokens, got.usd) == expected


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
    with pytest.raises(Unanswered, match="finish_reason=error"):
        parse_completion(json.dumps(body).encode())


FORMS = [
    ("Retry-After", lambda s: f"{s:.3f}"),
    ("retry-after", lambda s: f" {s:.3f} "),
    ("retry-after-ms", lambda s: f"{1000 * s:.0f}"),
    ("Retry-After", lambda s: f"{s:.3f}s"),
    ("Retry-After", lambda s: f"{1000 * s:.0f}ms"),
    ("Retry-After", lambda s: f"{int(s // 3600)}h{int(s % 3600 // 60)}m{s % 60:.3f}s"),
    ("Retry-After", lambda s: f"{int(s // 60)} minutes {s % 60:.3f} seconds"),
    *(("X-RateLimit-Reset", lambda s, unit=unit: f"{(time.time() + s) * unit:.0f}") for unit in (1, 1e3, 1e6, 1e9)),
    ("Retry-After", lambda s: f"{time.time() + s:.3f}"),
    ("Retry-After", lambda s: email.utils.formatdate(time.time() + s, usegmt=True)),
    ("Retry-After", lambda s: time.asctime(time.gmtime(time.time() + s))),
    ("anthropic-ratelimit-requests-reset", lambda s: datetime.fromtimestamp(time.time() + s, timezone.utc).isoformat()),
    ("x-ratelimit-reset-tokens", lambda s: f"{s:.3f}s"),
    ("ratelimit-reset", lambda s: f'"{s:.3f}"'),
]


@given(st.floats(0, 10**6), st.sampled_from(FORMS))
def test_a_wait_is_understood_in_every_form(wait_s: float, form: tuple[str, Callable[[float], str]]) -> None:
    name, written = form
    assert retry_after_s(CIMultiDict({name: written(wait_s)})) == pytest.approx(wait_s, abs=5)


@given(st.text(max_size=20) | st.floats().map(str) | st.integers().map(str), st.sampled_from(FORMS))
def test_no_header_makes_a_wait_negative_endless_or_a_failure(value: str, form: tuple[str, object]) -> None:
    assert 0 <= retry_after_s({form[0]: value}) <= LONGEST_WAIT_S


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        *(({"Retry-After": value}, 0) for value in ("", "-3", "inf", "nan", "soon", "1700000000", "9" * 30)),
        ({"Retry-After": "Mon, 06 Nov 2023 08:49:37 GMT"}, 0),
        ({"Retry-After": "99999999d"}, LONGEST_WAIT_S),
        ({"retry-after-ms": "250", "Retry-After": "1"}, 0.25),
        ({"retry-after-ms": "x", "Retry-After": "1", "x-ratelimit-reset": "60"}, 1),
        ({"x-ratelimit-reset-tokens": "6m0s", "x-ratelimit-remaining-tokens": "12"}, 0),
        ({"x-ratelimit-reset-tokens": "6m0s", "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset": "1s"}, 360),
    ],
)
def test_a_refusal_says_how_long_to_wait(header: dict[str, str], expected: float) -> None:
    assert retry_after_s(CIMultiDict(header)) == pytest.approx(expected, abs=0)


PAGE = b"<!DOCTYPE html><html><head><style>b {}</style><title>502 Bad Gateway</title></head><body>nginx</body></html>"


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind", "said"),
    [
        (502, {}, PAGE, Unanswered, "HTTP 502: 502 Bad Gateway nginx ["),
        (413, {}, b"<h1>413 Request Entity Too Large</h1>", RowFailure, "HTTP 413: 413 Request Entity Too Large"),
        (403, {}, b'{"message":"Forbidden"}', RowFailure, "HTTP 403: Forbidden"),
        (422, {}, b'{"detail":[{"loc":["body"],"msg":"bad"}]}', RowFailure, '"msg":"bad"'),
        (400, {}, b'{"error":"model requires more memory"}', RowFailure, "model requires more memory"),  # Ollama
        (500, {}, b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}', Unanswered, "Overloaded"),
        (400, {}, b'{"error":{"message":"Provider returned error","metadata":{"raw":"too long","provider_name":"Novita"}}}',
         RowFailure, "Provider returned error: Novita: too long"),
        (429, {}, b'[{"error":{"code":429,"message":"Quota","details":[{"retryDelay":"37s"}]}}]', RateLimited, "Quota"),
        (429, {}, b'{"error":{"message":"no","metadata":{"headers":{"X-RateLimit-Reset":"37"}}}}', RateLimited, "no"),
        (429, {}, b'{"error":{"message":"no","type":"insufficient_quota","code":null}}', RunFailure, "quota is used up"),
        (400, {}, b'{"error":{"message":"no","code":"InsufficientBalance"}}', RunFailure, "quota is used up"),
        (404, {}, b'{"detail":"Not Found"}', RunFailure, "most base URLs end with /v1"),
        (301, {"Location": "https://u:secretword@new/v1"}, b"", RowFailure, "redirects to https://***@new/v1"),
        (400, {}, b"bad key sk-secretword", RowFailure, "bad key ***"),
        (418, {}, b"\xff\xfe\x00", RowFailure, "HTTP 418: "),
    ],
)  # fmt: skip
def test_an_error_shows_status_address_proxy_and_what_was_said_without_secrets(
    monkeypatch: pytest.MonkeyPatch, status: int, headers: dict[str, str], body: bytes, kind: type[Exception], said: str
) -> None:
    monkeypatch.setenv("KEY", "sk-secretword")
    monkeypatch.setenv("http_proxy", "user:secretword@proxy:3128")
    failure = Route(Endpoint(base_url="http://here", api_key_env="KEY")).failure(request(), status, headers, body)
    assert type(failure) is kind
    assert said in str(failure)
    assert "http://here/chat/completions, proxy http://***@proxy:3128]" in str(failure)
    assert "secretword" not in str(failure)
    assert getattr(failure, "retry_after_s", 0) == (37 if body[:1] == b"[" or b"X-RateLimit" in body else 0)


BYPASSED = "10.0.0.0/8 10.1.2.3|here, 192.168.0.0/16 ,x 192.168.7.7:80|fd00::/8 [fd00::1]:80|10.0.0.7 10.0.0.7:80|*.corp.x llm.corp.x"
BYPASSED += "|.corp.x llm.corp.x:80|corp.x:8000 corp.x:8000|* anywhere"
PROXIED = "10.0.0.0/8 11.1.2.3|10.0.0.0/8,no/net corp.x| corp.x|corp.x:8000 corp.x:9000"


@pytest.mark.parametrize(
    ("case", "proxied"), [*((c, 0) for c in BYPASSED.split("|")), *((c, 1) for c in PROXIED.split("|"))]
)
def test_no_proxy_names_hosts_domains_and_networks(monkeypatch: pytest.MonkeyPatch, case: str, proxied: int) -> None:
    no_proxy, _, host = case.rpartition(" ")
    for name in ("NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", no_proxy)
    monkeypatch.setenv("http_proxy", "proxy:3128")
    assert proxy_of(f"http://{host}/v1") == ("http://proxy:3128" if proxied else None)
    monkeypatch.setenv("http_proxy", "socks5://user:secretword@proxy:1")
    refused = pytest.raises(RunFailure, match=r"http_proxy=socks5://\*\*\*@proxy:1: is no proxy of HTTP")
    with refused if proxied else contextlib.nullcontext():
        proxy_of(f"http://{host}/v1")
