"""Shared rate limits: requests and tokens a minute, and a budget in USD.

One `Ledger` keeps the accounts of a run. Every process that sends requests holds a `Lease` (module `lease`): an advance
on each limited resource, renewed in chunks, so most requests need no message. This module does accounting only, without
network and Ray; the clock is an argument.

By the server's own count, no limit is exceeded:
- A request is reserved at its worst case (`worst_case`) before it is sent, and settled when its answer arrives.
- A request counts in its window until `window_s` after its latest possible arrival: the time of its answer, or `ARRIVAL`
  windows after it was sent if that is earlier.
- An attempt that ended without an HTTP answer may have been paid for, so it counts at its worst case.
- The lease of a dead process expires. Everything that it held counts as used.

Requests in flight need no ledger: each process has a fixed share of them.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from infembed_ray.config.llm import Limits
from infembed_ray.llm.chat import Completion, Request
from infembed_ray.llm.prices import PriceTable

REQUESTS, TOKENS, USD = "requests", "tokens", "usd"

Amounts = dict[str, float]
"""Amount per limited resource; unlimited resources are absent."""

ARRIVAL = 1 / 20
"""Longest time from sending a request to its arrival at the server, as a share of a window."""
LEASE_S = 10.0
"""Seconds without a report after which a lease expires."""

_LATENCY_STEP = math.log(1.05)
_MESSAGE_TOKENS = 64  # a message's role, separators and chat-template tokens


def resources(limits: Limits) -> tuple[str, ...]:
    """Return the resources that these limits bound."""
    bounds = {REQUESTS: limits.requests_per_minute, TOKENS: limits.tokens_per_minute, USD: limits.budget_usd}
    return tuple(name for name, bound in bounds.items() if bound is not None)


def worst_case(request: Request, table: PriceTable) -> Amounts:
    """Return the most that a chat request can use: a text has at most as many tokens as UTF-8 bytes."""
    prompt = sum(len(message["content"].encode()) + _MESSAGE_TOKENS for message in request.messages)
    prompt += len(str(request.parameters.get("response_format", "")).encode())
    answer = request.parameters.get("max_completion_tokens", 0)
    usd = table.usd(request.model, Completion("", "", "", prompt, answer))
    return {REQUESTS: 1, TOKENS: prompt + answer, USD: math.inf if usd is None else usd}


def used_by(request: Request, completion: Completion, table: PriceTable) -> Amounts | None:
    """Return what an answered request used; None if the endpoint does not count tokens."""
    tokens = completion.prompt_tokens + completion.completion_tokens
    if not tokens:
        return None
    return {REQUESTS: 1, TOKENS: tokens, USD: table.usd(request.model, completion) or 0.0}


@dataclass
class Traffic:
    """Counts of responses, and the latencies of answers."""

    answered: int = 0
    rate_limited: int = 0
    failed: int = 0
    """Attempts that ended with neither an answer nor a 429."""
    latencies: Counter[int] = field(default_factory=Counter)
    """Histogram in steps of 5 %."""

    def add_answer(self, seconds: float) -> None:
        """Count an answer that took `seconds`."""
        self.answered += 1
        self.latencies[math.ceil(math.log(max(seconds, 1e-6)) / _LATENCY_STEP)] += 1

    def add(self, other: Traffic) -> None:
        """Add the counts of `other`."""
        self.answered += other.answered
        self.rate_limited += other.rate_limited
        self.failed += other.failed
        self.latencies.update(other.latencies)

    def latency_s(self, share: float) -> float | None:
        """Return the latency quantile `share` in seconds, at most 5 % too high; None without answers."""
        left = share * self.latencies.total()
        for step, answers in sorted(self.latencies.items()):
            left -= answers
            if left <= 0:
                return math.exp(step * _LATENCY_STEP)
        return None

    def mean_s(self) -> float | None:
        """Return the mean latency in seconds, at most 5 % too high; None without answers."""
        total = sum(answers * math.exp(step * _LATENCY_STEP) for step, answers in self.latencies.items())
        return total / self.latencies.total() if self.latencies else None


@dataclass(frozen=True)
class LeaseReport:
    """What a lease reports to the ledger."""

    holder: str
    held: Amounts
    """Reserved by requests in flight, or unused."""
    wanted: Amounts
    """Missing for the requests that wait."""
    first: Amounts
    """Missing for the request that waits longest; 0 where the lease holds enough."""
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
    """Added to what the lease holds."""
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
    """Settled USD and what leases still hold: at the end of a run, the leases of dead processes."""
    traffic: Traffic
    failure: str | None
    warnings: tuple[str, ...]
    """Distinct warnings, in order of arrival."""

    def facts(self) -> dict[str, Any]:
        """Return the manifest's figures of the endpoints."""
        traffic = self.traffic
        return {
            "answered": traffic.answered,
            "rate_limited": traffic.rate_limited,
            "failed": traffic.failed,
            "latency_s": {
                name: traffic.latency_s(share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
            },
            "warnings": list(self.warnings),
        }


@dataclass
class _Holder:
    seen: float
    held: Amounts
    in_flight: int = 0


class Ledger:
    """The accounts of one run.

    Args:
        spent_usd: what earlier runs spent of the same budget.
    """

    def __init__(self, limits: Limits, spent_usd: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        minutes = limits.window_s / 60
        self._window_s = limits.window_s
        self._clock = clock
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
        """Record a lease's report and grant it more."""
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
        return Grant(granted, self._failure)

    def extend_leases(self, seconds: float) -> None:
        """Let all leases last longer by a time during which the ledger took no reports."""
        for holder in self._holders.values():
            holder.seen += seconds

    @property
    def committed_usd(self) -> float:
        """Upper bound of the run's cost: what is spent and what leases hold; 0 without a budget."""
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

    def _expire(self, now: float) -> None:
        """Remove amounts that have left their window, and leases that were not renewed."""
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
        lower = ", or lower the model's max_tokens or retry_max_tokens (null: twice max_tokens)"
        for name, setting in ((REQUESTS, "requests_per_minute"), (TOKENS, "tokens_per_minute")):
            most = self._bounds.get(name, math.inf)
            if report.first.get(name, 0.0) > most:
                return (
                    f"limits.{setting}: a window of {self._window_s:g} s holds {most:g} {name}, one request may need "
                    f"{report.first[name]:g}; raise it{lower if name == TOKENS else ''}"
                )
        budget, spent = self._bounds.get(USD, math.inf), self._used.get(USD, 0.0)
        if report.first.get(USD, 0.0) > budget - spent:
            return f"limits.budget_usd={budget:g}: used up ({spent:.4f} USD spent); raise it"
        return None

    def _divide(self, report: LeaseReport) -> Amounts:
        """Return the lease's part of what is free: first for requests that wait, then as an advance."""
        free = {name: max(0.0, self._free(name)) for name in self._bounds}
        part = min([1.0, *(free[name] / wanted for name, wanted in report.wanted.items() if wanted > 0)])
        # Grant whole requests only: fractions of a request, spread over leases, would let none of them send.
        if any(free[name] < first for name, first in report.first.items()):
            part = 0.0
        granted: Amounts = {}
        for name in self._bounds:
            now = max(part * report.wanted[name], report.first[name] if part else 0.0)
            granted[name] = now + min(report.ahead[name], (free[name] - now) / (4 * len(self._holders)))
        return granted

    def _free(self, name: str) -> float:
        return self._bounds[name] - self._used[name] - sum(holder.held[name] for holder in self._holders.values())
