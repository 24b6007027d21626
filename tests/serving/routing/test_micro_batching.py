import asyncio
from collections.abc import Sequence
from contextvars import ContextVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.serving.encoder.batching import QueueFull
from infembed_ray.serving.routing.micro_batching import MAX_WAIT_S, MicroBatcher


class Sender:
    """Answers `item * 10`, negative items with an error; records the batches and waits for `go`."""

    def __init__(self, held: bool = False) -> None:
        self.sent: list[list[int]] = []
        self.cancelled: list[list[int]] = []
        self.under_way = self.most_under_way = 0
        self.go = asyncio.Event()
        if not held:
            self.go.set()

    async def __call__(self, items: Sequence[int], deadline: float) -> list[int | Exception]:
        self.sent.append(list(items))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.go.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(list(items))
            raise
        finally:
            self.under_way -= 1
        return [ValueError(item) if item < 0 else item * 10 for item in items]


async def soon() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_items_that_arrive_while_calls_are_in_flight_share_a_batch() -> None:
    sender = Sender(held=True)
    call = MicroBatcher(sender, max_calls=2, max_weight=3)
    first = asyncio.ensure_future(call(1))
    await soon()
    second = asyncio.ensure_future(call(2))
    await soon()
    rest = [asyncio.ensure_future(call(i)) for i in range(3, 8)]
    await soon()
    assert sender.sent == [[1], [2]]
    sender.go.set()
    assert await asyncio.gather(first, second, *rest) == [10 * i for i in range(1, 8)]
    assert sender.sent == [[1], [2], [3, 4, 5], [6, 7]]
    assert sender.most_under_way == 2


async def test_an_items_error_goes_to_its_caller_and_a_failed_call_to_all() -> None:
    call = MicroBatcher(Sender(), max_calls=1, max_weight=64)
    answers = await asyncio.gather(call(1), call(-2), call(3), return_exceptions=True)
    assert answers[0::2] == [10, 30]
    assert isinstance(answers[1], ValueError)

    async def broken(items: Sequence[int], deadline: float) -> list[int]:
        raise OSError("no way through")

    answers = await asyncio.gather(
        *map(MicroBatcher(broken, max_calls=1, max_weight=64), range(3)), return_exceptions=True
    )
    assert [str(answer) for answer in answers] == ["no way through"] * 3


async def test_a_call_is_cancelled_when_all_its_callers_are_and_not_before() -> None:
    sender = Sender(held=True)
    call = MicroBatcher(sender, max_calls=1, max_weight=64)
    callers = [asyncio.ensure_future(call(i)) for i in range(2)]
    await soon()
    callers[0].cancel()
    await soon()
    assert sender.cancelled == []
    callers[1].cancel()
    await soon()
    assert sender.cancelled == [[0, 1]]
    sender.go.set()
    assert await call(5) == 50  # its place is free


async def test_a_heavy_item_gets_its_own_call_and_delays_no_other() -> None:
    sender = Sender(held=True)
    call = MicroBatcher(sender, max_calls=1, max_weight=10, weigh=lambda item: item)
    heavy = [asyncio.ensure_future(call(item)) for item in (100, 200)]
    light = [asyncio.ensure_future(call(item)) for item in (6, 4, 1)]
    await soon()
    assert sorted(sender.sent) == [[6, 4], [100], [200]]
    sender.go.set()
    await asyncio.gather(*heavy, *light)
    assert sender.sent[-1] == [1]


@given(
    st.lists(st.tuples(st.integers(-3, 12), st.integers(0, 6), st.booleans()), max_size=40),
    st.integers(1, 3),
    st.integers(1, 10),
)
def test_every_caller_that_is_not_cancelled_gets_its_own_answer(
    arrivals: list[tuple[int, int, bool]], calls: int, most: int
) -> None:
    """Arrivals: item and weight; passes of the event loop before it arrives; whether its caller is cancelled."""

    async def scenario() -> None:
        sender = Sender()
        call = MicroBatcher(sender, max_calls=calls, max_weight=most, weigh=abs)

        async def caller(item: int, delay: int) -> int:
            for _ in range(delay):
                await asyncio.sleep(0)
            return await call(item)

        callers = [asyncio.ensure_future(caller(item, delay)) for item, delay, _ in arrivals]
        await asyncio.sleep(0)
        for (_, _, leaves), task in zip(arrivals, callers, strict=True):
            if leaves:
                task.cancel()
        answers = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 30)
        for (item, _, leaves), answer in zip(arrivals, answers, strict=True):
            if isinstance(answer, asyncio.CancelledError):
                assert leaves
            elif item < 0:
                assert isinstance(answer, ValueError)
            else:
                assert answer == 10 * item
        together = [batch for batch in sender.sent if not (len(batch) == 1 and abs(batch[0]) > most)]
        assert all(sum(map(abs, batch)) <= most for batch in together)

    asyncio.run(scenario())


