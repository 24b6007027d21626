"""The ledger of a run grants requests and tokens per minute and a budget in USD to all processes together.

A request is reserved at its worst case before it is sent and settled when its answer arrives. An attempt that may have been
paid, and the grant of a process that stops reporting, count as used. So by the server's count, no limit is exceeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from infembed_ray.config.llm import Limits
from infembed_ray.llm.chat import Completion, Request, RunFailure
from infembed_ray.llm.prices import PriceTable

REQUESTS, TOKENS, USD = "requests", "tokens", "usd"

Amounts = dict[str, float]
"""Amount per limited resource; unlimited resources are absent."""

ARRIVAL = 1 / 20
"""Longest time from sending a request to its arrival at the server, as a share of a window."""
LEASE_S = 10.0
"""Seconds without a report after which what a process holds counts as used."""
AHEAD = 2.0
"""Advance that a process asks for, as a multiple of what it started since the last report. With less, a slow exchange or
a small increase of the load would leave all slots idle."""
REPORTS_PER_WINDOW = 200
"""Reports of a process per window, so that it holds little unused; at least one every LONGEST_INTERVAL_S."""
LONGEST_INTERVAL_S = 0.5
NOTED_AHEAD = 0.01
"""Share of the budget that is noted as granted ahead of time, since each note waits for the disk."""


def worst_case(request: Request, table: PriceTable, added: int = 0, longest: int = 0) -> Amounts:
    """Return the most that a chat request can use, with `added` tokens of its prompt and a `longest` answer, whatever its cap."""
    prompt, answer = (
        request.most_prompt_tokens + added,
        max(longest, request.parameters.get("max_completion_tokens", 0)),
    )
    usd = table.usd(request.model, Completion("", "", "", prompt, answer))
    return {REQUESTS: 1, TOKENS: prompt + answer, USD: math.inf if usd is None else usd}


def used_by(request: Request, completion: Completion, table: PriceTable) -> Amounts | None:
    """Return what an answered request used; None if the endpoint does not count tokens."""
    if not completion.prompt_tokens:
        return None
    tokens = completion.prompt_tokens + completion.completion_tokens
    return {REQUESTS: 1, TOKENS: tokens, USD: table.usd(request.model, completion) or 0.0}


@dataclass
class Traffic:
    """Counts of responses, and the time that answers took."""

    answered: int = 0
    rate_limited: int = 0
    failed: int = 0
    """Attempts that ended with neither an answer nor a 429."""
    answered_s: float = 0.0
    """Seconds of all answers together."""

    def add(self, other: Traffic) -> None:
        """Add the counts of `other`."""
        for name, amount in vars(other).items():
            setattr(self, name, getattr(self, name) + amount)


@dataclass(frozen=True)
class LeaseReport:
    """What a process reports to the ledger."""

    holder: str
    held: Amounts
    """Reserved by requests in flight, or unused."""
    wanted: Amounts
    """Missing for the requests that wait."""
    first: Amounts
    """Missing for the request that waits longest; 0 where the process holds enough."""
    ahead: Amounts
    """Wanted beyond that as an advance on the next requests."""
    used: tuple[tuple[float, Amounts], ...] = ()
    """(seconds since arrival, amounts) settled since the last report."""
    in_flight: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    failure: str | None = None
    """Why no process may send anything more."""
    warnings: tuple[str, ...] = ()
    """Messages for the user."""


@dataclass(frozen=True)
class Grant:
    """The ledger's answer to a report."""

    amounts: Amounts
    """Added to what the process holds."""
    failure: str | None = None


Exchange = Callable[[LeaseReport], Awaitable[Grant]]
"""Sends a report to the ledger, which may be in another process."""


@dataclass(frozen=True)
class LedgerStats:
    """State of a run as the ledger knows it."""

    in_flight: int
    spent_usd: float
    """Settled USD; 0 without a budget."""
    committed_usd: float
    """Settled USD and what processes still hold: at the end of a run, dead processes."""
    traffic: Traffic
    failure: str | None
    warnings: tuple[str, ...]
    """Distinct warnings, in order of arrival."""

    def facts(self) -> dict[str, Any]:
        """Return the manifest's figures of the endpoints."""
        counts = {name: getattr(self.traffic, name) for name in ("answered", "rate_limited", "failed")}
        latency_s = self.traffic.answered_s / self.traffic.answered if self.traffic.answered else None
        return {**counts, "mean_latency_s": latency_s, "warnings": list(self.warnings)}


@dataclass
class _Holder:
    seen: float
    held: Amounts
    in_flight: int = 0


