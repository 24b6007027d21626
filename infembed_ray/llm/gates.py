"""Limits of one model at one endpoint, as one process learns them; the user's own limits are the ledger's (`rate_limits`).

Providers limit every model on its own, so a judge that answers 429 must not slow the generator. A `Gate` learns from the
share of 429s (AIMD) and from the headers, which count the requests of all processes. It may be wrong by a few requests: a
429 costs a retry and nothing else.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from infembed_ray.llm.rate_headers import LONGEST_RESET_S, Quota, quotas
from infembed_ray.llm.rate_limits import Amounts

TOLERATED = 0.1
"""Share of 429s that does not reduce the requests in flight: a 429 costs a retry and nothing else."""
DECREASE = 0.7
"""Factor of the requests in flight when the share of 429s is above TOLERATED."""
INCREASE = 0.02
"""Growth of the requests in flight otherwise, as a share of the configured limit."""
ADAPT_S = 1.0
"""Least seconds between two adaptations, and between two readings of headers that leave enough."""
ADAPT_REQUESTS = 100
"""Least requests between two adaptations: among fewer, a few 429s by chance would often exceed TOLERATED."""


class Gate:
    """What one model at one endpoint takes from this process. Use it within one event loop.

    Args:
        pause: sleeps, but no longer once nothing may be sent any more.
        report: called when all requests wait for a quota that the headers call used up.
    """

    def __init__(
        self,
        slots: int,
        pause: Callable[[float], Awaitable[None]],
        report: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = slots
        self._pause = pause
        self._report = report
        self._clock = clock
        self.limit = slots
        """Current limit of the requests in flight."""
        self.in_flight = 0
        self.rests_until = 0.0
        """Time until which other endpoints are preferred."""
        self.read_at = 0.0
        """Time from which the headers of an answer should be given to `read`."""
        self._left: Amounts = {}  # of the quotas in the headers; without such headers it is empty
        self._quotas: dict[str, Quota] = {}
        self._waiting: deque[tuple[Amounts, asyncio.Future[None]]] = deque()
        self._reopening: asyncio.Task[None] | None = None
        self._settled = self._limited = 0
        self._adapted = (clock(), 0, 0)  # time of the last adaptation; 429s and requests sent until then

    @property
    def full(self) -> bool:
        """Whether another request would have to wait."""
        return self.in_flight >= self.limit or bool(self._waiting)

    def take(self, cost: Amounts) -> bool:
        """Count a request with this worst case as in flight; return False if it has to `wait`."""
        return not self._waiting and self._take(cost)

    async def wait(self, cost: Amounts) -> None:
        """Wait until a request is counted as in flight. The caller must `leave` afterwards."""
        begun = asyncio.get_running_loop().create_future()
        self._waiting.append((cost, begun))
        self._admit()
        await begun

    def leave(self, limited: bool) -> None:
        """Count a request as ended, with a 429 if it was `limited`."""
        self.in_flight -= 1
        self._settled += 1
        self._limited += limited
        self._adapt()
        if self._waiting:
            self._admit()

    def read(self, headers: Mapping[str, str]) -> None:
        """Learn from the headers of a response what is left of the model's limits."""
        self._quotas = quotas(headers)
        self._left = {name: quota.remaining for name, quota in self._quotas.items()}
        self.read_at = self._clock() + ADAPT_S

    def _take(self, cost: Amounts) -> bool:
        if self.in_flight >= self.limit:
            return False
        left = self._left
        if left:
            if any(left[name] < min(cost[name], self._quotas[name].limit) for name in left):
                self.read_at = 0.0  # the next answer may say that there is more
                return False
            for name in left:
                left[name] -= cost[name]
        self.in_flight += 1
        return True

    def _admit(self) -> None:
        while self._waiting and self._take(self._waiting[0][0]):
            self._waiting.popleft()[1].set_result(None)
        if self._waiting and not self.in_flight and self._reopening is None:  # no answer will say that there is more
            self._reopening = asyncio.create_task(self._reopen(self._waiting[0][0]))

    async def _reopen(self, cost: Amounts) -> None:
        """Admit one request once the quotas should have refilled for it; its answer says what is left."""
        self._report()
        await self._pause(self._refill_s(cost))
        self._reopening = None
        self._left = {name: max(left, cost[name]) for name, left in self._left.items()}
        self._admit()

    def _refill_s(self, cost: Amounts) -> float:
        """Return the seconds until the quotas have refilled for a request, if they refill steadily."""
        waits = [0.0]
        for name, left in self._left.items():
            limit, _, reset_s = self._quotas[name]
            missing = min(cost[name], limit) - left
            if missing > 0:
                waits.append(reset_s * missing / max(missing, limit - max(left, 0.0)))
        return min(LONGEST_RESET_S, max(waits))

    def _adapt(self) -> None:
        """Adapt the requests in flight to the share of 429s (additive increase, multiplicative decrease)."""
        # Requests in flight count as sent: 429s arrive at once, so after a burst they arrive before any answer.
        sent = self._settled + self.in_flight
        then, limited_then, sent_then = self._adapted
        if sent - sent_then < ADAPT_REQUESTS or (now := self._clock()) - then < ADAPT_S:
            return
        self._adapted = (now, self._limited, sent)
        if self._limited - limited_then > TOLERATED * (sent - sent_then):
            self.limit = max(1, math.floor(DECREASE * self.limit))
        else:
            self.limit = min(self._slots, self.limit + math.ceil(INCREASE * self._slots))
