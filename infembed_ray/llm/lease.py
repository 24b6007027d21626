"""One process's lease on the shared limits, and the rate limiter that makes its requests wait."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice

from infembed_ray.config.llm import Limits
from infembed_ray.llm.chat import RunFailure
from infembed_ray.llm.rate_limits import (
    ARRIVAL,
    LEASE_S,
    USD,
    Amounts,
    Exchange,
    Grant,
    LeaseReport,
    Traffic,
    resources,
)

AHEAD = 2.0
"""Advance that a lease asks for, as a multiple of what it started since the last report. With less, a slow exchange or a
small increase of the load would leave all slots idle."""
REPORTS_PER_WINDOW = 200
"""Renewals of a lease per window, so that it holds little unused; at least one every LONGEST_INTERVAL_S."""
LONGEST_INTERVAL_S = 0.5


class Lease:
    """What one process may use before its next exchange with the ledger.

    Args:
        holder: a name that no other process has.
        names: the limited resources, see `rate_limits.resources`.
        slots: most requests in flight of this process.
        record: with a budget, set to the USD spent and the worst case in flight, see `budget.spend_record`.
    """

    def __init__(
        self,
        holder: str,
        names: tuple[str, ...],
        slots: int,
        window_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        record: memoryview[float] | None = None,
    ) -> None:
        self.holder = holder
        self.record = record
        self.slots = slots
        self._names = names
        self._arrival_s = ARRIVAL * window_s
        self._quantum_s = window_s / 500
        self._clock = clock
        self._renewed = self._reported = -math.inf
        self._in_flight = 0
        self._unused = self._nothing()
        self._reserved = self._nothing()
        self._started = self._nothing()  # since the last report
        self._ahead = self._nothing()
        self._settled: dict[int, Amounts] = {}  # by time of arrival in quanta, since the last report
        self._waiting: deque[tuple[Amounts, Callable[[bool], None]]] = deque()
        self.traffic = Traffic()
        self.failure: str | None = None
        """Why nothing may be sent any more."""
        self.warnings: list[str] = []

    def _nothing(self) -> Amounts:
        return dict.fromkeys(self._names, 0.0)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and nothing waits."""
        return not self._waiting and not self._in_flight

    @property
    def short(self) -> bool:
        """Whether a request waits although this process may have more requests in flight."""
        return bool(self._waiting) and self._in_flight < self.slots

    def take(self, cost: Amounts) -> bool:
        """Reserve a request's worst case; return False if it has to wait."""
        return not self._waiting and self._reserve(cost)

    def start(self, cost: Amounts, begin: Callable[[bool], None]) -> None:
        """Queue a request: call `begin(True)` once it is reserved, or `begin(False)` once nothing may be sent."""
        self._waiting.append((cost, begin))
        self._start_waiting()

    def settle(self, cost: Amounts, used: Mapping[str, float], started: float) -> None:
        """End a request sent at `started` (`time.monotonic`) that reserved `cost` and used `used`."""
        self._in_flight -= 1
        if self._names:
            arrived = min(self._clock(), started + self._arrival_s)
            bucket = self._settled.setdefault(math.ceil(arrived / self._quantum_s), self._nothing())
            for name in self._names:
                bucket[name] += used[name]
                self._unused[name] += cost[name] - used[name]
                self._reserved[name] -= cost[name]
        if not self._in_flight:
            self._reserved = self._nothing()  # clears rounding errors
        if self.record is not None:
            self.record[0] += used[USD]
            self.record[1] = self._reserved[USD]
        self._start_waiting()

    def end_period(self) -> LeaseReport:
        """Give back what is not needed, and report everything since the last report. `accept` must follow."""
        now = self._reported = self._clock()
        needed, first = self._demand()
        for name in self._names:  # halved at most, since the last report may be recent
            self._ahead[name] = max(AHEAD * self._started[name], self._ahead[name] / 2)
        self._give_back(needed, first, now)
        unused = self._unused
        report = LeaseReport(
            holder=self.holder,
            held={name: self._reserved[name] + unused[name] for name in self._names},
            wanted={name: max(0.0, needed[name] - unused[name]) for name in self._names},
            first={name: first[name] if first[name] > unused[name] else 0.0 for name in self._names},
            ahead={name: max(0.0, self._ahead[name] + min(0.0, needed[name] - unused[name])) for name in self._names},
            used=tuple((max(0.0, now - at * self._quantum_s), amounts) for at, amounts in self._settled.items()),
            in_flight=self._in_flight,
            traffic=self.traffic,
            failure=self.failure,
            warnings=tuple(self.warnings),
        )
        self._started, self._settled, self.traffic, self.warnings = self._nothing(), {}, Traffic(), []
        return report

    def _demand(self) -> tuple[Amounts, Amounts]:
        """Return the cost of all waiting requests that this process has slots for, and of the first of them."""
        needed = self._nothing()
        ready = min(len(self._waiting), self.slots - self._in_flight)
        for cost, _ in islice(self._waiting, ready):
            for name in self._names:
                needed[name] += cost[name]
        return needed, self._waiting[0][0] if ready else needed

    def _give_back(self, needed: Amounts, first: Amounts, now: float) -> None:
        unused = self._unused
        # Less than one request needs is given back, too: another lease may use it.
        if self.idle or now - self._renewed > LEASE_S or any(unused[name] < first[name] for name in self._names):
            unused.update(self._nothing())
        for name in self._names:
            unused[name] = min(unused[name], needed[name] + self._ahead[name])

    def accept(self, grant: Grant) -> None:
        """Add what the ledger granted."""
        self._renewed = self._reported
        self.failure = self.failure or grant.failure
        for name, amount in grant.amounts.items():
            self._unused[name] += amount
        self._start_waiting()

    def fail(self, failure: str) -> None:
        """Send nothing more; the next report stops all other processes."""
        self.failure = self.failure or failure
        self._start_waiting()

    def warn(self, warning: str) -> None:
        """Send a message to the user with the next report."""
        if warning not in self.warnings:
            self.warnings.append(warning)

    def _start_waiting(self) -> None:
        while self._waiting and (self.failure is not None or self._reserve(self._waiting[0][0])):
            self._waiting.popleft()[1](self.failure is None)

    def _reserve(self, cost: Amounts) -> bool:
        if (
            self.failure is not None
            or self._in_flight >= self.slots
            or any(self._unused[name] < cost[name] for name in self._names)
            or self._clock() - self._renewed > LEASE_S
        ):
            return False
        self._in_flight += 1
        for name in self._names:
            self._unused[name] -= cost[name]
            self._reserved[name] += cost[name]
            self._started[name] += cost[name]
        if self.record is not None:
            self.record[1] = self._reserved[USD]
        return True


