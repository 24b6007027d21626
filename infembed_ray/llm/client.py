"""Client of an OpenAI-compatible endpoint: journaled, rate-limited, with retries.

The `openai` client would cost 1.0-2.5 ms of CPU per request; aiohttp's connections and plain dicts cost 0.1-0.2 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import aiohttp

from infembed_ray import ray_compat
from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.chat import CAP, Completion, Request, RowFailure, RunFailure
from infembed_ray.llm.endpoint import (
    ErrorBody,
    RateLimited,
    Route,
    Transport,
    Unanswered,
    one_line,
    parse_completion,
    short_question,
    with_proxy,
)
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.lanes import Lane
from infembed_ray.llm.ledger import REQUESTS, TOKENS, USD, Amounts, RateLimiter, used_by, worst_case
from infembed_ray.llm.prices import PriceTable

T = TypeVar("T")

BACKOFF_S = 0.5
"""Longest pause before the first retry; it doubles with each further retry, up to BACKOFF_CAP_S."""
BACKOFF_CAP_S = 60.0

DRAIN_S = 30.0
"""Seconds until an actor whose driver was killed cuts off requests that are still unanswered. Ray's core ends a process that
has found no control store for 60 s."""
RAY_ENVIRONMENT = ray_compat.raylet_death_check(2 * DRAIN_S)
"""Environment of an actor that drains, so that Ray's check for a dead raylet comes after the drain."""
_POLL_S = 0.01

_UNSENT: Amounts = {REQUESTS: 0, TOKENS: 0, USD: 0.0}
_UNPAID: Amounts = {REQUESTS: 1, TOKENS: 0, USD: 0.0}  # used by a request that was certainly not answered


class _Adapted(Unanswered):
    """The endpoint refused a parameter, which the next attempt leaves out or renames."""


