import asyncio
from collections.abc import Callable

import pytest

from infembed_ray.serving.encoder.batching import DeadlineExceeded
from infembed_ray.serving.routing import retries
from infembed_ray.serving.routing.retries import MAX_SECOND_CALLS, SECOND_CALLS, RetriedCalls
from infembed_ray.serving.service import ReplicaLost


async def test_a_call_is_repeated_until_a_replica_answers() -> None:
    made = []

    async def call() -> str:
        made.append(1)
        if len(made) < 4:
            raise ReplicaLost
        return "answer"

    assert await RetriedCalls()(call, timeout_s=30) == "answer"
    assert len(made) == 4


async def test_any_other_error_is_raised_at_once() -> None:
    made = []

    async def call() -> None:
        made.append(1)
        raise ValueError("bad vector")

    with pytest.raises(ValueError, match="bad vector"):
        await RetriedCalls()(call, timeout_s=30)
    assert len(made) == 1


@pytest.mark.parametrize(("replica_is_there", "error"), [(True, DeadlineExceeded), (False, ReplicaLost)])
async def test_the_error_at_the_deadline_tells_a_lost_replica_from_a_slow_one(
    replica_is_there: bool, error: type[Exception]
) -> None:
    cancelled = []

    async def call() -> None:
        if not replica_is_there:
            raise ReplicaLost
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    with pytest.raises(error):
        await RetriedCalls()(call, timeout_s=0.1)
    await asyncio.sleep(0)
    assert cancelled == [1] * replica_is_there


def silent_then_quick() -> tuple[list[int], Callable]:
    made: list[int] = []

    async def call() -> int:
        made.append(len(made))
        attempt = made[-1]
        if attempt == 0:
            await asyncio.sleep(60)
        return attempt

    return made, call


async def test_a_silent_call_is_made_again_where_there_are_several_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "SILENCE_S", 0.02)
    made, call = silent_then_quick()
    assert await RetriedCalls(replicas=2)(call, timeout_s=30) == 1
    assert made == [0, 1]
    made, call = silent_then_quick()
    with pytest.raises(DeadlineExceeded):
        await RetriedCalls()(call, timeout_s=0.1)
    assert made == [0]


async def test_the_share_of_second_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "SILENCE_S", 0.0)
    made: list[int] = []

    async def slow() -> None:
        made.append(1)
        await asyncio.sleep(0.01)

    calls = RetriedCalls(replicas=2)
    for _ in range(60):
        await calls(slow, timeout_s=30)
    assert 60 < len(made) <= 60 + MAX_SECOND_CALLS + SECOND_CALLS * 60


async def test_after_a_while_without_replicas_calls_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "LOSS_PATIENCE_S", 0.05)
    made: list[int] = []
    there = False

    async def call() -> str:
        made.append(1)
        if not there:
            raise ReplicaLost
        return "answer"

    calls = RetriedCalls()
    with pytest.raises(ReplicaLost):  # long before the deadline
        await asyncio.wait_for(calls(call, timeout_s=60), 10)
    assert len(made) > 1
    made.clear()
    with pytest.raises(ReplicaLost):
        await calls(call, timeout_s=60)
    assert made == [1]
    there = True
    assert await calls(call, timeout_s=60) == "answer"
    there = False
    made.clear()
    with pytest.raises(ReplicaLost):
        await calls(call, timeout_s=60)
    assert len(made) > 1  # it retries again