class Ledger:
    """The accounts of one run.

    Args:
        spent_usd: what earlier runs spent of the same budget.
        note: writes durably how many USD may be spent at most, before they are granted, so a killed run is not forgotten.
    """

    def __init__(
        self,
        limits: Limits,
        spent_usd: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[float], object] = lambda usd: None,
    ) -> None:
        minutes = limits.window_s / 60
        self._window_s = limits.window_s
        self._clock = clock
        self._note = note
        self._noted_usd = -1.0
        self._bounds: Amounts = {}
        if limits.requests_per_minute is not None:
            self._bounds[REQUESTS] = math.floor(limits.requests_per_minute * minutes)
        if limits.tokens_per_minute is not None:
            self._bounds[TOKENS] = limits.tokens_per_minute * minutes
        if limits.budget_usd is not None:
            self._bounds[USD] = limits.budget_usd
        self._used: Amounts = {name: spent_usd if name == USD else 0.0 for name in self._bounds}
        self._windows: list[tuple[float, int, Amounts]] = []  # heap of (end, tie, amounts that then leave the window)
        self._ties = count()
        self._holders: dict[str, _Holder] = {}
        self._traffic = Traffic()
        self._failure: str | None = None
        self._warnings: dict[str, None] = {}

    def exchange(self, report: LeaseReport) -> Grant:
        """Record a process's report and grant it more."""
        now = self._clock()
        self._expire(now)
        self._record(report, now)
        self._failure = self._failure or self._unsatisfiable(report)
        granted = {} if self._failure else self._divide(report)
        holder = self._holders[report.holder]
        for name, amount in granted.items():
            holder.held[name] += amount
        if not holder.in_flight and not any(holder.held.values()):
            del self._holders[report.holder]
        self._note_budget(now)
        return Grant(granted, self._failure)

    @property
    def committed_usd(self) -> float:
        """Upper bound of the run's cost: what is spent and what processes hold; 0 without a budget."""
        return self._used.get(USD, 0.0) + sum(holder.held.get(USD, 0.0) for holder in self._holders.values())

    def stats(self) -> LedgerStats:
        """Return the state of the run as of the last report."""
        now = self._clock()
        return LedgerStats(
            in_flight=sum(holder.in_flight for holder in self._holders.values() if now - holder.seen <= LEASE_S),
            spent_usd=self._used.get(USD, 0.0),
            committed_usd=self.committed_usd,
            traffic=self._traffic,
            failure=self._failure,
            warnings=tuple(self._warnings),
        )

    def _note_budget(self, now: float) -> None:
        committed, budget = self.committed_usd, self._bounds.get(USD)
        if budget is not None and committed > self._noted_usd:
            noted = max(committed, min(budget, committed + NOTED_AHEAD * budget))
            self._note(noted)
            self._noted_usd = noted
            for holder in self._holders.values():  # the ledger took no reports meanwhile
                holder.seen += self._clock() - now

    def _expire(self, now: float) -> None:
        """Remove amounts that have left their window, and holders that do not report any more."""
        while self._windows and self._windows[0][0] < now:
            for name, amount in heapq.heappop(self._windows)[2].items():
                self._used[name] -= amount
        for name, holder in list(self._holders.items()):
            if now - holder.seen > LEASE_S:
                del self._holders[name]
                self._use(holder.held, now)

    def _record(self, report: LeaseReport, now: float) -> None:
        self._holders[report.holder] = _Holder(now, dict(report.held), report.in_flight)
        for age_s, amounts in report.used:
            self._use(amounts, now - age_s)
        self._traffic.add(report.traffic)
        self._failure = self._failure or report.failure
        self._warnings |= dict.fromkeys(report.warnings)

    def _use(self, amounts: Mapping[str, float], arrived: float) -> None:
        for name, amount in amounts.items():
            self._used[name] += amount
        windowed = {name: amount for name, amount in amounts.items() if name in (REQUESTS, TOKENS)}
        if windowed:
            heapq.heappush(self._windows, (arrived + self._window_s, next(self._ties), windowed))

    def _unsatisfiable(self, report: LeaseReport) -> str | None:
        """Return why the request that waits longest can never be sent; None if it can."""
        lower = ", or lower the model's max_tokens (a cut-off answer is asked for with twice as many)"
        for name, setting in ((REQUESTS, "requests_per_minute"), (TOKENS, "tokens_per_minute")):
            most = self._bounds.get(name, math.inf)
            if report.first.get(name, 0.0) > most:
                window = f"a window of {self._window_s:g} s holds {most:g} {name}"
                fault = f"{window}, one request may need {report.first[name]:g}"
                return f"limits.{setting}: {fault}; raise it{lower if name == TOKENS else ''}"
        budget, spent = self._bounds.get(USD, math.inf), self._used.get(USD, 0.0)
        if report.first.get(USD, 0.0) > budget - spent:
            return f"limits.budget_usd={budget:g}: used up ({spent:.4f} USD spent); raise it"
        return None

    def _divide(self, report: LeaseReport) -> Amounts:
        """Return the process's part of what is free: first for requests that wait, then as an advance."""
        held = {name: sum(holder.held[name] for holder in self._holders.values()) for name in self._bounds}
        free = {name: max(0.0, bound - self._used[name] - held[name]) for name, bound in self._bounds.items()}
        part = min([1.0, *(free[name] / wanted for name, wanted in report.wanted.items() if wanted > 0)])
        # Grant whole requests only: fractions of a request, spread over processes, would let none of them send.
        if any(free[name] < first for name, first in report.first.items()):
            part = 0.0
        granted: Amounts = {}
        for name in self._bounds:
            now = max(part * report.wanted[name], report.first[name] if part else 0.0)
            granted[name] = now + min(report.ahead[name], (free[name] - now) / (4 * len(self._holders)))
        return granted