class ChatClient:
    """Chat completions from an endpoint. Use it within one event loop.

    The key comes from this machine's environment and is read only when something must be sent.

    Args:
        journal: read before a request is sent, and written before its answer is used.
        limiter: enforces the limits. A request that waits for its retry is not in flight.
    """

    def __init__(self, endpoint: Endpoint, journal: Journal, limiter: RateLimiter, table: PriceTable) -> None:
        self._endpoint = endpoint
        self._route = Route(endpoint)
        self._reached = False
        """Whether the endpoint has sent any HTTP response."""
        self._lanes = defaultdict[str, Lane](lambda: Lane(endpoint, limiter.slots, careful=limiter.has_budget))
        self._journal = journal
        self._limiter = limiter
        self._table = table
        self._transport: Transport | None = None
        self._asking: dict[str, asyncio.Future[Completion]] = {}

    async def complete(self, request: Request) -> Completion:
        """Return the completion of a request: from the journal, from an equal request in flight, or from an endpoint.

        Raises:
            RowFailure: the endpoint refuses this request, or every retry failed, while it answers others.
            RunFailure: the endpoint refuses all requests (key, model, quota) or has not answered for `patience_s`, the budget
                is used up, the journal fails, or another process met such a failure. From then on, nothing more is sent.
        """
        try:
            replayed = self._journal.get(*request.keys)
        except RunFailure as failure:
            self._limiter.fail(str(failure))
            raise
        if replayed is not None:
            return replayed
        if (twin := self._asking.get(request.key)) is not None:
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
            lane, cost = await self._enter(request)
            used, sent = cost, time.monotonic()
            try:
                completion = await self._attempt(lane, request)
                used = used_by(request, completion, self._table) or cost
                self._limiter.traffic.answered += 1
                self._limiter.traffic.answered_s += time.monotonic() - sent
                return completion
            except (Unanswered, RowFailure) as fault:
                failure, used = fault, cost if isinstance(fault, Unanswered) and fault.paid else _UNPAID
            except RunFailure as refused:
                used = _UNPAID
                self._limiter.traffic.failed += 1
                self._limiter.fail(str(refused))  # before another request takes the slot
                raise
            finally:
                self._limiter.settle(cost, used, sent)
                lane.leave(isinstance(failure, RateLimited))
            if isinstance(failure, _Adapted):
                continue
            tries.took_s += time.monotonic() - sent
            pause = await self._pause_after(failure, lane, request, tries)
            tries.took_s += pause
            await self._limiter.pause(pause)

    async def _enter(self, request: Request) -> tuple[Lane, Amounts]:
        """Wait until a request may be sent; return the lane, to be left afterwards, and the worst case."""
        lane = self._lanes[request.model]
        await lane.enter()
        try:
            while True:
                learned = lane.added, lane.longest
                cost = worst_case(request, self._table, *learned)
                await self._limiter.enter(cost)
                if learned == (lane.added, lane.longest):
                    return lane, cost
                self._limiter.settle(cost, _UNSENT, time.monotonic())  # other answers showed a worse case meanwhile
        except RunFailure:
            lane.leave(limited=False)
            raise

    async def _attempt(self, lane: Lane, request: Request) -> Completion:
        if self._transport is None:
            self._transport = Transport()
        body = lane.dialect.encoded(request)
        try:
            response = await self._transport.post(self._route.target, body)
        except (asyncio.TimeoutError, aiohttp.ClientError, OSError) as error:
            unreadable = isinstance(error, aiohttp.ClientPayloadError)
            self._reached |= unreadable
            fault = f"{'unreadable response' if unreadable else 'connection failed'}: {one_line(error) or repr(error)}"
            if isinstance(error, asyncio.TimeoutError):
                fault = f"no answer within {self._endpoint.timeout_s:g} s"
            raise Unanswered(f"{fault} [{with_proxy(str(self._route.target.url))}]") from error
        self._reached = True
        status, refusal = response.status, response.body
        if 200 <= status < 300:
            try:
                completion = self._checked(lane, request, parse_completion(response.body))
            except ErrorBody as error:
                status, refusal = error.status, error.body
            except Unanswered as error:
                raise Unanswered(f"{self._route.said(request, status, refusal)}: {error}") from error
            else:
                lane.answered_steps.add(request.step)
                lane.note(None)
                return completion
        failure = self._route.failure(request, status, response.headers, refusal)
        if status in (400, 422) and isinstance(failure, RowFailure) and request.step not in lane.answered_steps:
            change = lane.dialect.learn(request, body, refusal)
            if change:
                self._limiter.warn(f"{self._endpoint.base_url}: {request.model} {change}")
            if change is not None:
                raise _Adapted(str(failure), paid=False)
        raise failure

    def _checked(self, lane: Lane, request: Request, completion: Completion) -> Completion:
        """Learn from an answer that exceeds its worst case, and warn about what it does not say."""
        answers = f"model {request.model}: answers"
        if lane.exceeded(request, completion):
            ignored = "may exceed max_tokens, which the endpoint ignores"
            self._limiter.warn(f"{answers} {ignored}; budgets expect twice as long ones")
        if not completion.prompt_tokens:
            effect = "their price is null, budgets count the worst case"
            self._limiter.warn(f"{answers} have no usable token counts: {effect}")
        if completion.finish_reason:
            return completion
        self._limiter.warn(f"{answers} have no finish_reason: only by its length is one known to be cut off")
        cut_off = completion.completion_tokens >= request.parameters.get(CAP, math.inf)
        return replace(completion, finish_reason="length") if cut_off else completion

    async def _pause_after(
        self, failure: Unanswered | RowFailure, lane: Lane, request: Request, tries: _Tries
    ) -> float:
        """Return the seconds to wait after a failed attempt; raise if there must be no further attempt.

        A row fails only if the endpoint answers others; see `_fault`. Otherwise the request is retried for `patience_s`; then
        the run fails.
        """
        if isinstance(failure, RowFailure):
            if (fault := await self._fault(lane, request)) is None:
                self._limiter.traffic.failed += 1
                raise failure
            failure = fault  # ask again when the endpoint is back
        limited, patience_s = isinstance(failure, RateLimited), self._endpoint.patience_s
        self._limiter.traffic.rate_limited += limited
        self._limiter.traffic.failed += not limited
        tries.failed += 1
        tries.faults += not limited
        left_s, pause = patience_s - tries.took_s, pause_s(tries.failed - 1, failure.retry_after_s)
        if failure.retry_after_s <= left_s and tries.faults <= self._endpoint.max_retries:
            return min(pause, left_s)
        where = f"endpoint.base_url={self._endpoint.base_url}"
        if not limited and not self._reached:
            self._fail(f"{where}: cannot be reached ({failure}); start it, or correct the URL", failure)
        if failure.retry_after_s > patience_s:
            remedy = "raise endpoint.patience_s, or run it later"
            self._fail(f"{where}: asks to wait {failure.retry_after_s:.0f} s ({failure}); {remedy}", failure)
        if await self._fault(lane, request) is None:
            if limited or tries.faults > self._endpoint.max_retries:
                raise RowFailure(f"{failure}; tried {tries.failed} times in {tries.took_s:.0f} s") from failure
        elif failure.retry_after_s > left_s or left_s <= 0:
            silence = f"no answer to {request.model} in {tries.took_s:.0f} s ({failure})"
            self._fail(f"{where}: {silence}; mend it, or raise endpoint.patience_s", failure)
        else:
            tries.faults = 0  # an outage says nothing about the request
            return min(pause, left_s)
        return pause

    async def _fault(self, lane: Lane, request: Request) -> Unanswered | None:
        """Ask a short question; return why the endpoint does not answer it now, or None; RunFailure if it refuses it.

        Concurrent calls share a question, and an answer to any other request to the model replaces it.
        """
        now = time.monotonic()
        async with lane.asking:
            while lane.noted < now:
                probe = short_question(request)
                cost = worst_case(probe, self._table, lane.added, lane.longest)
                await self._limiter.enter(cost)
                used, began = _UNPAID, time.monotonic()
                try:
                    answer = await self._attempt(lane, probe)
                    used = used_by(probe, answer, self._table) or cost
                except _Adapted:
                    continue
                except Unanswered as failure:
                    used = cost if failure.paid else _UNPAID
                    lane.note(failure)
                except RunFailure as failure:
                    lane.note(failure)
                except RowFailure as failure:
                    refusal = f"refuses every request to {request.model}, also a short question ({failure})"
                    remedy = "correct the model's settings, or the account"
                    lane.note(RunFailure(f"endpoint.base_url={self._endpoint.base_url}: {refusal}; {remedy}"))
                finally:
                    self._limiter.settle(cost, used, began)
        if isinstance(lane.fault, RunFailure):
            self._fail(str(lane.fault), lane.fault)
        return lane.fault

    def _fail(self, failure: str, cause: Exception) -> NoReturn:
        """Stop the run."""
        self._limiter.fail(failure)
        raise RunFailure(failure) from cause


