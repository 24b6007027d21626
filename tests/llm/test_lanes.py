import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.config.llm import Endpoint, Limits
from infembed_ray.llm import client
from infembed_ray.llm.chat import CAP, Completion, Request
from infembed_ray.llm.lanes import ADAPT_S, MAX_TOKENS, Dialect, Lane
from tests.llm.test_client import ask_all, endpoint, spent_usd, using
from tests.support.chat import passage_request
from tests.support.stand_in_llm import stand_in

SCHEMA = {"type": "json_schema", "json_schema": {"name": "query"}}
ASKED = Request(
    "small",
    ({"role": "user", "content": "hello"},),
    "p=1",
    "step",
    "row",
    {CAP: 64, "temperature": 0.5, "reasoning_effort": "low", "response_format": SCHEMA},
)
ALL = {**ASKED.parameters, MAX_TOKENS: 64}


# -------------------------------------------------------------------------------------------- the concurrency limit


class Timed:
    """A lane whose clock a test controls."""

    def __init__(self, slots: int) -> None:
        self.now = 0.0
        self.lane = Lane(Endpoint(), slots, lambda: self.now)

    def send(self) -> None:
        with pytest.raises(StopIteration):  # it enters without waiting
            self.lane.enter().send(None)

    def answer(self, answered: int, limited: int) -> None:
        """Let requests end one after another; all arrive within a second."""
        self.now += ADAPT_S
        ends = [False] * answered + [True] * limited
        random.Random(0).shuffle(ends)
        for end in ends:
            self.send()
            self.lane.leave(limited=end)


def test_many_429s_cut_the_requests_in_flight_and_few_let_them_grow_back() -> None:
    timed, allowed = Timed(100), []
    for limited in [50] * 8 + [5] * 60:
        timed.answer(100, limited)
        allowed.append(timed.lane.limit)
    assert allowed[7] < 10
    assert allowed[:8] == sorted(allowed[:8], reverse=True)
    assert allowed[-1] == 100


def test_rare_429s_do_not_reduce_the_requests_in_flight_even_with_slow_answers() -> None:
    timed, rng, allowed = Timed(100), random.Random(0), []
    for _ in range(600):
        limited = sum(rng.random() < 0.05 for _ in range(10))
        timed.answer(10 - limited, limited)
        allowed.append(timed.lane.limit)
    assert sum(allowed) / len(allowed) > 90


def test_429s_that_arrive_before_the_first_answers_do_not_reduce_the_requests_in_flight() -> None:
    timed = Timed(256)
    for _ in range(256):
        timed.send()
    timed.now += ADAPT_S
    for _ in range(18):
        timed.lane.leave(limited=True)
    assert timed.lane.limit == 256


@pytest.mark.integration
def test_a_rate_limited_model_does_not_slow_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_S", 0.01)
    slow = [passage_request(f"query {number}", "judge") for number in range(24)]
    fast = [passage_request(f"query {number}") for number in range(100)]
    with stand_in(latency_s=0.01, limited_model="judge", model_limit=4, model_window_s=0.5) as server:
        using(endpoint(server), tmp_path, lambda chat: ask_all(chat, [*slow, *fast]), in_flight=16)
        log = server.log()
    ended = Counter((entry["model"], entry["ended"]) for entry in log)
    assert ended["small", "answered"] == 100
    assert ended["judge", "answered"] == 24
    last = {model: max(entry["time"] for entry in log if entry["model"] == model) for model in ("small", "judge")}
    assert last["judge"] - last["small"] > 1.0  # 24 take at least 2.5 s


# ---------------------------------------------------------------------------------------------------- the dialect


def error(message: str, param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "param": param}}).encode()


def learned(*errors: bytes, url: str = "http://here/v1") -> tuple[dict[str, Any], str | None]:
    """Return the parameters that are sent after these errors, and what the last one changed."""
    dialect, change = Dialect(Endpoint(base_url=url)), None
    for each in errors:
        change = dialect.learn(ASKED, dialect.encoded(ASKED), each)
    body = json.loads(dialect.encoded(ASKED))
    assert body == json.loads(json.dumps(dialect.body(ASKED)))
    assert (body.pop("model"), body.pop("messages")) == ("small", list(ASKED.messages))
    return body, change


def test_the_cap_is_sent_under_both_names_but_openai_takes_one() -> None:
    assert learned()[0] == ALL
    assert learned(url="https://api.openai.com/v1")[0] == ASKED.parameters