class Line:
    """A service that answers one call at a time, at a rate per second, by a simulated clock."""

    def __init__(self, rate: float, calls: int = 2) -> None:
        self.rate = rate
        self.now = 0.0
        self.waits: list[float] = []
        self.rejected: list[tuple[float, float]] = []
        self._free_at = 0.0
        self._under_way: list[tuple[float, asyncio.Future[None]]] = []
        self._callers: list[asyncio.Future[None]] = []
        self.call = MicroBatcher(self._send, max_calls=calls, max_weight=4)
        asyncio.get_running_loop().time = lambda: self.now  # type: ignore[method-assign]

    async def _send(self, items: Sequence[int], deadline: float) -> list[int]:
        back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._free_at = max(self.now, self._free_at) + len(items) / self.rate
        self._under_way.append((self._free_at, back))
        await back
        return list(items)

    async def _caller(self, item: int) -> None:
        came = self.now
        try:
            await self.call(item)
            self.waits.append(self.now - came)
        except QueueFull as full:
            self.rejected.append((self.now - came, full.retry_after_s))

    async def play(self, seconds: float, arrivals_per_s: int) -> None:
        """Let time pass in steps of 20 ms, while items arrive."""
        for step in range(round(50 * seconds)):
            self.now += 0.02
            for at, back in [one for one in self._under_way if one[0] <= self.now]:
                self._under_way.remove((at, back))
                back.set_result(None)
            if step * arrivals_per_s % 50 < arrivals_per_s:
                self._callers.append(asyncio.ensure_future(self._caller(step)))
            await soon()

    async def end(self) -> None:
        while not all(caller.done() for caller in self._callers):
            await self.play(0.02, 0)


async def test_under_overload_items_that_waited_too_long_are_rejected_and_the_rest_answered() -> None:
    """The service answers ten items a second; fifty arrive."""
    line = Line(rate=10)
    await line.play(10, arrivals_per_s=50)
    await line.end()
    assert 90 <= len(line.waits) <= 130  # its capacity
    assert max(line.waits) < 3.5  # 2 s, and two calls of at most four items each
    assert len(line.waits) + len(line.rejected) == 500
    assert all(waited == pytest.approx(MAX_WAIT_S, abs=0.03) and retry == MAX_WAIT_S for waited, retry in line.rejected)


async def test_an_item_waits_for_half_of_its_time_and_a_call_gets_the_latest_deadline() -> None:
    sent: list[tuple[list[int], float]] = []
    go = asyncio.Event()

    async def send(items: Sequence[int], deadline: float) -> list[int]:
        sent.append((list(items), deadline))
        await go.wait()
        return list(items)

    call, now = MicroBatcher(send, max_calls=1, max_weight=9), asyncio.get_running_loop().time()
    callers = [asyncio.ensure_future(call(1, now + 50))]
    await soon()
    callers += [asyncio.ensure_future(call(i, now + late)) for i, late in ((2, 0.01), (3, 60), (4, 70))]
    await asyncio.sleep(0.02)
    go.set()
    answers = await asyncio.gather(*callers, return_exceptions=True)
    assert [answers[0], *answers[2:]] == [1, 3, 4]
    assert isinstance(answers[1], QueueFull)
    assert sent == [([1], now + 50), ([3, 4], now + 70)]


async def test_a_call_runs_in_an_empty_context() -> None:
    request: ContextVar[str | None] = ContextVar("request", default=None)
    seen: list[str | None] = []

    async def send(items: Sequence[int], deadline: float) -> list[int]:
        seen.append(request.get())
        return list(items)

    call = MicroBatcher(send, max_calls=1, max_weight=3)

    async def ask(item: int) -> None:
        request.set(f"request {item}")
        await call(item)

    await asyncio.gather(*(ask(item) for item in range(3)))
    assert seen == [None]  # with a request's context, Serve would cancel the call for all with that request
