import asyncio
import re
import socket
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from infembed_ray.config.llm import Endpoint, Limits
from infembed_ray.llm import client
from infembed_ray.llm.chat import Completion, Request, RowFailure, RunFailure, usable_text
from infembed_ray.llm.client import ChatClient
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.ledger import Grant, LeaseReport, Ledger, RateLimiter
from infembed_ray.llm.prices import PriceTable
from tests.support.chat import passage_request, unreadable
from tests.support.stand_in_answers import BREAKS
from tests.support.stand_in_llm import REQUEST_FAULTS, StandIn, stand_in

pytestmark = pytest.mark.integration

T = TypeVar("T")

TABLE = PriceTable("2026-01-01", {"small": (1.0, 2.0)})


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_S", 0.01)


def endpoint(server: StandIn | str, **settings: Any) -> Endpoint:
    url = server if isinstance(server, str) else server.url
    return Endpoint(**{"base_url": url, "api_key_env": None, "timeout_s": 20, **settings})


async def within(
    where: Endpoint,
    journal: Path,
    use: Callable[[ChatClient], Awaitable[T]],
    in_flight: int = 32,
    bounds: Limits = Limits(),  # noqa: B008  frozen
) -> T:
    ledger = Ledger(bounds)

    async def exchange(report: LeaseReport) -> Grant:
        return ledger.exchange(report)

    limiter = RateLimiter(bounds, in_flight, exchange, interval_s=0.02)
    chat = ChatClient(where, Journal(journal), limiter, TABLE)
    try:
        return await use(chat)
    finally:
        await chat.close()


def using(where: Endpoint, journal: Path, use: Callable[[ChatClient], Awaitable[T]], **how: Any) -> T:
    return asyncio.run(within(where, journal, use, **how))


async def ask_all(chat: ChatClient, requests: Sequence[Request]) -> list[Completion]:
    return await asyncio.gather(*(chat.complete(each) for each in requests))


QUERIES = [passage_request(f"query {number}") for number in range(60)]


def test_a_completion_has_text_model_finish_reason_and_token_counts(tmp_path: Path) -> None:
    with stand_in() as server:
        got = using(endpoint(server), tmp_path, lambda chat: chat.complete(passage_request("tea")))
    assert got.text.startswith("Passage: On tea:")
    assert (got.model, got.finish_reason, got.refusal, got.replayed) == ("small-2026-01-01", "stop", None, False)
    assert got.completion_tokens == len(got.text.split())
    assert got.prompt_tokens > 0