@dataclass
class _Tries:
    """The attempts at one request."""

    took_s: float = 0.0
    """Time of the attempts and of the pauses after them, without that in queues."""
    failed: int = 0
    faults: int = 0
    """Failed attempts other than 429s, which say nothing about the request."""


class DriverWatch:
    """Drains an actor whose driver was killed: it sends nothing more, journals the answers in flight, and exits.

    Without it, the actors of a cluster that dies with its driver would send for two more seconds and lose the last answers. A
    cluster that outlives the driver ends its actors at once; their requests in flight are sent again by the next run. Use it
    within the actor's event loop.

    Args:
        driver: its process id; None does not watch it.
        exit_process: ends the process without clean-up, which would wait for the dead cluster.
    """

    def __init__(
        self,
        driver: int | None,
        limiter: RateLimiter,
        client: ChatClient,
        journal: Journal,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._driver = driver
        self._limiter = limiter
        self._client = client
        self._journal = journal
        self._exit = exit_process
        self._draining: asyncio.Task[None] | None = None

    @property
    def died(self) -> bool:
        """Whether the driver is dead, so this process is about to exit."""
        return self._draining is not None

    def watch(self) -> None:
        """Start watching; further calls have no effect."""
        driver, self._driver = self._driver, None
        with contextlib.suppress(OSError, AttributeError):  # no such process, or a sandbox or a Python without pidfd
            if driver is not None:
                process = os.pidfd_open(driver)
                asyncio.get_running_loop().add_reader(process, self._start_draining, process)

    def _start_draining(self, process: int) -> None:
        asyncio.get_running_loop().remove_reader(process)
        self._limiter.fail("the driver was killed")
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            with contextlib.suppress(OSError):
                self._journal.open()  # the run that resumes waits for processes that write to the journal
            deadline = time.monotonic() + DRAIN_S
            while self._client.busy and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S)
            await self._client.disconnect()
            while self._client.busy:
                await asyncio.sleep(_POLL_S)
        finally:
            self._exit(0)


def pause_s(attempt: int, retry_after_s: float) -> float:
    """Return the pause after failed attempt `attempt` (from 0): what the server asks for, plus back-off with jitter."""
    return retry_after_s + random.uniform(0.0, min(BACKOFF_CAP_S, BACKOFF_S * 2.0 ** min(attempt, 10)))


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
