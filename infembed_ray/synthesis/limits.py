"""Limits that all actors of a run share: requests in flight, requests and tokens a minute, USD.

One `Ledger` keeps the books. Every process that sends requests holds a `Lease`: some of each limited resource, taken
ahead in chunks and renewed as it is used, so that most requests cost no message. This is accounting only: no network,
no Ray; the clock is an argument.

Why no limit is ever exceeded. A request is paid for at its worst before it is sent (`worst_case`) and settled when its
answer is here; what no lease holds and no window remembers is all that is ever given out.
- A request counts in its window from before it is sent until `window_s` after it must have arrived, which is when it
  was answered, or `ARRIVAL` windows after it was sent if that is earlier. So whatever moment between the two the server
  takes, no window by its clock holds more than the limit.
- An attempt that ended without an HTTP answer may have been paid for, so it counts as if it was, at its worst.
- A lease that is not renewed (its process died) expires: its slots are free again; whatever else it held counts as used.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count, islice

from infembed_ray.config import Limits
from infembed_ray.synthesis.chat import Completion, Request, RunFailure
from infembed_ray.synthesis.prices import PriceTable

SLOTS, REQUESTS, TOKENS, USD = "slots", "requests", "tokens", "usd"

Amounts = dict[str, float]
"""How much of each limited resource; resources without a limit are not in it. A request in flight takes one slot."""

ARRIVAL = 1 / 20
"""A request reaches its server within this share of a window, or is answered before."""
LEASE_S = 10.0
"""A lease that was not renewed for so long expires."""
TOLERATED = 0.1
"""Share of 429s among the requests that is left alone: a 429 costs a retry and nothing else."""
DECREASE, INCREASE = 0.7, 0.02
"""Above it, the requests in flight are cut to this share; below it, they grow by this share of the limit..."""
ADAPT_S = 1.0
"""... once in so many seconds..."""
ADAPT_REQUESTS = 100
"""... and requests: of a few, some 429s in a row that mean nothing would often be more than TOLERATED."""

AHEAD = 2.0
"""A lease would like to have this many times what it started lately: with less, an exchange that takes its time, or a
few requests more than before, would leave all slots idle."""

_LATENCY_STEP = math.log(1.05)
_MESSAGE_TOKENS = 64  # of a message beside its content: role, separators, what a chat template adds


def resources(limits: Limits) -> tuple[str, ...]:
    """The resources these limits bound; slots always are."""
    bounds = {REQUESTS: limits.requests_per_minute, TOKENS: limits.tokens_per_minute, USD: limits.budget_usd}
    return (SLOTS, *(name for name, bound in bounds.items() if bound is not None))


def worst_case(request: Request, table: PriceTable) -> Amounts:
    """The most that a request can use: no tokenizer makes more tokens of a text than it has UTF-8 bytes."""
    prompt = sum(len(message["content"].encode()) + _MESSAGE_TOKENS for message in request.messages)
    prompt += len(str(request.parameters.get("response_format", "")).encode())
    answer = request.parameters.get("max_completion_tokens", 0)
    usd = table.usd(request.model, Completion("", "", "", prompt, answer))
    return {SLOTS: 1, REQUESTS: 1, TOKENS: prompt + answer, USD: math.inf if usd is None else usd}


@dataclass
class Traffic:
    """Responses so far, and how long the answers took."""

    answered: int = 0
    rate_limited: int = 0
    failed: int = 0
    """Attempts that ended in any other way than with an answer or a 429."""
    latencies: Counter[int] = field(default_factory=Counter)
    """Histogram in steps of 5 %."""

    def add_answer(self, seconds: float) -> None:
        self.answered += 1
        self.latencies[math.ceil(math.log(max(seconds, 1e-6)) / _LATENCY_STEP)] += 1

    def add(self, other: Traffic) -> None:
        self.answered += other.answered
        self.rate_limited += other.rate_limited
        self.failed += other.failed
        self.latencies.update(other.latencies)

    def latency_s(self, share: float) -> float | None:
        """Seconds within which this share of the answers came, at most 5 % too many; None without answers."""
        left = share * self.latencies.total()
        for step, answers in sorted(self.latencies.items()):
            left -= answers
            if left <= 0:
                return math.exp(step * _LATENCY_STEP)
        return None


@dataclass(frozen=True)
class Report:
    """What a lease tells the ledger."""

    holder: str
    held: Amounts
    """By requests in flight, and unused."""
    wanted: Amounts
    """To send what waits."""
    first: Amounts
    """Of it, what the request that waits longest needs at the least."""
    ahead: Amounts
    """As much as it would like to have beside that, to need no message for what comes next."""
    used: tuple[tuple[float, Amounts], ...] = ()
    """(seconds since its arrival, amounts) of what was settled since the last report."""
    in_flight: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    failure: str | None = None
    """Why no process should send anything more."""
    warnings: tuple[str, ...] = ()
    """For the person who started the run."""


@dataclass(frozen=True)
class Grant:
    """The ledger's answer: to be added to what the lease holds."""

    amounts: Amounts
    slots: float
    """The lease's fair share; slots beyond it are to be returned when they are free."""
    failure: str | None = None