@pytest.mark.parametrize(
    "fault",
    [
        {"rate_limited": 0.4, "retry_after_s": 0.01},
        {"server_error": 0.4},
        {"dropped": 0.4},
        {"truncated": 0.4},
        {"hang": 0.2},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_transient_faults_are_retried_until_every_request_is_answered_once(
    tmp_path: Path, fault: dict[str, float]
) -> None:
    with stand_in(**fault) as server:
        retries = 0 if "rate_limited" in fault else 20  # a 429 uses up none
        where = endpoint(server, max_retries=retries, timeout_s=1.5 if "hang" in fault else 20)
        got = using(where, tmp_path, lambda chat: ask_all(chat, QUERIES))
        log = server.log()
    assert all(f"query {number}:" in completion.text for number, completion in enumerate(got))
    assert Counter(entry["request"] for entry in log if entry["ended"] == "answered").most_common(1)[0][1] == 1
    assert len(log) > len(QUERIES)


def test_the_time_in_a_queue_is_no_part_of_the_patience_with_429s(tmp_path: Path) -> None:
    where = {"rate_limited": 0.5, "retry_after_s": 0.01, "latency_s": 0.05}
    with stand_in(**where) as server:
        got = using(endpoint(server, patience_s=1.0), tmp_path, lambda chat: ask_all(chat, QUERIES), in_flight=1)
        assert server.log()[-1]["time"] - server.log()[0]["time"] > 2.0
    assert len(got) == len(QUERIES)


def test_retry_after_is_respected_and_other_requests_use_the_slot_meanwhile(tmp_path: Path) -> None:
    with stand_in(rate_limited=0.5, retry_after_s=0.3) as server:
        using(endpoint(server, max_retries=30), tmp_path, lambda chat: ask_all(chat, QUERIES[:12]), in_flight=1)
        log = server.log()
    assert max(entry["in_flight"] for entry in log) == 1
    attempts = defaultdict(list)
    for entry in log:
        attempts[entry["request"]].append(entry)
    waits = [(a, b) for tries in attempts.values() for a, b in pairwise(tries)]
    assert waits
    assert all(later["arrived"] - earlier["time"] >= 0.3 for earlier, later in waits)
    first, retry = waits[0]
    assert log.index(retry) - log.index(first) > 1


def test_a_permanent_fault_fails_the_row_after_its_retries(tmp_path: Path) -> None:
    with stand_in(server_error=1.0) as server:
        with pytest.raises(RowFailure, match=r"HTTP 500: The server had an error\.; tried 4 times"):
            using(endpoint(server, max_retries=3), tmp_path, lambda chat: chat.complete(QUERIES[0]))
        assert len(server.log("server_error")) == 4


def test_a_bad_request_fails_the_row_at_once(tmp_path: Path) -> None:
    with stand_in(bad_request=1.0) as server:
        with pytest.raises(RowFailure, match="HTTP 400: This request is not acceptable"):
            using(endpoint(server), tmp_path, lambda chat: chat.complete(QUERIES[0]))
        assert [entry["ended"] for entry in server.log()] == ["bad_request", "probed"]


@pytest.mark.parametrize("fault", [name for name in REQUEST_FAULTS if name not in ("bad_request", "malformed")])
def test_a_useless_answer_is_paid_once_and_fails_its_row_every_time(tmp_path: Path, fault: str) -> None:
    with stand_in(**{fault: 1.0}) as server:
        for _ in range(2):
            got = using(endpoint(server), tmp_path, lambda chat: chat.complete(QUERIES[0]))
            with pytest.raises(RowFailure):
                usable_text(got)
        assert len(server.log()) == 1


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ({"key": "another"}, r"endpoint.api_key_env=STAND_IN_KEY: .* refuses its key \(HTTP 401: Incorrect API key"),
        ({"models": "large,huge"}, r"model small: not at endpoint.base_url=.*HTTP 404"),
        ({"breaks_after": 10}, r"quota is used up \(HTTP 429"),
    ],
    ids=["key", "model", "quota"],
)
def test_a_refused_key_model_or_quota_ends_the_run_and_nothing_more_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("STAND_IN_KEY", "mine")

    async def until_it_fails(chat: ChatClient) -> None:
        with pytest.raises(RunFailure, match=said):
            await ask_all(chat, QUERIES)
        with pytest.raises(RunFailure, match=said):
            await chat.complete(passage_request("one more"))

    with stand_in(latency_s=0.02, **behaviour) as server:
        using(endpoint(server, api_key_env="STAND_IN_KEY"), tmp_path, until_it_fails, in_flight=4)
        refused = [entry for entry in server.log() if entry["ended"] != "answered"]
    assert 1 <= len(refused) <= 4


def test_the_key_comes_from_the_environment_and_is_sent_as_a_bearer_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_KEY", "mine\n")  # as a file read by a shell may leave it
    with stand_in(key="mine") as server:
        where = endpoint(server, api_key_env="STAND_IN_KEY")
        using(where, tmp_path, lambda chat: chat.complete(QUERIES[0]))
        assert len(server.log("answered")) == 1


def test_a_missing_key_is_noticed_only_when_something_must_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STAND_IN_KEY", raising=False)
    with stand_in() as server:
        using(endpoint(server), tmp_path, lambda chat: chat.complete(QUERIES[0]))
        keyed = endpoint(server, api_key_env="STAND_IN_KEY")
        assert using(keyed, tmp_path, lambda chat: chat.complete(QUERIES[0])).replayed
        with pytest.raises(
            RunFailure, match=r"STAND_IN_KEY: not set on .* needs no key, set endpoint.api_key_env=null"
        ):
            using(keyed, tmp_path, lambda chat: chat.complete(QUERIES[1]))
        assert len(server.log()) == 1