@pytest.mark.parametrize(
    ("refusal", "sent", "change"),
    [
        (error("no", "temperature"), {**ALL, "temperature": None}, "takes no temperature; it is left out"),
        (error("'reasoning_effort' is unknown"), {**ALL, "reasoning_effort": None}, "takes no reasoning_effort; it is left out"),
        (
            error("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."),
            {**ALL, MAX_TOKENS: None},
            "takes max_completion_tokens and not max_tokens",
        ),
        (
            b'{"detail": [{"loc": ["body", "max_completion_tokens"], "msg": "Extra inputs are not permitted"}]}',
            {**ALL, CAP: None},
            "takes max_tokens and not max_completion_tokens",
        ),
        (
            error("json_schema is not supported"),
            {**ALL, "response_format": {"type": "json_object"}},
            "takes no JSON schema; a JSON object is asked for",
        ),
        (error("the text is too long"), ALL, None),
    ],
)  # fmt: skip
def test_a_refused_parameter_is_renamed_or_left_out(refusal: bytes, sent: dict[str, Any], change: str | None) -> None:
    assert learned(refusal) == ({name: value for name, value in sent.items() if value is not None}, change)


def test_refusals_are_adapted_one_after_another_until_no_form_is_left() -> None:
    schema, caps = error("no", "response_format"), (error("no", MAX_TOKENS), error("no", CAP))
    assert "response_format" not in learned(schema, schema)[0]
    body, change = learned(*caps)
    assert (body[CAP], change) == (64, None)
    assert learned(error("no", CAP), url="https://api.openai.com/v1")[0][MAX_TOKENS] == 64


def test_an_error_of_an_outdated_body_only_repeats_the_request() -> None:
    dialect = Dialect(Endpoint(base_url="http://here/v1"))
    sent = dialect.encoded(ASKED)
    assert dialect.learn(ASKED, sent, error("no", "temperature"))
    assert dialect.learn(ASKED, sent, error("no", "temperature")) == ""


@pytest.mark.integration
def test_only_the_sent_body_is_adapted_so_another_dialect_asks_nothing_again(tmp_path: Path) -> None:
    asked = [replace(passage_request(f"tea {n}"), parameters={CAP: 150, "temperature": 0.5}) for n in range(40)]
    with stand_in(refused_parameters="small:temperature,small:max_completion_tokens", latency_s=0.02) as server:
        first = using(endpoint(server), tmp_path, lambda chat: ask_all(chat, asked), in_flight=8)
        again = using(endpoint(server), tmp_path, lambda chat: ask_all(chat, asked))
        assert len(server.log("answered")) == 40
        assert 1 <= len(server.log("refused_parameter")) <= 2 * 8
    assert again == [replace(each, replayed=True) for each in first]


@pytest.mark.integration
@pytest.mark.parametrize("ignored", ["max_completion_tokens", "max_tokens"])
def test_a_server_that_ignores_one_name_of_the_cap_keeps_to_the_other(tmp_path: Path, ignored: str) -> None:
    asked = replace(passage_request("tea"), parameters={CAP: 20})
    with stand_in(ignored_caps=ignored) as server:
        assert using(endpoint(server), tmp_path, lambda chat: chat.complete(asked)).completion_tokens == 20


@pytest.mark.integration
@pytest.mark.parametrize(("slots", "budget_usd"), [(1, 0.005), (8, 0.005), (32, 0.03), (400, 0.03), (400, 0.05)])
def test_a_budget_holds_although_the_endpoint_ignores_the_cap(tmp_path: Path, slots: int, budget_usd: float) -> None:
    asked = [replace(passage_request(f"query {number}"), parameters={CAP: 20}) for number in range(600)]

    async def until_it_ends(chat: client.ChatClient) -> list[Completion | BaseException]:
        return await asyncio.gather(*map(chat.complete, asked), return_exceptions=True)

    with stand_in(latency_s=0.05, ignored_caps="max_completion_tokens,max_tokens") as server:
        bounds = Limits(budget_usd=budget_usd)
        ended = using(endpoint(server), tmp_path, until_it_ends, bounds=bounds, in_flight=slots)
        spent = spent_usd(server)
    assert any("used up" in str(each) for each in ended)
    assert 0.5 * budget_usd < spent <= budget_usd


def test_a_careful_lane_allows_one_more_request_for_each_answer_until_429s_cut_it() -> None:
    lane = Lane(Endpoint(), 4, careful=True)
    for limit in (1, 2, 3, 4, 4):
        assert lane.limit == limit
        lane.note(None)
