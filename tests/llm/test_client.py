import asyncio
import re
import socket
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
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
        with pytest.raises(RowFailure, match=r"HTTP 500: The server had an error\. \[http.*\]; tried 4 times"):
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
    said = r"HTTP 429: Rate limit reached\. \[http.*\]; .*tried \d+ times"
    with stand_in(rate_limited=1.0, retry_after_s=0.05) as server, pytest.raises(RowFailure, match=said):
        using(endpoint(server, patience_s=0.3), tmp_path, lambda chat: chat.complete(QUERIES[0]))


SAID = {
    "quota": r"the quota is used up \(HTTP 429",
    "quota_type": r"the quota is used up \(HTTP 429",
    "payment": r"the quota is used up \(HTTP 402",
    "key_limit": r"refuses its key \(HTTP 403: Key limit exceeded \(monthly\) \[http.*\]\); .* raise the key's limit",
    "key": r"refuses its key \(HTTP 401: Incorrect",
    "credit": r"refuses every request to small, also a short question \(HTTP 400: Your credit",
    "model": r"model small: not at endpoint.base_url=.*HTTP 404",
    "server": r"no answer to small in \d+ s \(HTTP 500.*\); mend it, or raise endpoint.patience_s",
    "limited": r"no answer to small in \d+ s \(HTTP 429.*\); mend it, or raise endpoint.patience_s",
    "limited_long": r"asks to wait 36000 s \(HTTP 429: Try again tomorrow..*\); raise endpoint.patience_s",
    "hang": r"no answer to small in \d+ s \(no answer within 0.5 s \[http.*\]\); mend it, or raise endpoint.patience_s",
    "page": r"no answer to small in \d+ s \(HTTP 200: Sign in \[http.*\]: the response is no chat completion",
    "moved": r"HTTP 301: moved \[http.*\] redirects to https://new.example/v1; set endpoint.base_url",
}
WHERE: Any = SimpleNamespace(host="here", port=443, ssl=True, is_ssl=True)
LOST = {
    "refused": aiohttp.ClientConnectorError(WHERE, ConnectionRefusedError(111, "Connect call failed")),
    "dns": aiohttp.ClientConnectorDNSError(WHERE, OSError(-2, "Name or service not known")),
    "tls": aiohttp.ClientConnectorCertificateError(WHERE, ssl.SSLCertVerificationError("certificate has expired")),
    "reset": ConnectionResetError(104, "Connection reset by peer"),
    "closed": aiohttp.ServerDisconnectedError(),
    "proxy": aiohttp.ClientProxyConnectionError(WHERE, OSError(111, "Connect call failed")),
    "encoding": aiohttp.ClientPayloadError("Can not decode content-encoding: gzip"),
}
"""Failures without a response."""


@pytest.mark.parametrize(("breaks", "left"), [*((each, 40) for each in [*BREAKS, *LOST]), ("quota", 1), ("server", 1)])
def test_an_endpoint_that_breaks_stops_the_run_and_no_request_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str, left: int
) -> None:
    posted, post = count(), client.Transport.post

    async def lose(transport: client.Transport, *given: Any) -> Any:
        if breaks in LOST and next(posted) >= 60 - left:
            raise LOST[breaks]
        return await post(transport, *given)

    monkeypatch.setattr(client.Transport, "post", lose)

    async def until_it_fails(chat: ChatClient) -> None:
        ended = await asyncio.gather(*map(chat.complete, QUERIES[:-left]), return_exceptions=True)
        ended += await asyncio.gather(*map(chat.complete, QUERIES[-left:]), return_exceptions=True)
        failed = [each for each in ended if not isinstance(each, Completion)]
        assert failed
        for each in failed:
            assert isinstance(each, RunFailure)
            lost = r"no answer to small in \d+ s \((connection failed|unreadable response): .+ \[http://127.*\]\)"
            assert re.search(SAID.get(breaks, lost), str(each))
            assert "\n" not in str(each)

    with stand_in(breaks_after=0 if breaks in LOST else 60 - left, breaks=breaks) as server:
        where = endpoint(server, timeout_s=0.5, patience_s=1.5)
        using(where, tmp_path, until_it_fails, in_flight=8)
        answered = len(server.log("answered"))
        assert len(server.log("broken")) <= 8 or breaks not in ("quota", "quota_type", "payment", "model", "key")
    monkeypatch.setattr(client.Transport, "post", post)
    with stand_in() as back:
        got = using(endpoint(back), tmp_path, lambda chat: ask_all(chat, QUERIES))
        assert len(back.log("answered")) == 60 - answered
    assert sum(each.replayed for each in got) == answered


def test_an_outage_within_the_patience_is_survived_whatever_the_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer says neither its end nor its tokens."""
    warnings: list[str] = []
    monkeypatch.setattr(RateLimiter, "warn", lambda limiter, warning: warnings.append(warning))
    statuses, body = iter([503] * 9), {"choices": [{"message": {"content": "yes"}}]}

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body, status=next(statuses, 200))

    async def ask() -> Completion:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        async with TestServer(application) as server:
            where = endpoint(str(server.make_url("/v1")), patience_s=600, max_retries=1)
            return await within(where, tmp_path, lambda chat: chat.complete(QUERIES[0]))

    assert asyncio.run(ask()).text == "yes"
    assert ["finish_reason" in each or "null" in each for each in warnings] == [True, True]


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