def test_an_endpoint_that_was_never_reached_ends_the_run(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(RunFailure, match=rf"endpoint.base_url={url}: cannot be reached"):
        using(endpoint(url, max_retries=2), tmp_path, lambda chat: chat.complete(QUERIES[0]))


def test_a_request_that_only_gets_429s_fails_after_its_patience(tmp_path: Path) -> None:
    said = r"HTTP 429: Rate limit reached\.; .*tried \d+ times"
    with stand_in(rate_limited=1.0, retry_after_s=0.05) as server, pytest.raises(RowFailure, match=said):
        using(endpoint(server, patience_s=0.3), tmp_path, lambda chat: chat.complete(QUERIES[0]))


SAID = {
    "quota": r"the quota is used up \(HTTP 429",
    "quota_type": r"the quota is used up \(HTTP 429",
    "payment": r"the quota is used up \(HTTP 402",
    "key_limit": r"refuses its key \(HTTP 403: Key limit exceeded \(monthly\)\); .* raise the key's limit",
    "credit": r"refuses every request to small, also a short question \(HTTP 400: Your credit",
    "model": r"model small: not at endpoint.base_url=.*HTTP 404",
    "server": r"no answer to small in \d+ s \(HTTP 500.*\); mend it, or raise endpoint.patience_s",
    "limited": r"no answer to small in \d+ s \(HTTP 429.*\); mend it, or raise endpoint.patience_s",
    "limited_long": r"asks to wait 36000 s \(HTTP 429: Try again tomorrow.\); raise endpoint.patience_s",
    "hang": r"no answer to small in \d+ s \(no answer within 0.5 s\); mend it, or raise endpoint.patience_s",
}


@pytest.mark.parametrize(("breaks", "left"), [*((each, 40) for each in BREAKS), ("quota", 1), ("server", 1)])
def test_an_endpoint_that_breaks_stops_the_run_and_no_request_fails(tmp_path: Path, breaks: str, left: int) -> None:
    async def until_it_fails(chat: ChatClient) -> None:
        ended = await asyncio.gather(*map(chat.complete, QUERIES[:-left]), return_exceptions=True)
        ended += await asyncio.gather(*map(chat.complete, QUERIES[-left:]), return_exceptions=True)
        failed = [each for each in ended if not isinstance(each, Completion)]
        assert failed
        for each in failed:
            assert isinstance(each, RunFailure)
            assert re.search(SAID[breaks], str(each))
            assert "\n" not in str(each)

    with stand_in(breaks_after=60 - left, breaks=breaks) as server:
        where = endpoint(server, timeout_s=0.5, patience_s=1.5)
        using(where, tmp_path, until_it_fails, in_flight=8)
        answered = len(server.log("answered"))
    with stand_in() as back:
        got = using(endpoint(back), tmp_path, lambda chat: ask_all(chat, QUERIES))
        assert len(back.log("answered")) == 60 - answered
    assert sum(each.replayed for each in got) == answered


def test_an_outage_within_the_patience_is_survived_whatever_the_retries(tmp_path: Path) -> None:
    statuses = iter([503] * 9)

    async def answer(_: web.Request) -> web.Response:
        body = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}
        return web.json_response(body, status=next(statuses, 200))

    async def ask() -> Completion:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        async with TestServer(application) as server:
            where = endpoint(str(server.make_url("/v1")), patience_s=600, max_retries=1)
            return await within(where, tmp_path, lambda chat: chat.complete(QUERIES[0]))

    assert asyncio.run(ask()).text == "yes"


# ---------------------------------------------------------------------------------------------------- the limits


def spent_usd(server: StandIn) -> float:
    """Return the server's own count, including answers that never arrived."""
    return sum(e.get("prompt_tokens", 0) * 1e-6 + e.get("completion_tokens", 0) * 2e-6 for e in server.log())


def test_the_budget_includes_answers_that_never_arrive(tmp_path: Path) -> None:
    queries = [passage_request(f"query {number}") for number in range(400)]

    async def until_it_ends(chat: ChatClient) -> int:
        ended = await asyncio.gather(*(chat.complete(each) for each in queries), return_exceptions=True)
        failures = {str(each) for each in ended if isinstance(each, RunFailure)}
        assert len(failures) == 1
        assert "limits.budget_usd=0.02: used up" in failures.pop()
        return sum(isinstance(each, Completion) for each in ended)

    with stand_in(latency_s=0.02, truncated=0.1, rate_limited=0.2, retry_after_s=0.01) as server:
        answered = using(endpoint(server), tmp_path, until_it_ends, bounds=Limits(budget_usd=0.02))
        assert spent_usd(server) <= 0.02
        assert answered == len(server.log("answered")) == len(Journal(tmp_path))
    assert answered > 20


def test_no_request_is_sent_twice(tmp_path: Path) -> None:
    async def twins(chat: ChatClient) -> list[Completion]:
        return await ask_all(chat, QUERIES[:5] * 2)

    with stand_in(latency_s=0.05) as server:
        first = using(endpoint(server), tmp_path, twins)
        again = using(endpoint(server), tmp_path, twins)
        assert len(server.log()) == 5
    assert [each.replayed for each in first] == [False] * 5 + [True] * 5
    assert all(each.replayed for each in again)
    assert [each.text for each in first] == [each.text for each in again]


def test_a_journal_that_cannot_be_read_ends_the_run_and_nothing_more_is_sent(tmp_path: Path) -> None:
    async def read_fault(chat: ChatClient) -> None:
        unreadable(*tmp_path.glob("*.jsonl"))
        for each in QUERIES[:2]:  # only the first is in the journal
            with pytest.raises(RunFailure, match="cannot be read"):
                await chat.complete(each)

    with stand_in() as server:
        using(endpoint(server), tmp_path, lambda chat: chat.complete(QUERIES[0]))
        using(endpoint(server), tmp_path, read_fault)
        assert len(server.log()) == 1
