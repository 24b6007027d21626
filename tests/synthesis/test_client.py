import asyncio
import email.utils
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest

from infembed_ray.config import Endpoint
from infembed_ray.synthesis import client
from infembed_ray.synthesis.chat import Completion, Request, RowFailure, RunFailure, Unjournaled, answer
from infembed_ray.synthesis.client import ChatClient, replaying
from infembed_ray.synthesis.journal import Journal
from tests.stand_in_llm import REQUEST_FAULTS, StandIn, stand_in
from tests.synthesis.exchanges import passage_request, request

T = TypeVar("T")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_S", 0.01)


def endpoint(server: StandIn | str, **settings: Any) -> Endpoint:
    url = server if isinstance(server, str) else server.url
    return Endpoint(**{"base_url": url, "api_key_env": None, "timeout_s": 20, **settings})


def using(where: Endpoint, journal: Path, use: Callable[[ChatClient], Awaitable[T]], in_flight: int = 32) -> T:
    async def within() -> T:
        chat = ChatClient(where, Journal(journal), in_flight)
        try:
            return await use(chat)
        finally:
            await chat.close()

    return asyncio.run(within())


async def ask_all(chat: ChatClient, requests: Sequence[Request]) -> list[Completion]:
    return await asyncio.gather(*(chat.complete(each) for each in requests))


QUERIES = [passage_request(f"query {number}") for number in range(60)]


def test_a_completion_says_what_was_answered_by_which_model_for_how_many_tokens(tmp_path: Path) -> None:
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
def test_passing_faults_are_retried_until_every_request_is_answered_once(
    tmp_path: Path, fault: dict[str, float]
) -> None:
    with stand_in(**fault) as server:
        where = endpoint(server, max_retries=20, timeout_s=0.5 if "hang" in fault else 20)
        got = using(where, tmp_path, lambda chat: ask_all(chat, QUERIES))
        log = server.log()
    assert all(f"query {number}:" in completion.text for number, completion in enumerate(got))
    assert Counter(entry["request"] for entry in log if entry["ended"] == "answered").most_common(1)[0][1] == 1
    assert len(log) > len(QUERIES)


def test_the_server_is_given_the_time_it_asks_for_and_others_use_the_slot_meanwhile(tmp_path: Path) -> None:
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
    assert client._retry_after_s(header) == seconds


@pytest.mark.parametrize(("ahead_s", "seconds"), [(3600, 3600), (-3600, 0)])
def test_retry_after_may_be_a_date(ahead_s: float, seconds: float) -> None:
    header = {"Retry-After": email.utils.formatdate(time.time() + ahead_s, usegmt=True)}
    assert client._retry_after_s(header) == pytest.approx(seconds, abs=30)


def test_a_fault_that_does_not_pass_fails_the_row_after_its_retries(tmp_path: Path) -> None:
    with stand_in(server_error=1.0) as server:
        with pytest.raises(RowFailure, match=r"HTTP 500: The server had an error\.; tried 4 times"):
            using(endpoint(server, max_retries=3), tmp_path, lambda chat: chat.complete(QUERIES[0]))
        assert len(server.log("server_error")) == 4


def test_a_bad_request_fails_the_row_at_once(tmp_path: Path) -> None:
    with stand_in(bad_request=1.0) as server:
        with pytest.raises(RowFailure, match="HTTP 400: This request is not acceptable"):
            using(endpoint(server), tmp_path, lambda chat: chat.complete(QUERIES[0]))
        assert len(server.log()) == 1


@pytest.mark.parametrize("fault", [name for name in REQUEST_FAULTS if name not in ("bad_request", "malformed")])
def test_a_useless_answer_is_paid_for_once_and_fails_its_row_every_time(tmp_path: Path, fault: str) -> None:
    with stand_in(**{fault: 1.0}) as server:
        for _ in range(2):
            got = using(endpoint(server), tmp_path, lambda chat: chat.complete(QUERIES[0]))
            with pytest.raises(RowFailure):
                answer(got)
        assert len(server.log()) == 1


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ({"key": "another"}, r"endpoint.api_key_env=STAND_IN_KEY: .* refuses its key \(HTTP 401: Incorrect API key"),
        ({"models": "large,huge"}, r"model small: not at endpoint.base_url=.*HTTP 404"),
        ({"quota": 10}, r"quota is used up \(HTTP 429"),
    ],
    ids=["key", "model", "quota"],
)
def test_what_no_row_can_survive_ends_the_run_and_nothing_more_is_sent(
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
        with pytest.raises(RunFailure, match="STAND_IN_KEY: not set on"):
            using(keyed, tmp_path, lambda chat: chat.complete(QUERIES[1]))
        assert len(server.log()) == 1


def test_an_endpoint_that_was_never_reached_ends_the_run(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(RunFailure, match=rf"endpoint.base_url={url}: cannot be reached"):
        using(endpoint(url, max_retries=2), tmp_path, lambda chat: chat.complete(QUERIES[0]))


def test_requests_in_flight_are_bounded(tmp_path: Path) -> None:
    with stand_in(latency_s=0.05) as server:
        using(endpoint(server), tmp_path, lambda chat: ask_all(chat, QUERIES), in_flight=7)
        assert max(entry["in_flight"] for entry in server.log()) == 7


def test_nothing_is_asked_twice(tmp_path: Path) -> None:
    async def twins(chat: ChatClient) -> list[Completion]:
        return await ask_all(chat, QUERIES[:5] * 2)

    with stand_in(latency_s=0.05) as server:
        first = using(endpoint(server), tmp_path, twins)
        again = using(endpoint(server), tmp_path, twins)
        assert len(server.log()) == 5
    assert [each.replayed for each in first] == [False] * 5 + [True] * 5
    assert all(each.replayed for each in again)
    assert [each.text for each in first] == [each.text for each in again]


def test_replaying_sends_nothing(tmp_path: Path) -> None:
    with stand_in() as server:
        using(endpoint(server), tmp_path, lambda chat: chat.complete(QUERIES[0]))
        complete = replaying(Journal(tmp_path))
        assert asyncio.run(complete(QUERIES[0])).replayed  # type: ignore[arg-type]
        with pytest.raises(Unjournaled, match="small"):
            asyncio.run(complete(request("new")))  # type: ignore[arg-type]
        assert len(server.log()) == 1
