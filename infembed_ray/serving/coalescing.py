"""Concurrent calls gathered into few: what a call costs between processes is paid once for all that wait.

A call goes out at once while few are on their way; else it waits for one of them to come back and travels with all
that gathered meanwhile. So nothing is delayed on purpose, and the more there is to do, the less each call costs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Coalescer(Generic[Item, Answer]):
    """Gathers the items of concurrent callers. All calls come from one event loop.

    Args:
        send: answers several items, one answer or exception each, in their order. It is cancelled when nobody waits
            for any of its answers any more; what it raises itself goes to all of them.
        calls: so many may be on their way before items gather.
        most: weight of the items that travel together.
        weigh: an item's weight. One heavier than `most` travels alone and at once: it neither waits for the others
            nor do they wait for it.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | Exception]]],
        *,
        calls: int,
        most: int,
        weigh: Callable[[Item], int] = lambda _: 1,
    ) -> None:
        self._send = send
        self._calls = calls
        self._most = most
        self._weigh = weigh
        self._gathered: deque[tuple[Item, int, asyncio.Future[Answer]]] = deque()
        self._departing = False
        self._under_way: set[asyncio.Task[None]] = set()
        self._alone: set[asyncio.Task[None]] = set()

    async def __call__(self, item: Item) -> Answer:
        """The answer to an item, or the exception it got. A cancelled caller's item is not sent any more."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        weight = self._weigh(item)
        if weight > self._most:
            self._start(self._alone, [(item, answer)])
        else:
            self._gathered.append((item, weight, answer))
            if not self._departing and len(self._under_way) < self._calls:
                self._departing = True
                loop.call_soon(self._depart)  # with all that this pass of the event loop brings
        return await answer

    def _depart(self) -> None:
        self._departing = False
        while self._gathered and len(self._under_way) < self._calls:
            together, room = [], self._most
            while self._gathered and self._gathered[0][1] <= room:
                item, weight, answer = self._gathered.popleft()
                if not answer.done():  # its caller has gone
                    together.append((item, answer))
                    room -= weight
            if together:
                self._start(self._under_way, together)

    def _start(self, lane: set[asyncio.Task[None]], together: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        task = asyncio.get_running_loop().create_task(self._travel(together))
        lane.add(task)
        waited_for = len(together)

        def settled(_: object) -> None:
            nonlocal waited_for
            waited_for -= 1
            if not waited_for and not task.done():
                task.cancel()

        def back(_: object) -> None:
            lane.discard(task)
            for _, answer in together:
                answer.cancel()  # has none only if the call was cancelled; nobody may wait for ever
            self._depart()

        for _, answer in together:
            answer.add_done_callback(settled)
        task.add_done_callback(back)

    async def _travel(self, together: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._send([item for item, _ in together])
            outcomes = list(zip(together, answers, strict=True))
        except Exception as error:
            outcomes = [(one, error) for one in together]
        for (_, answer), outcome in outcomes:
            if answer.done():
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
