import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from infembed_ray.llm import client
from infembed_ray.llm.gates import ADAPT_S, Gate
from infembed_ray.llm.rate_limits import REQUESTS, TOKENS
from tests.llm.test_client import ask_all, endpoint, using
from tests.support.chat import passage_request
from tests.support.stand_in_llm import stand_in

COST = {REQUESTS: 1.0, TOKENS: 100.0}


class Gated:
    """A gate whose clock and pauses a test controls."""

    def __init__(self, slots: int) -> None:
        self.now = 0.0
        self.paused: list[float] = []
        self.reports = 0
        self.gate = Gate(slots, self.pause, self.report, lambda: self.now)

    async def pause(self, seconds: float) -> None:
        self.paused.append(seconds)

    def report(self) -> None:
        self.reports += 1

    def answer(self, answered: int, limited: int) -> None:
        """Let requests end one after another; all arrive within a second."""
        self.now += ADAPT_S
        ends = [False] * answered + [True] * limited
        random.Random(0).shuffle(ends)
        for end in ends:
            assert self.gate.take(COST)
            self.gate.leave(limited=end)


def test_many_429s_cut_the_requests_in_flight_and_few_let_them_grow_back() -> None:
    gated, allowed = Gated(100), []
    for limited in [50] * 8 + [5] * 60:
        gated.answer(100, limited)
        allowed.append(gated.gate.limit)
    assert allowed[7] < 10
    assert allowed[:8] == sorted(allowed[:8], reverse=True)
    assert allowed[-1] == 100


def test_rare_429s_do_not_reduce_the_requests_in_flight_even_with_slow_answers() -> None:
    gated, rng, allowed = Gated(100), random.Random(0), []
    for _ in range(600):
        limited = sum(rng.random() < 0.05 for _ in range(10))
        gated.answer(10 - limited, limited)
        allowed.append(gated.gate.limit)
    assert sum(allowed) / len(allowed) > 90


def test_429s_that_arrive_before_the_first_answers_do_not_reduce_the_requests_in_flight() -> None:
    gated = Gated(256)
    for _ in range(256):
        assert gated.gate.take(COST)
    gated.now += ADAPT_S
    for _ in range(18):
        gated.gate.leave(limited=True)
    assert gated.gate.limit == 256


def test_requests_beyond_the_quota_wait_for_an_answer_with_a_new_one() -> None:
    async def run() -> None:
        gated = Gated(16)
        gated.gate.read({"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "2"})
        assert [gated.gate.take(COST) for _ in range(3)] == [True, True, False]
        waiting = asyncio.create_task(gated.gate.wait(COST))
        await asyncio.sleep(0)
        assert gated.gate.read_at <= gated.now
        gated.gate.leave(limited=False)
        await asyncio.sleep(0)
        assert not waiting.done()
        gated.gate.read({"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "30"})
        gated.gate.leave(limited=False)
        await asyncio.wait_for(waiting, 30)
        assert not gated.paused
        assert not gated.reports

    asyncio.run(run())


def test_with_nothing_in_flight_a_used_up_quota_is_waited_for() -> None:
    async def run() -> None:
        gated = Gated(16)
        headers = {"limit": "1000", "remaining": "0", "reset": "20s"}
        gated.gate.read({f"x-ratelimit-{part}-tokens": value for part, value in headers.items()})
        assert not gated.gate.take(COST)

        async def ask() -> None:
            await gated.gate.wait(COST)
            assert gated.gate.in_flight == 1
            gated.gate.leave(limited=False)

        await asyncio.wait_for(asyncio.gather(*(ask() for _ in range(5))), 30)
        assert gated.paused[0] == pytest.approx(20 * 100 / 1000)
        assert len(gated.paused) == gated.reports == 5

    asyncio.run(run())


def test_a_request_larger_than_the_quota_is_sent_when_all_of_it_is_there() -> None:
    gated = Gated(16)
    gated.gate.read({"x-ratelimit-limit-tokens": "50", "x-ratelimit-remaining-tokens": "50"})
    assert gated.gate.take(COST)
    assert not gated.gate.take(COST)


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
    assert ended["judge", "rate_limited"] <= 24  # it would be 16 at once, again and again
    last = {model: max(entry["time"] for entry in log if entry["model"] == model) for model in ("small", "judge")}
    assert last["judge"] - last["small"] > 1.0  # 24 take at least 2.5 s
