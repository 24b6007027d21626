"""Micro-batching: gathers concurrent items into few calls, so that they share the cost of a call between processes.

An item is sent at once while few calls are in flight; otherwise with all that arrive until one of them returns. An item that has
waited for `MAX_WAIT_S` is rejected: the wait is measured, as in CoDel (Nichols and Jacobson 2012), and never predicted.
"""

import asyncio
import contextvars
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from infembed_ray.serving.encoder.batching import QueueFull

Item = TypeVar("Item")
Answer = TypeVar("Answer")

MAX_WAIT_S = 2.0
"""Longest wait of an item in the queue, at most half of the time until its deadline."""


@dataclass(frozen=True)
class _Queued(Generic[Item]):
    """An item that waits or is in flight."""

    item: Item
    weight: int
    deadline: float


class MicroBatcher(Generic[Item, Answer]):
    """Gathers the items of concurrent callers into batches. All calls come from one event loop.

    Args:
        send: answers a batch: one answer or exception per item, in order, by the latest of their deadlines (the event
            loop's time). It is cancelled when no caller waits for any of its answers. What it raises goes to all items.
        max_calls: batches in flight before items wait.
        max_weight: largest total weight of a batch.
        weigh: returns the weight of an item. An item heavier than `max_weight` is sent at once in a call of its own,
            so it delays no other item.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Item], float], Awaitable[Sequence[Answer | Exception]]],
        *,
        max_calls: int,
        max_weight: int,
        weigh: Callable[[Item], int] = lambda _: 1,
    ) -> None:
        self._send = send
        self._max_calls = max_calls
        self._max_weight = max_weight
        self._weigh = weigh
        self._queue: OrderedDict[asyncio.Future[Answer], _Queued[Item]] = OrderedDict()
        self._scheduled = False
        self._in_flight: set[asyncio.Task[None]] = set()
        self._single: set[asyncio.Task[None]] = set()  # of heavy items

    async def __call__(self, item: Item, deadline: float = float("inf")) -> Answer:
        """Return the answer to an item, or raise its exception. The item of a cancelled caller is not sent.

        The deadline is by the event loop's time.

        Raises:
            QueueFull: the item waited too long.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        weight = self._weigh(item)
        queued = _Queued(item, weight, deadline)
        if weight > self._max_weight:
            self._start(self._single, {answer: queued})
        else:
            self._queue[answer] = queued
            max_wait_s = min(MAX_WAIT_S, (deadline - loop.time()) / 2)
            timer = loop.call_later(max_wait_s, self._reject, answer, max_wait_s)
            answer.add_done_callback(lambda _: timer.cancel())
            answer.add_done_callback(lambda _: self._queue.pop(answer, None))  # still there if its caller was cancelled
            if not self._scheduled and len(self._in_flight) < self._max_calls:
                self._scheduled = True
                loop.call_soon(self._send_batches)  # with all items that arrive in this pass of the event loop
        return await answer

    def _reject(self, answer: asyncio.Future[Answer], waited_s: float) -> None:
        """Reject an item unless it has been sent."""
        if answer in self._queue and not answer.done():
            answer.set_exception(QueueFull(waited_s))

    def _send_batches(self) -> None:
        self._scheduled = False
        while self._queue and len(self._in_flight) < self._max_calls:
            if batch := self._next_batch():
                self._start(self._in_flight, batch)

    def _next_batch(self) -> dict[asyncio.Future[Answer], _Queued[Item]]:
        """Take the oldest items from the queue, up to `max_weight`."""
        batch, weight_left = {}, self._max_weight
        while self._queue:
            answer, queued = next(iter(self._queue.items()))
            if queued.weight > weight_left:
                break
            del self._queue[answer]
            if answer.done():  # its caller was just cancelled
                continue
            batch[answer] = queued
            weight_left -= queued.weight
        return batch

    def _start(self, calls: set[asyncio.Task[None]], batch: dict[asyncio.Future[Answer], _Queued[Item]]) -> None:
        # Several requests share the call: in the context of the first one, Serve would cancel it together with that.
        task = contextvars.Context().run(asyncio.get_running_loop().create_task, self._call(batch))
        calls.add(task)
        waiting = len(batch)

        def settled(_: object) -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting and not task.done():
                task.cancel()

        def returned(_: object) -> None:
            calls.discard(task)
            for answer in batch:
                answer.cancel()  # without an answer only if the call was cancelled: no caller may wait for ever
            self._send_batches()

        for answer in batch:
            answer.add_done_callback(settled)
        task.add_done_callback(returned)

    async def _call(self, batch: dict[asyncio.Future[Answer], _Queued[Item]]) -> None:
        outcomes: Sequence[Answer | Exception]
        try:
            deadline = max(queued.deadline for queued in batch.values())
            outcomes = await self._send([queued.item for queued in batch.values()], deadline)
            if len(outcomes) != len(batch):
                raise RuntimeError(f"{len(outcomes)} answers to {len(batch)} items")
        except Exception as error:
            outcomes = [error] * len(batch)
        for answer, outcome in zip(batch, outcomes, strict=True):
            if answer.done():
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
