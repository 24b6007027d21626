from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from infembed_ray.serving.encoder.batching import DeadlineExceeded
from infembed_ray.serving.routing import hedging
from infembed_ray.serving.routing.hedging import HEDGE_BUDGET, LATENCY_SAMPLES, HedgedCalls


class Lost(Exception):
    pass


def is_lost(error: BaseException) -> bool:
    return isinstance(error, Lost)


def test_a_call_is_repeated_until_a_replica_answers() -> None:
    async def scenario() -> None:
        made = []

        async def call() -> str:
            made.append(1)
            if len(made) < 4:
                raise Lost
            return "answer"

        assert await HedgedCalls(is_lost)(call, timeout_s=30) == "answer"
        assert len(made) == 4

    asyncio.run(scenario())


def test_any_other_error_is_raised_at_once() -> None:
    async def scenario() -> None:
        made = []

        async def call() -> None:
            made.append(1)
            raise ValueError("bad vector")

        with pytest.raises(ValueError, match="bad vector"):
            await HedgedCalls(is_lost)(call, timeout_s=30)
        assert len(made) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(("replica_is_there", "error"), [(True, DeadlineExceeded), (False, Lost)])
def test_the_error_at_the_deadline_tells_a_lost_replica_from_a_slow_one(
    replica_is_there: bool, error: type[Exception]
) -> None:
    async def scenario() -> None:
        cancelled = []

        async def call() -> None:
            if not replica_is_there:
                raise Lost
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(1)
                raise

        with pytest.raises(error):
            await HedgedCalls(is_lost)(call, timeout_s=0.1)
        await asyncio.sleep(0)
        assert cancelled == [1] * replica_is_there

    asyncio.run(scenario())


async def warm_up(hedged: HedgedCalls, calls: int = LATENCY_SAMPLES) -> None:
    """Make quick calls for the latency estimate."""

    async def quick() -> None:
        pass

    for _ in range(calls):
        await hedged(quick, timeout_s=30)


def slow_then_quick() -> tuple[list[int], Callable]:
    made: list[int] = []

    async def call() -> int:
        made.append(len(made))
        attempt = made[-1]
        if attempt == 0:
            await asyncio.sleep(60)
        return attempt

    return made, call


def test_a_slow_call_is_hedged_and_the_first_answer_returned() -> None:
    async def scenario() -> None:
        hedged = HedgedCalls(is_lost, hedged=True)
        await warm_up(hedged)
        made, call = slow_then_quick()
        assert await hedged(call, timeout_s=30) == 1
        assert made == [0, 1]

    asyncio.run(scenario())


def test_the_share_of_hedged_calls_is_bounded() -> None:
    async def scenario() -> None:
        hedged = HedgedCalls(is_lost, hedged=True)
        await warm_up(hedged)
        made: list[int] = []

        async def slow() -> None:
            made.append(1)
            await asyncio.sleep(0.05)

        for _ in range(30):
            await hedged(slow, timeout_s=30)
        assert len(made) <= 30 + HEDGE_BUDGET * (LATENCY_SAMPLES + 30)

    asyncio.run(scenario())


def test_without_hedging_a_slow_call_is_made_once() -> None:
    async def scenario() -> None:
        once = HedgedCalls(is_lost)
        await warm_up(once)
        made, call = slow_then_quick()
        with pytest.raises(DeadlineExceeded):
            await once(call, timeout_s=0.1)
        assert made == [0]

    asyncio.run(scenario())


def test_after_a_while_without_replicas_calls_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedging, "LOSS_PATIENCE_S", 0.05)

    async def scenario() -> None:
        made: list[int] = []
        there = False

        async def call() -> str:
            made.append(1)
            if not there:
                raise Lost
            return "answer"

        calls = HedgedCalls(is_lost)
        with pytest.raises(Lost):  # long before the deadline
            await asyncio.wait_for(calls(call, timeout_s=60), 10)
        assert len(made) > 1
        made.clear()
        with pytest.raises(Lost):
            await calls(call, timeout_s=60)
        assert made == [1]
        there = True
        assert await calls(call, timeout_s=60) == "answer"
        there = False
        made.clear()
        with pytest.raises(Lost):
            await calls(call, timeout_s=60)
        assert len(made) > 1  # it retries again

    asyncio.run(scenario())


def test_a_very_slow_call_is_hedged_before_the_first_latency_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedging, "INITIAL_SLOW_S", 0.05)

    async def scenario() -> None:
        made, call = slow_then_quick()
        assert await HedgedCalls(is_lost, hedged=True)(call, timeout_s=30) == 1
        assert made == [0, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize("raised", [True, False])
def test_a_rejection_is_only_returned_after_the_other_call_has_ended(raised: bool) -> None:
    async def scenario(first: str) -> object:
        made = []

        async def call() -> str:
            made.append(1)
            if len(made) == 1:
                await asyncio.sleep(0.2)
                return first
            if raised:
                raise OSError("refused")
            return "refused"

        hedged = HedgedCalls(is_lost, hedged=True, rejected=lambda answer: answer == "refused")
        await warm_up(hedged)
        answer = await hedged(call, timeout_s=30)
        assert len(made) == 2
        return answer

    assert asyncio.run(scenario("answer")) == "answer"
    assert asyncio.run(scenario("refused")) == "refused"
