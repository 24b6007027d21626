"""Hedged calls: repeats a call on another replica when a replica is lost, or once when the call is slow.

The hedged request is that of Dean and Barroso, "The Tail at Scale" (2013).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from infembed_ray.serving.encoder.batching import DeadlineExceeded

Answer = TypeVar("Answer")

RETRY_PAUSES_S = (0.01, 0.5)
"""First and longest pause before a retry; each pause is twice the one before."""
LOSS_PATIENCE_S = 2.0
"""After this time without an answer since a replica was lost, calls fail at once instead of being retried."""
LATENCY_SAMPLES = 200
"""Answered calls per estimate of the 95th percentile of the latency."""
SLOW_FACTOR = 2.0
"""A call is slow when it takes this many times the 95th percentile."""
INITIAL_SLOW_S = 1.0
"""Latency of a slow call before the first estimate."""
MIN_SLOW_S = 0.005
"""No call is slow before this time."""
HEDGE_BUDGET = 0.05
"""Largest share of calls that are hedged. When all calls are slow, hedging all of them would add load."""


class HedgedCalls:
    """Makes the calls to one deployment. All calls come from one event loop.

    Args:
        lost: whether an exception means that a replica was lost, so that another one may answer.
        hedged: repeat slow calls and take the first answer. For calls without side effects to several replicas.
        rejected: whether an answer holds a rejection that another replica might not have given. A rejection is faster
            than work, so it is only returned after the other call has ended.
    """

    def __init__(
        self,
        lost: Callable[[BaseException], bool],
        hedged: bool = False,
        rejected: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        self._is_lost = lost
        self._hedged = hedged
        self._rejected = rejected
        self._latencies: list[float] = []
        self._slow_s = INITIAL_SLOW_S
        self._hedges = 1.0  # token bucket
        self._last_loss: BaseException | None = None
        self._lost_since: float | None = None  # first loss since the last answer

    async def __call__(self, call: Callable[[], Awaitable[Answer]], timeout_s: float) -> Answer:
        """Return the answer of `call`; repeat the call until there is one.

        Raises:
            DeadlineExceeded: no answer within `timeout_s`.
            Exception: what the call raised. The loss of a replica is raised after `LOSS_PATIENCE_S` without answers.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        hedge_at = began + self._slow_s if self._hedged else float("inf")
        pause = RETRY_PAUSES_S[0]
        running = {_start(call)}
        ended: list[asyncio.Task[Answer]] = []  # without calls whose replica was lost
        try:
            while (left := began + timeout_s - loop.time()) > 0:
                wait_s = min(left, max(0.0, hedge_at - loop.time()))
                done, running = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                ended += self._note_losses(done)
                if chosen := self._choose(ended, last=not running):
                    if chosen.exception() is None:
                        self._note_answer(loop.time() - began)
                    return chosen.result()
                if not running:
                    self._raise_if_deserted()
                    await asyncio.sleep(min(pause, left))
                    pause = min(2 * pause, RETRY_PAUSES_S[1])
                    running.add(_start(call))
                elif loop.time() >= hedge_at:
                    hedge_at = float("inf")
                    if self._hedges >= 1:
                        self._hedges -= 1
                        running.add(_start(call))
            if ended:
                return ended[0].result()
            raise self._last_loss or DeadlineExceeded(timeout_s)
        finally:
            for task in running:
                task.cancel()

    def _note_losses(self, done: Iterable[asyncio.Task[Answer]]) -> list[asyncio.Task[Answer]]:
        """Record the calls whose replica was lost; return the others."""
        others = []
        for task in done:
            error = task.exception()
            if error is not None and self._is_lost(error):
                self._last_loss = error
                self._lost_since = self._lost_since or asyncio.get_running_loop().time()
            else:
                self._last_loss = self._lost_since = None
                others.append(task)
        return others

    def _choose(self, ended: list[asyncio.Task[Answer]], last: bool) -> asyncio.Task[Answer] | None:
        """Return the call to answer with: one without rejections; when it is the last, any, errors after answers."""
        answers = [task for task in ended if task.exception() is None]
        accepted = [task for task in answers if not self._rejected(task.result())]
        candidates = accepted or (answers or ended if last else [])
        return candidates[0] if candidates else None

    def _raise_if_deserted(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._last_loss and self._lost_since and now > self._lost_since + LOSS_PATIENCE_S:
            raise self._last_loss

    def _note_answer(self, seconds: float) -> None:
        self._last_loss = self._lost_since = None
        self._latencies.append(seconds)
        self._hedges = min(self._hedges + HEDGE_BUDGET, HEDGE_BUDGET * LATENCY_SAMPLES)
        if len(self._latencies) == LATENCY_SAMPLES:  # in blocks: sorting for every call would cost more than the call
            ordered = sorted(self._latencies)
            self._slow_s = max(MIN_SLOW_S, SLOW_FACTOR * ordered[int(0.95 * LATENCY_SAMPLES)])
            self._latencies.clear()


def _start(call: Callable[[], Awaitable[Answer]]) -> asyncio.Task[Answer]:
    async def awaited() -> Answer:
        return await call()

    return asyncio.get_running_loop().create_task(awaited())
