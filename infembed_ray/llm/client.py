"""Client of OpenAI-compatible endpoints: journaled, rate-limited, with retries and fail-over between endpoints.

The `openai` client would cost 1.0-2.5 ms of CPU per request; aiohttp's connections and plain dicts cost 0.1-0.2 ms.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import aiohttp

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.chat import CAP, Completion, Request, RowFailure, RunFailure
from infembed_ray.llm.endpoint import (
    ErrorBody,
    RateLimited,
    Route,
    Unanswered,
    one_line,
    parse_completion,
    short_question,
)
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.lanes import Lane
from infembed_ray.llm.ledger import REQUESTS, TOKENS, USD, Amounts, RateLimiter, used_by, worst_case
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.transport import Transport

T = TypeVar("T")

BACKOFF_S = 0.5
"""Longest pause before the first retry; it doubles with each further retry, up to BACKOFF_CAP_S."""
BACKOFF_CAP_S = 60.0
FAULTS_TO_REST = 3
"""Consecutive faults after which an endpoint rests while another one is available."""

_UNSENT: Amounts = {REQUESTS: 0, TOKENS: 0, USD: 0.0}
_UNPAID: Amounts = {REQUESTS: 1, TOKENS: 0, USD: 0.0}  # used by a request that was certainly not answered


class _Adapted(Unanswered):
    """The endpoint refused a parameter, which the next attempt leaves out or renames."""


class ChatClient:
    """Chat completions from one or more endpoints. Use it within one event loop.

    Keys come from this machine's environment and are read only when something must be sent.

    Args:
        endpoints: all serve the models. The retries and patience of the first one apply.
        journal: read before a request is sent, and written before its answer is used.
        limiter: enforces the limits. A request that waits for its retry is not in flight.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], journal: Journal, limiter: RateLimiter, table: PriceTable
    ) -> None:
        self._routes = [_LearningRoute(endpoint, limiter.slots) for endpoint in endpoints]
        self._patience_s, self._max_retries = endpoints[0].patience_s, endpoints[0].max_retries
        self._journal = journal
        self._limiter = limiter
        self._table = table
        self._transport: Transport | None = None
        self._asking: dict[str, asyncio.Future[Completion]] = {}

    async def complete(self, request: Request) -> Completion:
        """Return the completion of a request: from the journal, from an equal request in flight, or from an endpoint.

        Raises:
            RowFailure: the endpoint refuses this request, or every retry failed, while it answers others.
            RunFailure: the endpoints refuse all requests (key, model, quota) or have not answered for `patience_s`, the
                budget is used up, the journal fails, or another process met such a failure. From then on, nothing
                more is sent.
        """
        try:
            replayed = self._journal.get(*request.keys)
        except RunFailure as failure:
            self._limiter.fail(str(failure))
            raise
        if replayed is not None:
            return replayed
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
        tries = _Tries()
        while True:
            failure: Unanswered | RowFailure | None = None
            route, lane, cost = await self._enter(request)
            used = cost
            sent = time.monotonic()
            try:
                completion = await self._attempt(route, lane, request)
                used = used_by(request, completion, self._table) or cost
                self._limiter.traffic.answered += 1
                self._limiter.traffic.answered_s += time.monotonic() - sent
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
                lane.leave(isinstance(failure, RateLimited))
            if failure is None or isinstance(failure, _Adapted):
                continue
            tries.took_s += time.monotonic() - sent
            if pause := await self._pause_after(failure, route, request, tries):
                tries.took_s += pause
                await self._limiter.pause(pause)

    async def _enter(self, request: Request) -> tuple[_LearningRoute, Lane, Amounts]:
        """Wait until a request may be sent; return the endpoint, the lane, to be left afterwards, and the worst case."""
        cost = worst_case(request, self._table)
        await self._limiter.enter(cost)
        route = self._choose(request.model)
        lane = route.lane(request.model)
        if not lane.full:
            await lane.enter()
            return route, lane, cost
        self._limiter.settle(cost, _UNSENT, time.monotonic())  # another model may use the slot meanwhile
        await lane.enter()
        try:
            await self._limiter.enter(cost)
        except RunFailure:
            lane.leave(limited=False)
            raise
        return route, lane, cost

    async def _attempt(self, route: _LearningRoute, lane: Lane, request: Request) -> Completion:
        if self._transport is None:
            self._transport = Transport()
        body = lane.dialect.encoded(request)
        try:
            response = await self._transport.post(route.target(request.model), body)
        except asyncio.TimeoutError as error:
            raise Unanswered(f"no answer within {route.endpoint.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"connection failed: {one_line(error)}") from error
        route.reached = True
        status, refusal = response.status, response.body
        if 200 <= status < 300:
            try:
                completion = parse_completion(response.body)
            except ErrorBody as error:
                status, refusal = error.status, error.body
            else:
                lane.answered_steps.add(request.step)
                lane.note(None)
                if completion.completion_tokens > request.parameters.get(CAP, math.inf):
                    self._limiter.warn(
                        f"model {request.model}: answers may exceed max_tokens, which the endpoint ignores"
                    )
                return completion
        failure = route.failure(request, status, response.headers, refusal)
        if status in (400, 422) and isinstance(failure, RowFailure) and request.step not in lane.answered_steps:
            change = lane.dialect.learn(request, body, refusal)
            if change:
                self._limiter.warn(f"{route.endpoint.base_url}: {request.model} {change}")
            if change is not None:
                raise _Adapted(str(failure), paid=False)
        raise failure

    async def _pause_after(
        self, failure: Unanswered | RowFailure, route: _LearningRoute, request: Request, tries: _Tries
    ) -> float:
        """Return the seconds to wait after a failed attempt; raise if there must be no further attempt.

        A row fails only if its endpoint answers others; see `_fault`. An endpoint that refuses them all is dropped. If no
        endpoint answers, the request is retried for `patience_s`; then the run fails.
        """
        lane = route.lane(request.model)
        if isinstance(failure, RowFailure):
            fault = await self._fault(route, request)
            if not isinstance(fault, Unanswered):
                self._limiter.traffic.failed += 1
                if fault is None:
                    raise failure
                self._drop(route, fault)
                return 0.0
            failure = fault  # ask again when the endpoint is back
        tries.failed += 1
        pause = pause_s(tries.failed - 1, failure.retry_after_s)
        limited = isinstance(failure, RateLimited)
        now = time.monotonic()
        if limited:
            self._limiter.traffic.rate_limited += 1
            lane.rests_until = max(lane.rests_until, now + pause)
        else:
            self._limiter.traffic.failed += 1
            tries.faults += 1
            lane.faults += 1
            if lane.faults >= FAULTS_TO_REST:
                lane.rests_until = max(lane.rests_until, now + _longest_pause_s(lane.faults - FAULTS_TO_REST))
        given_up = tries.faults > self._max_retries or tries.took_s > self._patience_s
        others = (other.lane(request.model).rests_until for other in self._routes if other is not route)
        others_wake_at = min(others, default=math.inf)
        if not given_up and others_wake_at <= now:
            return 0.0
        left_s = self._patience_s - tries.took_s
        wait_s = min(failure.retry_after_s, others_wake_at - now)
        if wait_s <= left_s and not given_up:
            return max(wait_s, min(pause, others_wake_at - now, left_s))
        longest_s = await self._give_up(failure, route, request, tries, wait_s)
        return min(pause, longest_s) if longest_s else pause

    async def _give_up(
        self, failure: Unanswered, route: _LearningRoute, request: Request, tries: _Tries, wait_s: float
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

    async def _fault(self, route: _LearningRoute, request: Request) -> Unanswered | RunFailure | None:
        """Ask a short question; return why the endpoint does not answer it, or None.

        Concurrent calls share a question, and an answer to any other request to the model replaces it.
        """
        lane, now = route.lane(request.model), time.monotonic()
        async with lane.asking:
            while lane.noted < now:
                probe = short_question(request)
                cost = worst_case(probe, self._table)
                await self._limiter.enter(cost)
                used, began = _UNPAID, time.monotonic()
                try:
                    answer = await self._attempt(route, lane, probe)
                    used = used_by(probe, answer, self._table) or cost
                except _Adapted:
                    continue
                except Unanswered as failure:
                    used = cost if failure.paid else _UNPAID
                    lane.note(failure)
                except RunFailure as failure:
                    lane.note(failure)
                except RowFailure as failure:
                    url = route.endpoint.base_url
                    refusal = f"refuses every request to {request.model}, also a short question ({failure})"
                    lane.note(
                        RunFailure(f"endpoint.base_url={url}: {refusal}; correct the model's settings, or the account")
                    )
                finally:
                    self._limiter.settle(cost, used, began)
            return lane.fault

    def _fail(self, failure: str, cause: Exception) -> NoReturn:
        """Stop the run."""
        self._limiter.fail(failure)
        raise RunFailure(failure) from cause

    def _drop(self, route: _LearningRoute, failure: RunFailure) -> None:
        """Stop using an endpoint that refuses all requests; stop the run if it is the last one."""
        if not any(other is not route for other in self._routes):
            self._limiter.fail(str(failure))  # before another request takes the slot
            raise failure
        if route in self._routes:
            self._routes.remove(route)
            self._limiter.warn(f"{failure}; the other endpoints stand in")

    def _choose(self, model: str) -> _LearningRoute:
        """Choose an awake endpoint at random, if possible one that takes a request now, or the one that wakes first."""
        if len(self._routes) == 1:
            return self._routes[0]
        now = time.monotonic()
        awake = [route for route in self._routes if route.lane(model).rests_until <= now]
        if not awake:
            return min(self._routes, key=lambda route: route.lane(model).rests_until)
        return random.choice([route for route in awake if not route.lane(model).full] or awake)


@dataclass
class _Tries:
    """The attempts at one request."""

    took_s: float = 0.0
    """Time of the attempts and of the pauses after them, without that in queues."""
    failed: int = 0
    faults: int = 0
    """Failed attempts other than 429s, which say nothing about the request."""


class _LearningRoute(Route):
    """An endpoint with a lane for each model."""

    reached = False
    """Whether it has sent any HTTP response."""

    def __init__(self, endpoint: Endpoint, slots: int) -> None:
        super().__init__(endpoint)
        self._slots = slots
        self._lanes: dict[str, Lane] = {}

    def lane(self, model: str) -> Lane:
        """Return what is known of a model at this endpoint."""
        if model not in self._lanes:
            self._lanes[model] = Lane(self.endpoint, self._slots)
        return self._lanes[model]


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