class RateLimiter(Lease):
    """A lease for which requests wait. Use it within one event loop.

    Args:
        exchange: sends a report to the ledger.
        interval_s: seconds between two reports; None: short enough that the lease holds little unused.
    """

    def __init__(self, limits: Limits, slots: int, exchange: Exchange, interval_s: float | None = None) -> None:
        super().__init__(uuid.uuid4().hex, resources(limits), slots, limits.window_s)
        self._exchange = exchange
        self._interval_s = interval_s or min(LONGEST_INTERVAL_S, limits.window_s / REPORTS_PER_WINDOW)
        self._renewing: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        self._exchanging = asyncio.Lock()

    @property
    def budgeted(self) -> bool:
        """Whether the USD are limited."""
        return USD in self._names

    async def enter(self, cost: Amounts) -> None:
        """Wait until a request with this worst case may be sent. The caller must `settle` it afterwards.

        Raises:
            RunFailure: nothing may be sent any more.
        """
        if not self.take(cost):
            begun = asyncio.get_running_loop().create_future()
            self.start(cost, begun.set_result)
            if self.short:
                self._wake.set()
            self._keep_renewing()
            if not await begun:
                raise RunFailure(self.failure)

    def fail(self, failure: str) -> None:
        """Send nothing more, in this process and all others."""
        super().fail(failure)
        self._stopped.set()
        self._wake.set()
        self._keep_renewing()

    async def pause(self, seconds: float) -> None:
        """Sleep, but no longer once nothing may be sent any more."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)

    async def flush(self) -> None:
        """Report what was used so far, and return what is not needed."""
        with contextlib.suppress(RunFailure):
            await self._exchange_reports()

    def _keep_renewing(self) -> None:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        """Exchange reports until the lease is idle and holds nothing."""
        while True:
            self._wake.clear()
            try:
                report = await self._exchange_reports()
            except RunFailure:
                return
            if self.idle and not any(report.held.values()) and not report.used:
                return
            if self.short:  # the ledger had too little: ask again, but not at once
                await asyncio.sleep(self._interval_s)
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._interval_s)

    async def _exchange_reports(self) -> LeaseReport:
        async with self._exchanging:
            report = self.end_period()
            try:
                self.accept(await self._exchange(report))
            except RunFailure as failure:
                super().fail(str(failure))
                raise
            finally:
                if self.failure is not None:
                    self._stopped.set()
            return report
