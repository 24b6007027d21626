from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from infembed_ray.serving import redundancy
from infembed_ray.serving.engine import DeadlineExceeded
from infembed_ray.serving.redundancy import HEDGED_SHARE, REMEMBERED, Redundancy


class Lost(Exception):
    pass


def is_lost(error: BaseException) -> bool:
    return isinstance(error, Lost)


def test_a_call_is_made_again_until_a_replica_answers() -> None:
    async def scenario() -> None:
        made = []

        async def call() -> str:
            made.append(1)
            if len(made) < 4:
                raise Lost
            return "answer"

        assert await Redundancy(is_lost)(call, timeout_s=30) == "answer"
        assert len(made) == 4

    asyncio.run(scenario())


def test_any_other_error_is_the_answer() -> None:
    async def scenario() -> None:
        made = []

        async def call() -> None:
            made.append(1)
            raise ValueError("bad vector")

        with pytest.raises(ValueError, match="bad vector"):
            await Redundancy(is_lost)(call, timeout_s=30)
        assert len(made) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(("replica_is_there", "error"), [(True, DeadlineExceeded), (False, Lost)])
def test_at_the_deadline_it_ends_with_what_kept_it(replica_is_there: bool, error: type[Exception]) -> None:
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
            await Redundancy(is_lost)(call, timeout_s=0.1)
        await asyncio.sleep(0)
        assert cancelled == [1] * replica_is_there

    asyncio.run(scenario())


async def used_to(redundancy: Redundancy, calls: int = REMEMBERED) -> None:
    """Make quick calls, so that it knows what is slow."""

    async def quick() -> None:
        pass

    for _ in range(calls):
        await redundancy(quick, timeout_s=30)


def slow_then_quick() -> tuple[list[int], Callable]:
    made: list[int] = []

    async def call() -> int:
        made.append(len(made))
        attempt = made[-1]
        if attempt == 0:
            await asyncio.sleep(60)
        return attempt

    return made, call


def test_a_slow_call_is_made_a_second_time_and_the_first_answer_taken() -> None:
    async def scenario() -> None:
        hedged = Redundancy(is_lost, hedged=True)
        await used_to(hedged)
        made, call = slow_then_quick()
        assert await hedged(call, timeout_s=30) == 1
        assert made == [0, 1]

    asyncio.run(scenario())


def test_only_a_share_of_the_calls_is_made_twice() -> None:
    async def scenario() -> None:
        hedged = Redundancy(is_lost, hedged=True)
        await used_to(hedged)
        made: list[int] = []

        async def slow() -> None:
            made.append(1)
            await asyncio.sleep(0.05)

        for _ in range(30):
            await hedged(slow, timeout_s=30)
        assert len(made) <= 30 + HEDGED_SHARE * (REMEMBERED + 30)

    asyncio.run(scenario())


def test_a_call_that_changes_something_is_made_once() -> None:
    async def scenario() -> None:
        once = Redundancy(is_lost)
        await used_to(once)
        made, call = slow_then_quick()
        with pytest.raises(DeadlineExceeded):
            await once(call, timeout_s=0.1)
        assert made == [0]

    asyncio.run(scenario())


def test_when_nobody_has_been_there_for_a_while_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redundancy, "LOSS_PATIENCE_S", 0.05)

    async def scenario() -> None:
        made: list[int] = []
        there = False

        async def call() -> str:
            made.append(1)
            if not there:
                raise Lost
            return "answer"

        calls = Redundancy(is_lost)
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
        assert len(made) > 1  # there is hope again

    asyncio.run(scenario())


def test_a_call_that_is_slow_beyond_doubt_is_made_again_even_among_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redundancy, "SLOW_S", 0.05)

    async def scenario() -> None:
        made, call = slow_then_quick()
        assert await Redundancy(is_lost, hedged=True)(call, timeout_s=30) == 1
        assert made == [0, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize("raised", [True, False])
def test_a_refusal_is_not_taken_while_another_call_may_be_answered(raised: bool) -> None:
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

        hedged = Redundancy(is_lost, hedged=True, refused=lambda answer: answer == "refused")
        await used_to(hedged)
        answer = await hedged(call, timeout_s=30)
        assert len(made) == 2
        return answer

    assert asyncio.run(scenario("answer")) == "answer"
    assert asyncio.run(scenario("refused")) == "refused"  # both of them, then
