"""The retry inside the service: a call whose replica is lost or silent is made again on another replica.

Ray takes seconds to know that the replicas of a lost machine are gone; until then calls to them have no answer and no error.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from infembed_ray.serving.encoder.batching import DeadlineExceeded
from infembed_ray.serving.service import ReplicaLost

Answer = TypeVar("Answer")

RETRY_PAUSES_S = (0.01, 0.5)
"""First and longest pause before a retry; each pause is twice the one before."""
LOSS_PATIENCE_S = 2.0
"""After this time without an answer since a replica was lost, calls fail at once instead of being retried."""
SILENCE_S = 1.0
"""Time without an answer after which a call is made a second time, if there are several replicas."""
SECOND_CALLS = 0.05
"""Largest share of second calls. When all calls are slow, making all of them twice would add load."""
MAX_SECOND_CALLS = 10.0
"""Second calls that can follow one another at once, after many calls without one."""


class RetriedCalls:
    """Makes the calls to one deployment. All calls come from one event loop, and each may be made twice.

    Args:
        replicas: largest number of replicas; with two or more, silent calls are made a second time.
    """

    def __init__(self, replicas: int = 1) -> None:
        self._several = replicas > 1
        self._second_calls = 1.0  # token bucket
        self._lost_since: float | None = None  # first loss since the last answer

    async def __call__(self, call: Callable[[], Awaitable[Answer]], timeout_s: float) -> Answer:
        """Return the answer of `call`; repeat the call until there is one.

        Raises:
            DeadlineExceeded: no answer within `timeout_s`.
            ReplicaLost: no replica answered within `timeout_s`, or for `LOSS_PATIENCE_S`.
            Exception: what the call raised.
        """
        now = asyncio.get_running_loop().time
        deadline, pause = now() + timeout_s, RETRY_PAUSES_S[0]
        silent_at = now() + SILENCE_S if self._several else float("inf")
        loss: ReplicaLost | None = None
        running = {asyncio.ensure_future(call())}
        try:
            while (left := deadline - now()) > 0:
                wait_s = min(left, max(0.0, silent_at - now()))
                done, running = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not isinstance(error := task.exception(), ReplicaLost):
                        self._lost_since = None
                        self._second_calls = min(self._second_calls + SECOND_CALLS, MAX_SECOND_CALLS)
                        return task.result()
                    loss, self._lost_since = error, self._lost_since or now()
                if not running:
                    if loss and now() > (self._lost_since or now()) + LOSS_PATIENCE_S:
                        raise loss
                    await asyncio.sleep(min(pause, left))
                    pause = min(2 * pause, RETRY_PAUSES_S[1])
                    running = {asyncio.ensure_future(call())}
                elif now() >= silent_at:
                    silent_at = float("inf")
                    if self._second_calls >= 1:
                        self._second_calls -= 1
                        running.add(asyncio.ensure_future(call()))
            raise loss or DeadlineExceeded(timeout_s)
        finally:
            for task in running:
                task.cancel()