class RateLimiter:
    """What one process may send. Use it within one event loop.

    Args:
        slots: most requests in flight of this process.
        exchange: sends a report to the ledger.
        interval_s: seconds between two reports; None: short enough that the process holds little unused.
    """

    def __init__(
        self,
        limits: Limits,
        slots: int,
        exchange: Exchange,
        interval_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        bounds = {REQUESTS: limits.requests_per_minute, TOKENS: limits.tokens_per_minute, USD: limits.budget_usd}
        self._names = tuple(name for name, bound in bounds.items() if bound is not None)
        self._holder = uuid.uuid4().hex
        self.slots = slots
        self._exchange = exchange
        self._interval_s = interval_s or min(LONGEST_INTERVAL_S, limits.window_s / REPORTS_PER_WINDOW)
        self._arrival_s = ARRIVAL * limits.window_s
        self._quantum_s = limits.window_s / 500
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
        self._warnings: list[str] = []
        self._renewing: asyncio.Task[None] | None = None
        self._wake, self._stopped, self._exchanging = asyncio.Event(), asyncio.Event(), asyncio.Lock()

    @property
    def has_budget(self) -> bool:
        """Whether USD are limited."""
        return USD in self._names

    async def enter(self, cost: Amounts) -> None:
        """Wait until a request with this worst case may be sent, to be `settle`d afterwards; RunFailure if nothing may be sent."""
        if self._waiting or not self._reserve(cost):
            begun = asyncio.get_running_loop().create_future()
            self.start(cost, begun.set_result)
            if self.short:
                self._wake.set()
            self._keep_renewing()
            if not await begun:
                raise RunFailure(str(self.failure))

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
                self._unused[name] += max(0.0, cost[name] - used[name])
                self._reserved[name] -= cost[name]
        if not self._in_flight:
            self._reserved = self._nothing()  # clears rounding errors
        self._start_waiting()

    def fail(self, failure: str) -> None:
        """Send nothing more, in this process and all others."""
        self._end(failure)
        self._wake.set()
        self._keep_renewing()

    def warn(self, warning: str) -> None:
        """Send a message to the user with the next report."""
        if warning not in self._warnings:
            self._warnings.append(warning)

    async def pause(self, seconds: float) -> None:
        """Sleep, but no longer once nothing may be sent any more."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)

    async def flush(self) -> None:
        """Report what was used so far, and return what is not needed."""
        with contextlib.suppress(RunFailure):
            await self._exchange_reports()

    @property
    def short(self) -> bool:
        """Whether a request waits although this process may have more requests in flight."""
        return bool(self._waiting) and self._in_flight < self.slots

    def end_period(self) -> LeaseReport:
        """Give back what is not needed, and report everything since the last report. `accept` must follow."""
        now = self._reported = self._clock()
        needed, first = self._demand()
        for name in self._names:  # halved at most, since the last report may be recent
            self._ahead[name] = max(AHEAD * self._started[name], self._ahead[name] / 2)
        self._give_back(needed, first, now)
        unused = self._unused
        report = LeaseReport(
            holder=self._holder,
            held={name: self._reserved[name] + unused[name] for name in self._names},
            wanted={name: max(0.0, needed[name] - unused[name]) for name in self._names},
            first={name: first[name] if first[name] > unused[name] else 0.0 for name in self._names},
            ahead={name: max(0.0, self._ahead[name] + min(0.0, needed[name] - unused[name])) for name in self._names},
            used=tuple((max(0.0, now - at * self._quantum_s), amounts) for at, amounts in self._settled.items()),
            in_flight=self._in_flight,
            traffic=self.traffic,
            failure=self.failure,
            warnings=tuple(self._warnings),
        )
        self._started, self._settled, self.traffic, self._warnings = self._nothing(), {}, Traffic(), []
        return report

    def accept(self, grant: Grant) -> None:
        """Add what the ledger granted."""
        self._renewed = self._reported
        self.failure = self.failure or grant.failure
        for name, amount in grant.amounts.items():
            self._unused[name] += amount
        self._start_waiting()

    def _nothing(self) -> Amounts:
        return dict.fromkeys(self._names, 0.0)

    def _end(self, failure: str) -> None:
        self.failure = self.failure or failure
        self._stopped.set()
        self._start_waiting()

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
        return True

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
        idle = not self._waiting and not self._in_flight
        # Less than one request needs is given back, too: another process may use it.
        if idle or now - self._renewed > LEASE_S or any(unused[name] < first[name] for name in self._names):
            unused.update(self._nothing())
        for name in self._names:
            unused[name] = min(unused[name], needed[name] + self._ahead[name])

    def _keep_renewing(self) -> None:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        """Exchange reports until the process is idle and holds nothing."""
        while True:
            self._wake.clear()
            try:
                report = await self._exchange_reports()
            except RunFailure:
                return
            idle = not self._waiting and not self._in_flight
            if idle and not any(report.held.values()) and not report.used:
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
                self._end(str(failure))
                raise
            if self.failure is not None:
                self._stopped.set()
            return report
