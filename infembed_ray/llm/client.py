"""Client of OpenAI-compatible endpoints: journaled, rate-limited, with retries and fail-over between endpoints.

It uses aiohttp's connections (module `transport`) and plain dicts. The `openai` client costs 1.0-2.5 ms of CPU a request
instead of 0.1 to 0.2 ms, which would make it the bottleneck of a fan-out.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import aiohttp

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.chat import UNCAPPED, Completion, Dialect, Request, RowFailure, RunFailure
from infembed_ray.llm.endpoint import CHAT, ErrorBody, RateLimited, Route, ServerError, Unanswered, WireFormat, one_line
from infembed_ray.llm.gates import Gate
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.lease import RateLimiter
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.rate_limits import REQUESTS, TOKENS, USD, Amounts, used_by
from infembed_ray.llm.transport import Transport
from infembed_ray.llm.worst_cases import WorstCases

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
        self._worst = WorstCases(wire, table, limiter.budgeted, limiter.warn)

    async def complete(self, request: Request) -> Completion:
        """Return the completion of a request: from the journal, from an equal request in flight, or from an endpoint.

        Raises:
            RowFailure: the endpoint refuses this request, or every retry failed, while it answers others.
            RunFailure: the endpoints refuse all requests (key, model, quota) or have not answered for `patience_s`, the
                budget is used up, the journal fails, or another process met such a failure. From then on, nothing
                more is sent.
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
        tries = _Tries()
        while True:
            failure: Unanswered | RowFailure | None = None
            async with self._worst.room(request):
                route, gate, cost = await self._enter(request)
                used = cost
                sent = time.monotonic()
                try:
                    completion = await self._attempt(route, gate, request, tries)
                    used = used_by(request, completion, self._table) or cost
                    self._limiter.traffic.add_answer(time.monotonic() - sent)
                    return completion
                except Unanswered as unanswered:
                    failure = unanswered
                    used = cost if failure.paid else _UNPAID
                except RowFailure as refused:
                    failure, used = refused, _UNPAID
                except RunFailure as refused:
                    used = _UNPAID
                    self._limiter.traffic.failed += 1
                    self._drop(route, refused)
                finally:
                    self._limiter.settle(cost, used, sent)
                    gate.leave(isinstance(failure, RateLimited))
            if failure is None:
                continue
            tries.took_s += time.monotonic() - sent
            if pause := await self._pause_after(failure, route, request, tries):
                tries.took_s += pause
                await self._limiter.pause(pause)

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
                route.reached = bool(dialects)
            capped = [{model for model, dialect in each.items() if UNCAPPED not in dialect} for each in learned]
            self._worst.capped = set.intersection(*capped)
            self._learn = None

    async def _enter(self, request: Request) -> tuple[_RestingRoute, Gate, Amounts]:
        """Wait until a request may be sent; return the endpoint, the gate, to be left afterwards, and the worst case."""
        while True:
            cap = self._worst.cap(request)
            cost = self._worst.amounts(request, cap)
            await self._limiter.enter(cost)
            route = self._choose(request.model)
            gate = route.gate(request.model)
            if not gate.take(cost):
                self._limiter.settle(cost, _UNSENT, time.monotonic())  # another model may use the slot meanwhile
                await gate.wait(cost)
                try:
                    await self._limiter.enter(cost)
                except RunFailure:
                    gate.leave(limited=False)
                    raise
            if self._worst.cap(request) == cap:
                return route, gate, cost
            self._limiter.settle(cost, _UNSENT, time.monotonic())  # meanwhile a longer answer has arrived
            gate.leave(limited=False)

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
        route.faults = 0
        route.pulses[request.model].note(None)
        self._worst.learn(request, completion)
        return completion

    async def _pause_after(
        self, failure: Unanswered | RowFailure, route: _RestingRoute, request: Request, tries: _Tries
    ) -> float:
        """Return the seconds to wait after a failed attempt; raise if there must be no further attempt.

        A row fails only if its endpoint answers others; see `_fault`. An endpoint that refuses them all is dropped. If no
        endpoint answers, the request is retried for `patience_s`; then the run fails.
        """
        if isinstance(failure, RowFailure):
            fault = await self._fault(route, request)
            if not isinstance(fault, Unanswered):
                self._limiter.traffic.failed += 1
                if fault is None:
                    raise failure
                self._drop(route, fault)
                return 0.0
            failure = fault  # ask again when the endpoint is back
        model = request.model
        tries.failed += 1
        tries.errors += isinstance(failure, ServerError)
        pause = pause_s(tries.failed - 1, failure.retry_after_s)
        limited = isinstance(failure, RateLimited)
        if limited:
            self._limiter.traffic.rate_limited += 1
            gate = route.gate(model)
            gate.rests_until = max(gate.rests_until, time.monotonic() + pause)
        else:
            self._limiter.traffic.failed += 1
            tries.faults += 1
            route.count_fault()
        given_up = tries.faults > self._max_retries or tries.took_s > self._patience_s
        now = time.monotonic()
        others_wake_at = min((each.wakes_at(model) for each in self._routes if each is not route), default=math.inf)
        if not given_up and others_wake_at <= now:
            return 0.0
        left_s = self._patience_s - tries.took_s
        wait_s = min(failure.retry_after_s, others_wake_at - now)
        if wait_s <= left_s and not given_up:
            return max(wait_s, min(pause, others_wake_at - now, left_s))
        longest_s = await self._give_up(failure, route, request, tries, wait_s)
        return min(pause, longest_s) if longest_s else pause

    async def _give_up(
        self, failure: Unanswered, route: _RestingRoute, request: Request, tries: _Tries, wait_s: float
    ) -> float:
        """End the retries of a request: fail it if an endpoint answers others, or fail the run if the patience is over.

        Args:
            wait_s: the wait that the endpoints ask for.

        Returns:
            The longest pause if it is to be retried after all; 0: any.
        """
        limited, left_s = isinstance(failure, RateLimited), self._patience_s - tries.took_s
        where = f"endpoint.base_url={route.endpoint.base_url}"
        if not limited and not any(each.reached for each in self._routes):
            self._fail(f"{where}: cannot be reached ({failure}); start it, or correct the URL", failure)
        if wait_s > self._patience_s:
            remedy = "raise endpoint.patience_s, or run it later"
            self._fail(f"{where}: asks to wait {wait_s:.0f} s ({failure}); {remedy}", failure)
        for each in sorted(self._routes, key=lambda each: each is not route):
            fault = await self._fault(each, request)
            if isinstance(fault, RunFailure):
                self._drop(each, fault)
            elif fault is None:
                if limited or tries.faults > self._max_retries:
                    raise RowFailure(f"{failure}; tried {tries.failed} times in {tries.took_s:.0f} s") from failure
                return 0.0
        if wait_s > left_s or left_s <= 0:
            silence = f"no answer to {request.model} in {tries.took_s:.0f} s ({failure})"
            self._fail(f"{where}: {silence}; mend it, or raise endpoint.patience_s", failure)
        tries.faults = 0  # an outage says nothing about the request
        return left_s

    async def _fault(self, route: _RestingRoute, request: Request) -> Unanswered | RunFailure | None:
        """Ask a short question; return why the endpoint does not answer it, or None.

        Concurrent calls share a question, and an answer to any other request to the model replaces it.
        """
        pulse, now = route.pulses[request.model], time.monotonic()
        async with pulse.asking:
            if pulse.at < now:
                probe = self._wire.probe(request)
                cost = self._wire.worst_case(probe, self._table)
                await self._limiter.enter(cost)
                used, began = _UNPAID, time.monotonic()
                try:
                    answer = await self._attempt(route, route.gate(request.model), probe, _Tries())
                    used = used_by(probe, answer, self._table) or cost
                except Unanswered as failure:
                    used = cost if failure.paid else _UNPAID
                    pulse.note(failure)
                except RunFailure as failure:
                    pulse.note(failure)
                except RowFailure as failure:
                    pulse.note(
                        RunFailure(
                            f"endpoint.base_url={route.endpoint.base_url}: refuses every request to {request.model}, also a "
                            f"short question ({failure}); correct the model's settings, or the account"
                        )
                    )
                finally:
                    self._limiter.settle(cost, used, began)
            return pulse.fault

    def _fail(self, failure: str, cause: Exception) -> NoReturn:
        """Stop the run."""
        self._limiter.fail(failure)
        raise RunFailure(failure) from cause

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


@dataclass
class _Pulse:
    """Whether an endpoint answers requests to a model, as of its last answer or short question."""

    at: float = -math.inf
    fault: Unanswered | RunFailure | None = None
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def note(self, fault: Unanswered | RunFailure | None) -> None:
        """Note why a request was not answered now; None: it was answered."""
        self.at, self.fault = time.monotonic(), fault


class _RestingRoute(Route):
    """An endpoint that rests after repeated faults, with a gate for each model."""

    def __init__(self, endpoint: Endpoint, path: str, limiter: RateLimiter) -> None:
        super().__init__(endpoint, path)
        self._limiter = limiter
        self._gates: dict[str, Gate] = {}
        self.pulses: defaultdict[str, _Pulse] = defaultdict(_Pulse)
        """By model."""

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
