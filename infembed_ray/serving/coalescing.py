"""Micro-batching: gathers concurrent calls into few, so that the cost of a call between processes is shared.

An item is sent at once while few calls are in flight. Otherwise it waits until one of them returns, and is sent with all
items that have gathered meanwhile. Nothing is delayed on purpose, and the higher the load, the less each item costs.

An item that has waited too long is rejected. The wait is measured, as in CoDel (Nichols and Jacobson 2012), and never
predicted: a prediction made from slow calls would reject items long after the service has recovered.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from infembed_ray.serving.engine import DeadlineExceeded, QueueFull

Item = TypeVar("Item")
Answer = TypeVar("Answer")

MOST_ALONE = 32
"""Items under way that travel alone, for each of the calls that may be."""


@dataclass(frozen=True)
class _Gathered(Generic[Item]):
    """What somebody waits for; times are the event loop's."""

    item: Item
    weight: int
    came: float
    deadline: float


class Coalescer(Generic[Item, Answer]):
    """Gathers the items of concurrent callers. All calls come from one event loop.

    Args:
        send: answers several items, one answer or exception each, in their order, by the event loop's time that is
            given: the latest at which one of them is of use. It is cancelled when nobody waits for any of its answers
            any more; what it raises itself goes to all of them.
        calls: so many may be on their way before items gather.
        most: weight of the items that travel together.
        weigh: an item's weight. One heavier than `most` travels alone and at once: it neither waits for the others
            nor do they wait for it.
        patience_s: seconds that an item may wait to be sent.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Item], float], Awaitable[Sequence[Answer | Exception]]],
        *,
        calls: int,
        most: int,
        weigh: Callable[[Item], int] = lambda _: 1,
        patience_s: float = float("inf"),
    ) -> None:
        self._send = send
        self._calls = calls
        self._most = most
        self._weigh = weigh
        self._patience_s = patience_s
        self._gathered: OrderedDict[asyncio.Future[Answer], _Gathered[Item]] = OrderedDict()
        self._departing = False
        self._under_way: set[asyncio.Task[None]] = set()
        self._alone: set[asyncio.Task[None]] = set()

    async def __call__(self, item: Item, deadline: float = float("inf")) -> Answer:
        """The answer to an item, or the exception it got. A cancelled caller's item is not sent any more.

        Args:
            item: to be answered.
            deadline: by the event loop's time; it is not sent any more after that.

        Raises:
            QueueFull: it waited too long, or too many heavy items are in flight.
            DeadlineExceeded: it was not sent in time.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        weight = self._weigh(item)
        gathered = _Gathered(item, weight, loop.time(), deadline)
        if weight > self._most:
            if len(self._alone) >= MOST_ALONE * self._calls:
                raise QueueFull(1.0)
            self._start(self._alone, {answer: gathered})
        else:
            self._gathered[answer] = gathered
            timer = loop.call_later(self._patience_s, self._reject, answer)
            answer.add_done_callback(lambda _: timer.cancel())
            answer.add_done_callback(lambda _: self._gathered.pop(answer, None))  # there only if its caller has gone
            if not self._departing and len(self._under_way) < self._calls:
                self._departing = True
                loop.call_soon(self._depart)  # with all that this pass of the event loop brings
        return await answer

    def _reject(self, answer: asyncio.Future[Answer]) -> None:
        """Reject an item unless it has been sent."""
        if answer in self._gathered and not answer.done():
            answer.set_exception(QueueFull(self._patience_s))

    def _depart(self) -> None:
        self._departing = False
        now = asyncio.get_running_loop().time()
        while self._gathered and len(self._under_way) < self._calls:
            together, room = {}, self._most
            while self._gathered:
                answer, gathered = next(iter(self._gathered.items()))
                if gathered.weight > room:
                    break
                del self._gathered[answer]
                if answer.done():  # its caller has just gone
                    continue
                if gathered.deadline <= now:
                    answer.set_exception(DeadlineExceeded(gathered.deadline - gathered.came))
                    continue
                together[answer] = gathered
                room -= gathered.weight
            if together:
                self._start(self._under_way, together)

    def _start(self, lane: set[asyncio.Task[None]], together: dict[asyncio.Future[Answer], _Gathered[Item]]) -> None:
        # In a context of its own: by that of the caller who happens to be first, Serve would cancel it when he goes.
        task = contextvars.Context().run(asyncio.get_running_loop().create_task, self._travel(together))
        lane.add(task)
        waited_for = len(together)

        def settled(_: object) -> None:
            nonlocal waited_for
            waited_for -= 1
            if not waited_for and not task.done():
                task.cancel()

        def back(_: object) -> None:
            lane.discard(task)
            for answer in together:
                answer.cancel()  # has none only if the call was cancelled; nobody may wait for ever
            self._depart()

        for answer in together:
            answer.add_done_callback(settled)
        task.add_done_callback(back)

    async def _travel(self, together: dict[asyncio.Future[Answer], _Gathered[Item]]) -> None:
        try:
            answers = await self._send(
                [one.item for one in together.values()], max(one.deadline for one in together.values())
            )
            outcomes: list[tuple[asyncio.Future[Answer], Answer | Exception]] = list(
                zip(together, answers, strict=True)
            )
        except Exception as error:
            outcomes = [(answer, error) for answer in together]
        for answer, outcome in outcomes:
            if answer.done():
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
