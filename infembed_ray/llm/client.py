"""Client of OpenAI-compatible endpoints: journaled, rate-limited, with retries and fail-over between endpoints.

It uses aiohttp's connections (module `transport`) and plain dicts. The `openai` client costs 1.0-2.5 ms of CPU a request
instead of 0.1 to 0.2 ms, which would make it the bottleneck of a fan-out.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import aiohttp

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.chat import Completion, Dialect, Request, RowFailure, RunFailure
from infembed_ray.llm.endpoint import CHAT, ErrorBody, RateLimited, Route, ServerError, Unanswered, WireFormat, one_line
from infembed_ray.llm.gates import Gate
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.lease import RateLimiter
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.rate_limits import REQUESTS, TOKENS, USD, Amounts, used_by
from infembed_ray.llm.transport import Transport

T = TypeVar("T")

BACKOFF_S = 0.5
"""Longest pause before the first retry; it doubles with each further retry, up to BACKOFF_CAP_S."""
BACKOFF_CAP_S = 60.0
FAULTS_TO_REST = 3
"""Consecutive faults after which an endpoint rests while another one is available."""

_UNSENT: Amounts = {REQUESTS: 0, TOKENS: 0, USD: 0.0}
_UNPAID: Amounts = {REQUESTS: 1, TOKENS: 0, USD: 0.0}  # used by a request that was certainly not answered


class ChatClient:
    """Chat completions from one or more endpoints. Use it within one event loop.

    Keys come from this machine's environment and are read only when something must be sent.

    Args:
        endpoints: all serve the models. The retries and patience of the first one apply.
        journal: read before a request is sent, and written before its answer is used.
        limiter: enforces the limits. A request that waits for its retry is not in flight.
        learn: called before the first request is sent; returns the dialects of each endpoint's models, and raises
            RunFailure if a model cannot be asked. None: parameters are sent as they are.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        journal: Journal,
        limiter: RateLimiter,
        table: PriceTable,
        wire: WireFormat = CHAT,
        learn: Callable[[], Awaitable[Sequence[Mapping[str, Dialect]]]] | None = None,
    ) -> None:
        self._wire = wire
        self._routes = [_RestingRoute(endpoint, wire.path, limiter) for endpoint in endpoints]
        self._patience_s, self._max_retries = endpoints[0].patience_s, endpoints[0].max_retries
        self._journal = journal
        self._limiter = limiter
        self._table = table
        self._transport: Transport | None = None
        self._asking: dict[str, asyncio.Future[Completion]] = {}
        self._learn = learn
        self._learning = asyncio.Lock()

    async def complete(self, request: Request) -> Completion:
        """Return the completion of a request: from the journal, from an equal request in flight, or from an endpoint.

        Raises:
            RowFailure: the endpoint refuses this request, or every retry failed.
            RunFailure: the endpoints refuse all requests (key, model, quota) or cannot be reached, the budget is used
                up, the journal fails, or another process met such a failure. From then on, nothing more is sent.
        """
        try:
            known = self._journal.get(*request.keys)
        except RunFailure as failure:
            self._limiter.fail(str(failure))
            raise
        if known is not None:
            return known
        twin = self._asking.get(request.key)
        if twin is not None:
            return replace(await asyncio.shield(twin), replayed=True)
        asking = self._asking[request.key] = asyncio.get_running_loop().create_future()
        try:
            completion = await self.send(request)
            await self._journal.append(request, completion)
        except Exception as failure:
            if isinstance(failure, RunFailure):  # the journal cannot be written
                self._limiter.fail(str(failure))
            asking.set_exception(failure)
            asking.exception()  # it is no error if there is no twin
            raise
        finally:
            del self._asking[request.key]
        asking.set_result(completion)
        return completion

    @property
    def busy(self) -> bool:
        """Whether some `complete` has not returned yet."""
        return bool(self._asking)

    async def close(self) -> None:
        """Close all connections and report what was used. The next request opens new connections."""
        await self.disconnect()
        await self._limiter.flush()

    async def disconnect(self) -> None:
        """Close all connections; requests in flight fail."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def send(self, request: Request) -> Completion:
        """Send a request within the limits, with retries, and without the journal; raises as `complete` does."""
        if self._learn is not None:
            await self._learn_dialects()
        cost = self._wire.worst_case(request, self._table)
        tries = _Tries()
        while True:
            route, gate = await self._enter(request.model, cost)
            used, limited = cost, False
            sent = time.monotonic()
            try:
                completion = await self._attempt(route, gate, request, tries)
                used = used_by(request, completion, self._table) or cost
                self._limiter.traffic.add_answer(time.monotonic() - sent)
                return completion
            except Unanswered as failure:
                tries.took_s += time.monotonic() - sent
                used = cost if failure.paid else _UNPAID
                limited = isinstance(failure, RateLimited)
                pause_s = self._pause_after(failure, route, request.model, tries)
            except (RowFailure, RunFailure) as failure:
                used = _UNPAID
                self._limiter.traffic.failed += 1
                if isinstance(failure, RowFailure):
                    raise
                self._drop(route, failure)
                pause_s = 0.0
            finally:
                self._limiter.settle(cost, used, sent)
                gate.leave(limited)
            if pause_s:
                tries.took_s += pause_s
                await self._limiter.pause(pause_s)

    async def _learn_dialects(self) -> None:
        async with self._learning:
            if self._learn is None or self._limiter.failure is not None:
                return
            try:
                learned = await self._learn()
            except RunFailure as failure:
                self._limiter.fail(str(failure))
                raise
            for route, dialects in zip(self._routes, learned, strict=True):
                route.dialects = dialects
            self._learn = None

    async def _enter(self, model: str, cost: Amounts) -> tuple[_RestingRoute, Gate]:
        """Wait until a request with this worst case may be sent; return the endpoint and the gate, to be left afterwards."""
        await self._limiter.enter(cost)
        route = self._choose(model)
        gate = route.gate(model)
        if not gate.take(cost):
            self._limiter.settle(cost, _UNSENT, time.monotonic())  # another model may use the slot meanwhile
            await gate.wait(cost)
            try:
                await self._limiter.enter(cost)
            except RunFailure:
                gate.leave(limited=False)
                raise
        return route, gate

    async def _attempt(self, route: _RestingRoute, gate: Gate, request: Request, tries: _Tries) -> Completion:
        if self._transport is None:
            self._transport = Transport()
        headers = {}
        if route.endpoint.idempotency_header is not None:
            # A new key after an error: endpoints that remember answers may remember errors as well.
            key = f"{request.key}-{tries.errors}" if tries.errors else request.key
            headers = {route.endpoint.idempotency_header: key}
        try:
            response = await self._transport.post(route.address(request.model), route.body(request), headers)
        except asyncio.TimeoutError as error:
            raise Unanswered(f"no answer within {route.endpoint.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"connection failed: {one_line(error)}") from error
        route.reached = True
        if time.monotonic() >= gate.read_at:
            gate.read(response.headers)
        if not 200 <= response.status < 300:
            raise route.failure(request, response.status, response.headers, response.body)
        try:
            completion = self._wire.parse(response.body)
        except ErrorBody as error:
            raise route.failure(request, error.status, response.headers, error.body) from error
        route.answered = True
        route.faults = 0
        return completion

    def _pause_after(self, failure: Unanswered, route: _RestingRoute, model: str, tries: _Tries) -> float:
        """Return the seconds to wait after a failed attempt; raise if there must be no further attempt."""
        tries.failed += 1
        tries.errors += isinstance(failure, ServerError)
        pause = pause_s(tries.failed - 1, failure.retry_after_s)
        if isinstance(failure, RateLimited):
            self._limiter.traffic.rate_limited += 1
            if tries.took_s > self._patience_s:
                raise RowFailure(f"{failure}; tried {tries.failed} times in {self._patience_s:g} s") from failure
            gate = route.gate(model)
            gate.rests_until = max(gate.rests_until, time.monotonic() + pause)
        else:
            self._limiter.traffic.failed += 1
            tries.faults += 1
            if tries.faults > self._max_retries:
                if not any(each.reached for each in self._routes):
                    unreachable = f"endpoint.base_url={route.endpoint.base_url}: cannot be reached ({failure})"
                    self._limiter.fail(unreachable)
                    raise RunFailure(unreachable) from failure
                raise RowFailure(f"{failure}; tried {tries.failed} times") from failure
            route.count_fault()
        now = time.monotonic()
        if any(other.wakes_at(model) <= now for other in self._routes if other is not route):
            return 0.0
        left_s = max(0.0, self._patience_s - tries.took_s)
        if failure.retry_after_s > left_s:
            wait = f"asks to wait {failure.retry_after_s:.0f} s, and endpoint.patience_s leaves {left_s:.0f}"
            raise RowFailure(f"{failure}; {wait}; tried {tries.failed} times") from failure
        return pause

    def _drop(self, route: _RestingRoute, failure: RunFailure) -> None:
        """Stop using an endpoint that refuses all requests; stop the run if it is the last one."""
        if not any(other is not route for other in self._routes):
            self._limiter.fail(str(failure))  # before another request takes the slot
            raise failure
        if route in self._routes:
            self._routes.remove(route)
            self._limiter.warn(f"{failure}; the other endpoints stand in")

    def _choose(self, model: str) -> _RestingRoute:
        """Choose an awake endpoint by weight, if possible one that takes a request now, or the one that wakes first."""
        if len(self._routes) == 1:
            return self._routes[0]
        now = time.monotonic()
        awake = [route for route in self._routes if route.wakes_at(model) <= now]
        if not awake:
            return min(self._routes, key=lambda route: route.wakes_at(model))
        awake = [route for route in awake if not route.gate(model).full] or awake
        return random.choices(awake, [route.endpoint.weight for route in awake])[0]


@dataclass
class _Tries:
    """The attempts at one request."""

    took_s: float = 0.0
    """Time of the attempts and of the pauses after them, without that in queues."""
    failed: int = 0
    faults: int = 0
    """Failed attempts other than 429s, which say nothing about the request."""
    errors: int = 0
    """HTTP 5xx responses."""


class _RestingRoute(Route):
    """An endpoint that rests after repeated faults, with a gate for each model."""

    def __init__(self, endpoint: Endpoint, path: str, limiter: RateLimiter) -> None:
        super().__init__(endpoint, path)
        self._limiter = limiter
        self._gates: dict[str, Gate] = {}

    reached = False
    """Whether it has sent any HTTP response."""
    faults = 0
    """Consecutive faults."""
    rests_until = 0.0

    def gate(self, model: str) -> Gate:
        """Return the limits of a model at this endpoint."""
        if model not in self._gates:
            used_up = (
                f"model {model}: the rate-limit headers of {self.endpoint.base_url} say that its quota is used up; its requests "
                "wait for the reset, and go one at a time until the headers leave more"
            )
            self._gates[model] = Gate(self._limiter.slots, self._limiter.pause, partial(self._limiter.warn, used_up))
        return self._gates[model]

    def wakes_at(self, model: str) -> float:
        """Return the time from which the endpoint should be asked for a model again."""
        return max(self.rests_until, self.gate(model).rests_until)

    def count_fault(self) -> None:
        """Count a fault; after several, prefer other endpoints for a while."""
        self.faults += 1
        if self.faults >= FAULTS_TO_REST:
            pause_s = _longest_pause_s(self.faults - FAULTS_TO_REST)
            self.rests_until = max(self.rests_until, time.monotonic() + pause_s)


def _longest_pause_s(attempt: int) -> float:
    return min(BACKOFF_CAP_S, BACKOFF_S * 2.0 ** min(attempt, 10))


def pause_s(attempt: int, retry_after_s: float) -> float:
    """Return the pause after failed attempt `attempt` (from 0): what the server asks for, plus back-off with jitter."""
    return retry_after_s + random.uniform(0.0, _longest_pause_s(attempt))


def run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own, because a notebook's thread has a loop already. Ctrl-C cancels it."""
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        tasks.append((asyncio.get_running_loop(), task))
        return await coroutine

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, cancellable())
        try:
            return running.result()
        except KeyboardInterrupt:
            for loop, task in tasks:
                loop.call_soon_threadsafe(task.cancel)
            raise