Exchange = Callable[[Report], Awaitable[Grant]]
"""Hands a report to the ledger, wherever it is."""


@dataclass(frozen=True)
class Figures:
    """What the ledger knows about the run so far."""

    in_flight: int
    slots: int
    """In flight at the most, as adapted to 429s."""
    spent_usd: float
    """Settled; 0 without a budget."""
    committed_usd: float
    """Settled, and what leases still hold: at the end of a run, those of processes that died."""
    traffic: Traffic
    failure: str | None
    warnings: tuple[str, ...]
    """All different ones, in the order of their arrival."""


@dataclass
class _Holder:
    seen: float
    held: Amounts
    in_flight: int = 0


class Ledger:
    """The books of one run.

    Args:
        limits: the bounds.
        slots: requests in flight at the most.
        spent_usd: what earlier runs on the same budget have spent.
        clock: seconds, monotonic.
    """

    def __init__(
        self, limits: Limits, slots: int, spent_usd: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        minutes = limits.window_s / 60
        self._window_s = limits.window_s
        self._clock = clock
        self._slots: float = slots
        self._bounds: Amounts = {SLOTS: slots}
        if limits.requests_per_minute is not None:
            self._bounds[REQUESTS] = math.floor(limits.requests_per_minute * minutes)
        if limits.tokens_per_minute is not None:
            self._bounds[TOKENS] = limits.tokens_per_minute * minutes
        if limits.budget_usd is not None:
            self._bounds[USD] = limits.budget_usd
        self._used: Amounts = dict.fromkeys(self._bounds, 0.0)
        if USD in self._used:
            self._used[USD] = spent_usd
        self._windows: list[tuple[float, int, Amounts]] = []  # (end, tie, amounts) of what a window still remembers
        self._ties = count()
        self._holders: dict[str, _Holder] = {}
        self._traffic = Traffic()
        self._adapted = (clock(), 0, 0)  # when, 429s and requests sent until then
        self._failure: str | None = None
        self._warnings: dict[str, None] = {}

    def exchange(self, report: Report) -> Grant:
        """Take in what a lease reports and give it more."""
        now = self._clock()
        self._forget(now)
        self._holders[report.holder] = _Holder(now, dict(report.held), report.in_flight)
        for age_s, amounts in report.used:
            self._use(amounts, now - age_s)
        self._traffic.add(report.traffic)
        self._failure = self._failure or report.failure
        self._warnings |= dict.fromkeys(report.warnings)
        self._adapt(now)
        self._failure = self._failure or self._hopeless(report)
        share = max(1, self._bounds[SLOTS] // len(self._holders))
        granted = {} if self._failure else self._granted(report, share)
        held = self._holders[report.holder].held
        for name, amount in granted.items():
            held[name] += amount
        if not any(held.values()):
            del self._holders[report.holder]
        return Grant(granted, share, self._failure)

    @property
    def committed_usd(self) -> float:
        """What is spent, and what leases hold: however the run ends, it does not cost more. 0 without a budget."""
        return self._used.get(USD, 0.0) + sum(holder.held.get(USD, 0.0) for holder in self._holders.values())

    def figures(self) -> Figures:
        """The state of the run."""
        self._forget(self._clock())
        return Figures(
            in_flight=sum(holder.in_flight for holder in self._holders.values()),
            slots=int(self._bounds[SLOTS]),
            spent_usd=self._used.get(USD, 0.0),
            committed_usd=self.committed_usd,
            traffic=self._traffic,
            failure=self._failure,
            warnings=tuple(self._warnings),
        )

    def _granted(self, report: Report, share: float) -> Amounts:
        free = {name: max(0.0, self._free(name)) for name in self._bounds}
        free[SLOTS] = min(free[SLOTS], max(0.0, share - report.held[SLOTS]))
        idle = report.held[SLOTS] - report.in_flight
        ready = report.wanted[SLOTS] + idle  # requests that could be sent at once
        part = min(1.0, (free[SLOTS] + idle) / ready) if ready else 0.0
        for name, wanted in report.wanted.items():
            if name != SLOTS and wanted > 0:
                part = min(part, free[name] / wanted)
        # For whole requests only: parts of one, spread over several leases, would serve nobody.
        if part and any(free[name] < first for name, first in report.first.items()):
            part = 0.0
        granted: Amounts = {SLOTS: max(report.first[SLOTS] if part else 0.0, math.floor(part * ready) - idle, 0.0)}
        for name in self._bounds:
            if name != SLOTS:
                now = max(part * report.wanted[name], report.first[name] if part else 0.0)
                ahead = min(report.ahead[name], (free[name] - now) / (4 * len(self._holders)))
                granted[name] = now + ahead
        return granted

    def _hopeless(self, report: Report) -> str | None:
        """Why the request that waits longest can never be sent."""
        for name, field_name in ((REQUESTS, "requests_per_minute"), (TOKENS, "tokens_per_minute")):
            most = self._bounds.get(name, math.inf)
            if report.first.get(name, 0.0) > most:
                return (
                    f"limits.{field_name}: a window of {self._window_s:g} s holds {most:g} {name}, one request may need "
                    f"{report.first[name]:g}; raise it"
                )
        budget, spent = self._bounds.get(USD, math.inf), self._used.get(USD, 0.0)
        if report.first.get(USD, 0.0) > budget - spent:
            return f"limits.budget_usd={budget:g}: used up ({spent:.4f} USD spent); raise it"
        return None

    def _free(self, name: str) -> float:
        return self._bounds[name] - self._used[name] - sum(holder.held[name] for holder in self._holders.values())

    def _use(self, amounts: Mapping[str, float], arrived: float) -> None:
        for name, amount in amounts.items():
            self._used[name] += amount
        passing = {name: amount for name, amount in amounts.items() if name in (REQUESTS, TOKENS)}
        if passing:
            heapq.heappush(self._windows, (arrived + self._window_s, next(self._ties), passing))

    def _forget(self, now: float) -> None:
        """What has left its window, and leases that were not renewed."""
        while self._windows and self._windows[0][0] < now:
            for name, amount in heapq.heappop(self._windows)[2].items():
                self._used[name] -= amount
        for name, holder in list(self._holders.items()):
            if now - holder.seen > LEASE_S:
                del self._holders[name]
                self._use({resource: amount for resource, amount in holder.held.items() if resource != SLOTS}, now)

    def _adapt(self, now: float) -> None:
        """Additive increase, multiplicative decrease of the requests in flight, by the share of 429s."""
        limited = self._traffic.rate_limited
        # Not the answers so far: 429s come at once, so when many are sent for the first time, they come first.
        sent = limited + self._traffic.answered + sum(holder.in_flight for holder in self._holders.values())
        then, limited_then, sent_then = self._adapted
        if now - then < ADAPT_S or sent - sent_then < ADAPT_REQUESTS:
            return
        self._adapted = (now, limited, sent)
        if limited - limited_then > TOLERATED * (sent - sent_then):
            self._bounds[SLOTS] = max(1, math.floor(DECREASE * self._bounds[SLOTS]))
        else:
            self._bounds[SLOTS] = min(self._slots, self._bounds[SLOTS] + math.ceil(INCREASE * self._slots))


class Lease:
    """What one process may use before it has to ask again.

    Args:
        holder: a name no other process has.
        names: the limited resources, see `resources`.
        slots: requests this process wants to have in flight at the most.
        window_s: of the limits.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        holder: str,
        names: tuple[str, ...],
        slots: int,
        window_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holder = holder
        self._names = names
        self._chunked = tuple(name for name in names if name != SLOTS)
        self._slots = slots
        self._share: float = slots
        self._window_s = window_s
        self._clock = clock
        self._renewed = -math.inf
        self._asked = -math.inf
        self._unused: Amounts = dict.fromkeys(names, 0.0)
        self._reserved: Amounts = dict.fromkeys(names, 0.0)
        self._started: Amounts = dict.fromkeys(names, 0.0)
        self._ahead: Amounts = dict.fromkeys(names, 0.0)
        self._used: dict[int, Amounts] = {}  # by the time of arrival, in quanta
        self._waiting: deque[tuple[Amounts, Callable[[bool], None]]] = deque()
        self.traffic = Traffic()
        self.failure: str | None = None
        self.warnings: list[str] = []

    @property
    def idle(self) -> bool:
        """Nothing is in flight and nothing waits."""
        return not self._waiting and not self._reserved[SLOTS]

    @property
    def short(self) -> bool:
        """Something waits that the lease has a slot for, or could be given one for."""
        return bool(self._waiting) and self._reserved[SLOTS] < min(self._slots, self._share)

    def take(self, cost: Amounts) -> bool:
        """Reserve what a request costs at worst, so that it may be sent now; False if it has to wait."""
        return not self._waiting and self._reserve(cost)

    def start(self, cost: Amounts, begin: Callable[[bool], None]) -> None:
        """Call `begin(True)` once a request that costs so much is reserved for; `begin(False)` if nothing is any more."""
        self._waiting.append((cost, begin))
        self._begin()

    def settle(self, cost: Amounts, used: Mapping[str, float], started: float) -> None:
        """A request that was sent at `started` is over: it used so much of its cost."""
        arrived = min(self._clock(), started + ARRIVAL * self._window_s)
        bucket = self._used.setdefault(math.ceil(arrived / self._quantum_s), dict.fromkeys(self._chunked, 0.0))
        for name in self._chunked:
            bucket[name] += used[name]
            self._unused[name] += cost[name] - used[name]
        for name in self._names:
            self._reserved[name] -= cost[name]
        if self._reserved[SLOTS] == 0:
            self._reserved = dict.fromkeys(self._names, 0.0)  # without what rounding left
        self._unused[SLOTS] += 1
        self._begin()

    def report(self) -> Report:
        """What the ledger should know now. Each must be followed by `accept` before the next."""
        now = self._asked = self._clock()
        for name in self._chunked:  # halved at most: little was started if the last report was a moment ago
            self._ahead[name] = max(AHEAD * self._started[name], self._ahead[name] / 2)
        self._ahead[SLOTS] = self._started[SLOTS]
        unused = self._unused
        unused[SLOTS] = max(0.0, min(unused[SLOTS], self._share - self._reserved[SLOTS]))
        ready = min(len(self._waiting), int(self._slots - self._reserved[SLOTS]))
        needed = dict.fromkeys(self._names, 0.0)
        for cost, _ in islice(self._waiting, ready):
            for name in self._names:
                needed[name] += cost[name]
        first = self._waiting[0][0] if ready else needed
        if self.idle or now - self._renewed > LEASE_S:
            unused.update(dict.fromkeys(self._names, 0.0))
        elif any(unused[name] < first[name] for name in self._chunked):
            unused.update(dict.fromkeys(self._chunked, 0.0))  # too little for one: let another lease have it
        else:
            for name in self._names:
                unused[name] = min(unused[name], needed[name] + self._ahead[name])
        report = Report(
            holder=self._holder,
            held={name: self._reserved[name] + unused[name] for name in self._names},
            wanted={name: max(0.0, needed[name] - unused[name]) for name in self._names},
            first={name: first[name] if first[name] > unused[name] else 0.0 for name in self._names},
            ahead={name: max(0.0, self._ahead[name] + min(0.0, needed[name] - unused[name])) for name in self._chunked}
            | {SLOTS: 0.0},
            used=tuple((max(0.0, now - at * self._quantum_s), amounts) for at, amounts in self._used.items()),
            in_flight=int(self._reserved[SLOTS]),
            traffic=self.traffic,
            failure=self.failure,
            warnings=tuple(self.warnings),
        )
        self._started = dict.fromkeys(self._names, 0.0)
        self._used = {}
        self.traffic = Traffic()
        self.warnings = []
        return report

    def accept(self, grant: Grant) -> None:
        """Add what the ledger gives."""
        self._renewed = self._asked
        self._share = grant.slots
        self.failure = self.failure or grant.failure
        for name, amount in grant.amounts.items():
            self._unused[name] += amount
        self._begin()

    def fail(self, failure: str) -> None:
        """Send nothing more; the next report tells all others."""
        self.failure = self.failure or failure
        self._begin()

    def _begin(self) -> None:
        while self._waiting and (self.failure is not None or self._reserve(self._waiting[0][0])):
            self._waiting.popleft()[1](self.failure is None)

    def _reserve(self, cost: Amounts) -> bool:
        if (
            self.failure is not None
            or self._reserved[SLOTS] >= self._share
            or any(self._unused[name] < cost[name] for name in self._names)
            or self._clock() - self._renewed > LEASE_S
        ):
            return False
        for name in self._names:
            self._unused[name] -= cost[name]
            self._reserved[name] += cost[name]
            self._started[name] += cost[name]
        return True

    @property
    def _quantum_s(self) -> float:
        return self._window_s / 500


class Gate:
    """Where the requests of one process wait until the limits let them pass. Use it within one event loop.

    Args:
        lease: of this process.
        exchange: reaches the ledger.
        interval_s: between two reports while all goes well.
    """

    def __init__(self, lease: Lease, exchange: Exchange, interval_s: float) -> None:
        self._lease = lease
        self._exchange = exchange
        self._interval_s = interval_s
        self._renewing: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        self._exchanging = asyncio.Lock()

    @property
    def traffic(self) -> Traffic:
        """Of this process, since its last report."""
        return self._lease.traffic

    @property
    def failure(self) -> str | None:
        """Why nothing may be sent any more."""
        return self._lease.failure

    async def enter(self, cost: Amounts) -> None:
        """Return when a request that costs so much at worst may be sent. Each must be settled afterwards.

        Raises:
            RunFailure: nothing may be sent any more.
        """
        if not self._lease.take(cost):
            begun = asyncio.get_running_loop().create_future()
            self._lease.start(cost, begun.set_result)
            if self._lease.short:
                self._wake.set()
            self._keep_renewing()
            if not await begun:
                raise RunFailure(self._lease.failure)

    def settle(self, cost: Amounts, used: Mapping[str, float], started: float) -> None:
        """A request that was sent at `started` (`time.monotonic`) is over: it used so much of its cost."""
        self._lease.settle(cost, used, started)

    def fail(self, failure: str) -> None:
        """Send nothing more, here and in all other processes."""
        self._lease.fail(failure)
        self._stopped.set()
        self._wake.set()
        self._keep_renewing()

    def warn(self, warning: str) -> None:
        """Tell the person who started the run."""
        self._lease.warnings.append(warning)

    async def pause(self, seconds: float) -> None:
        """Wait, but not once nothing may be sent any more."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)

    async def flush(self) -> None:
        """Have the ledger know what was used so far, and return what is not needed."""
        with contextlib.suppress(RunFailure):
            await self._exchange_reports()

    def _keep_renewing(self) -> None:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            self._wake.clear()
            try:
                report = await self._exchange_reports()
            except RunFailure:
                return
            if self._lease.idle and not report.held[SLOTS] and not report.used:
                return
            if self._lease.short:  # there was too little: ask again, but not at once
                await asyncio.sleep(self._interval_s)
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._interval_s)

    async def _exchange_reports(self) -> Report:
        async with self._exchanging:
            report = self._lease.report()
            try:
                self._lease.accept(await self._exchange(report))
            except RunFailure as failure:
                self._lease.fail(str(failure))
                raise
            finally:
                if self._lease.failure is not None:
                    self._stopped.set()
            return report
