"""A call to one of several replicas, made again on another when one is lost or is slow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from infembed_ray.serving.engine import DeadlineExceeded

Answer = TypeVar("Answer")

PAUSES_S = (0.01, 0.5)
"""First and longest pause before a call is made again; each is twice the one before."""
LOSS_PATIENCE_S = 2.0
"""A deployment that has answered nothing for so long since a replica was lost has none left: who asks it is told so."""
REMEMBERED = 200
"""Calls that tell how long one usually takes."""
SLOW = 2.0
"""A call is slow that takes so many times as long as 19 of 20 do."""
SLOW_S = 1.0
"""And before that is known, one that takes so long."""
FASTEST_S = 0.005
"""No call is slow before this."""
HEDGED_SHARE = 0.05
"""Most calls that are made a second time because they are slow: when everything is, that would only make it worse."""


class Redundancy:
    """Makes the calls to one deployment. All calls come from one event loop.

    Args:
        lost: does an exception mean that a replica was lost, so that another may answer?
        hedged: make slow calls a second time, and take the answer that comes first; for calls that change nothing, to
            deployments of several replicas.
        refused: does an answer hold what another replica might not have refused? A refusal is quicker than work, so of two
            calls it is not taken before the other has ended.
    """

    def __init__(
        self,
        lost: Callable[[BaseException], bool],
        hedged: bool = False,
        refused: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        self._lost = lost
        self._hedged = hedged
        self._refused = refused
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._slow_s = SLOW_S
        self._hedges = 1.0
        self._loss: BaseException | None = None  # the latest
        self._lost_at: float | None = None  # the first of those since which nothing was answered

    async def __call__(self, call: Callable[[], Awaitable[Answer]], timeout_s: float) -> Answer:
        """The answer of `call`, which is made until it has one.

        Raises:
            DeadlineExceeded: no answer within `timeout_s`.
            Exception: what the call raised. If that was the loss of a replica: nothing was answered since, so all that
                might have answered are gone.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        attempts = {_attempt(call)}
        ended: list[asyncio.Task[Answer]] = []  # but for what was lost
        pause = PAUSES_S[0]
        hedge_at = began + self._slow_s if self._hedged else float("inf")
        try:
            while (left := began + timeout_s - loop.time()) > 0:
                patience = min(left, max(0.0, hedge_at - loop.time()))
                done, attempts = await asyncio.wait(attempts, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for attempt in done:
                    error = attempt.exception()
                    if error is None or not self._lost(error):
                        self._loss = self._lost_at = None  # somebody is there
                        ended.append(attempt)
                    else:
                        self._loss = error
                        self._lost_at = self._lost_at or loop.time()
                good = [attempt for attempt in ended if attempt.exception() is None]
                welcome = [attempt for attempt in good if not self._refused(attempt.result())]
                if welcome or (ended and not attempts):
                    if good:
                        self._took(loop.time() - began)
                    return (welcome or good or ended)[0].result()
                if not attempts:
                    if self._loss and self._lost_at and loop.time() > self._lost_at + LOSS_PATIENCE_S:
                        raise self._loss
                    await asyncio.sleep(min(pause, left))
                    pause = min(2 * pause, PAUSES_S[1])
                    attempts.add(_attempt(call))
                elif loop.time() >= hedge_at:
                    hedge_at = float("inf")
                    if self._hedges >= 1:
                        self._hedges -= 1
                        attempts.add(_attempt(call))
            if ended:
                return ended[0].result()
            raise self._loss or DeadlineExceeded(timeout_s)
        finally:
            for attempt in attempts:
                attempt.cancel()

    def _took(self, seconds: float) -> None:
        self._loss = self._lost_at = None
        self._seconds.append(seconds)
        self._hedges = min(self._hedges + HEDGED_SHARE, HEDGED_SHARE * REMEMBERED)
        if len(self._seconds) == REMEMBERED:  # looked at in blocks: sorting for every call would cost more than it
            ordered = sorted(self._seconds)
            self._slow_s = max(FASTEST_S, SLOW * ordered[int(0.95 * REMEMBERED)])
            self._seconds.clear()


def _attempt(call: Callable[[], Awaitable[Answer]]) -> asyncio.Task[Answer]:
    async def made() -> Answer:
        return await call()

    return asyncio.get_running_loop().create_task(made())
