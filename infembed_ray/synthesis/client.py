"""Asking OpenAI-compatible endpoints: within the limits, patient with faults, never twice for the same thing.

Plain aiohttp and plain dicts: the `openai` client costs 1.0-2.5 ms of CPU a request against aiohttp's 0.2 ms, which
makes it the bottleneck of a fan-out; and six fields need no typed model that some local server's answers would fail.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import re
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from infembed_ray.config import Endpoint
from infembed_ray.synthesis.chat import (
    UNREADABLE,
    Complete,
    Completion,
    Request,
    RowFailure,
    RunFailure,
    Unjournaled,
    sound,
)
from infembed_ray.synthesis.journal import Journal
from infembed_ray.synthesis.limits import REQUESTS, TOKENS, USD, Amounts, Gate, worst_case
from infembed_ray.synthesis.prices import PriceTable

T = TypeVar("T")

BACKOFF_S = 0.5
"""Longest pause before the first retry; it doubles with each further one, up to BACKOFF_CAP_S."""
BACKOFF_CAP_S = 60.0
MOST_TOKENS = 10**8
"""A response that counts more tokens than this miscounts: no model reads or writes that many."""
OPENAI = "https://api.openai.com/"
FAULTS_TO_REST = 3
"""After so many faults in a row an endpoint rests, if there are others."""

_RETRYABLE = {408, 409, 425}  # and 429, and every 5xx
_MAYBE_PAID = {408, 502, 504, 520, 524}
"""Time-outs and faults of a gateway, which do not say whether the model behind it had answered."""

_SENT: Amounts = {REQUESTS: 1, TOKENS: 0, USD: 0.0}
"""What a request used of the limits that the endpoint says it did not answer."""


class Unanswered(Exception):
    """An attempt failed that may succeed later, not before `retry_after_s`.

    `paid`: it may have been paid for all the same, as nothing says that it was not answered.
    """

    def __init__(self, reason: str, paid: bool = True, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.paid = paid
        self.retry_after_s = retry_after_s


class _RateLimited(Unanswered):
    """The endpoint asks for fewer requests."""


class _ServerError(Unanswered):
    """The endpoint answered with an error of its own, which it may remember for an idempotency key."""


@dataclass(frozen=True)
class Wire:
    """What a kind of request is over HTTP."""

    path: str
    """Of the URL, after the endpoint's base."""
    read: Callable[[bytes], Completion]
    """What a response's body says; raises Unanswered where it says nothing."""
    worst_case: Callable[[Request, PriceTable], Amounts]
    """The most that a request can use."""


class ChatClient:
    """Chat completions from some endpoints, through a journal. Use it within one event loop.

    The keys come from this machine's environment, and only when something must be sent.

    Args:
        endpoints: which of them serve the models. The first one's retries and patience count.
        journal: looked up before anything is sent, appended to before an answer is used.
        gate: keeps the limits. A request that waits for its retry is not in flight.
        table: prices, for what a request costs at worst.
        wire: chat completions; or what else is asked.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        journal: Journal,
        gate: Gate,
        table: PriceTable,
        wire: Wire | None = None,
    ) -> None:
        self._wire = wire or CHAT
        self._routes = [_Route(endpoint, self._wire.path) for endpoint in endpoints]
        self._patience = endpoints[0]
        self._journal = journal
        self._gate = gate
        self._table = table
        self._session: aiohttp.ClientSession | None = None
        self._asking: dict[str, list[asyncio.Future[Completion]]] = {}

    async def complete(self, request: Request) -> Completion:
        """The completion of a request: from the journal, from a twin that is in flight already, or from an endpoint.

        Raises:
            RowFailure: the endpoint refuses this request, or every retry failed.
            RunFailure: the endpoints refuse all requests (key, model, quota) or were never reached, the budget is used
                up, the journal fails, or another process met with such a thing. From then on, nothing more is sent.
        """
        try:
            known = self._journal.get(request.key)
        except RunFailure as failure:
            self._gate.fail(str(failure))
            raise
        if known is not None:
            return known
        twins = self._asking.get(request.key)
        if twins is not None:
            twins.append(asyncio.get_running_loop().create_future())
            return replace(await twins[-1], replayed=True)
        twins = self._asking[request.key] = []
        try:
            completion = await self.send(request)
            await self._journal.append(request, completion)
        except Exception as failure:
            if isinstance(failure, RunFailure):  # a journal that cannot be written
                self._gate.fail(str(failure))
            for twin in twins:
                twin.set_exception(failure)
            raise
        finally:
            del self._asking[request.key]
        for twin in twins:
            twin.set_result(completion)
        return completion

    @property
    def busy(self) -> bool:
        """Some `complete` has not returned yet."""
        return bool(self._asking)

    async def close(self) -> None:
        """Close all connections, the next request opens new ones; and let the limits know what was used."""
        await self.hang_up()
        await self._gate.flush()

    async def hang_up(self) -> None:
        """Close all connections; requests in flight fail."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(self, request: Request) -> Completion:
        """The completion of a request from an endpoint, with retries and within the limits; the journal is left alone.

        Raises:
            RowFailure, RunFailure: as in `complete`.
        """
        cost = self._wire.worst_case(request, self._table)
        tries = _Tries()
        while True:
            await self._gate.enter(cost)
            route = self._choose()
            used = cost
            sent = time.monotonic()
            try:
                completion = await self._attempt(route, request, tries)
                used = self._used(request, completion) or cost
                self._gate.traffic.add_answer(time.monotonic() - sent)
                return completion
            except Unanswered as failure:
                used = cost if failure.paid else _SENT
                pause_s = self._after(failure, route, tries)
            except (RowFailure, RunFailure) as failure:
                used = _SENT
                self._gate.traffic.failed += 1
                if isinstance(failure, RowFailure):
                    raise
                if not self._others(route):
                    self._gate.fail(str(failure))  # before the slot is free for another
                    raise
                if route in self._routes:
                    self._routes.remove(route)
                    self._gate.warn(f"{failure}; the other endpoints stand in")
                pause_s = 0.0
            finally:
                self._gate.settle(cost, used, sent)
            if pause_s:
                await self._gate.pause(pause_s)

    async def _attempt(self, route: _Route, request: Request, tries: _Tries) -> Completion:
        session = self._session or self._open_session()
        url, headers, proxy = route.address(request.model)
        if route.endpoint.idempotency_header is not None:
            # Another key after an error: endpoints that remember answers may remember errors as well.
            key = f"{request.key}-{tries.errors}" if tries.errors else request.key
            headers = {**headers, route.endpoint.idempotency_header: key}
        try:
            async with session.post(
                url, data=request.sent, headers=headers, proxy=proxy, timeout=route.timeout
            ) as response:
                answer = await response.read()
        except asyncio.TimeoutError as error:
            raise Unanswered(f"no answer within {route.endpoint.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"connection failed: {one_line(error)}") from error
        route.reached = True
        if response.status != 200:
            raise _fault(route, request, response.status, response.headers, answer)
        completion = self._wire.read(answer)
        route.answered = True
        route.faults = 0
        return completion

    def _after(self, failure: Unanswered, route: _Route, tries: _Tries) -> float:
        """Seconds to wait after a failed attempt; raises what it means if there is to be no other."""
        tries.failed += 1
        tries.errors += isinstance(failure, _ServerError)
        pause = pause_s(tries.failed - 1, failure.retry_after_s)
        if isinstance(failure, _RateLimited):
            self._gate.traffic.rate_limited += 1
            patience_s = self._patience.patience_s
            if time.monotonic() - tries.began > patience_s:
                raise RowFailure(f"{failure}; tried {tries.failed} times in {patience_s:g} s") from failure
            route.rest(pause)
        else:
            self._gate.traffic.failed += 1
            tries.faults += 1
            if tries.faults > self._patience.max_retries:
                if not any(each.reached for each in self._routes):
                    unreachable = f"endpoint.base_url={route.endpoint.base_url}: cannot be reached ({failure})"
                    self._gate.fail(unreachable)
                    raise RunFailure(unreachable) from failure
                raise RowFailure(f"{failure}; tried {tries.failed} times") from failure
            route.fault()
        if any(each.awake for each in self._others(route)):
            return 0.0
        left_s = tries.began + self._patience.patience_s - time.monotonic()
        if failure.retry_after_s > max(0.0, left_s):
            wanted = (
                f"asks to wait {failure.retry_after_s:.0f} s, and endpoint.patience_s leaves {max(0.0, left_s):.0f}"
            )
            raise RowFailure(f"{failure}; {wanted}; tried {tries.failed} times") from failure
        return pause

    def _choose(self) -> _Route:
        """One of the endpoints that are awake, by weight; or the one that wakes first."""
        if len(self._routes) == 1:
            return self._routes[0]
        awake = [route for route in self._routes if route.awake]
        if not awake:
            return min(self._routes, key=lambda route: route.rests_until)
        return random.choices(awake, [route.endpoint.weight for route in awake])[0]

    def _others(self, route: _Route) -> list[_Route]:
        return [other for other in self._routes if other is not route]

    def _used(self, request: Request, completion: Completion) -> Amounts | None:
        """What an answer used of the limits; None where the endpoint does not count tokens."""
        tokens = completion.prompt_tokens + completion.completion_tokens
        if not tokens:
            return None
        return {REQUESTS: 1, TOKENS: tokens, USD: self._table.usd(request.model, completion) or 0.0}

    def _open_session(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the gate is the limit
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self._session


@dataclass
class _Tries:
    """The attempts at one request so far."""

    began: float = field(default_factory=time.monotonic)
    failed: int = 0
    faults: int = 0
    """Failed attempts but for 429s, which say nothing about the request."""
    errors: int = 0
    """Errors that the endpoint answered with."""


class _Route:
    """One endpoint: how to reach it, and how it fares."""

    def __init__(self, endpoint: Endpoint, path: str) -> None:
        self.endpoint = endpoint
        self._path = path
        self.timeout = aiohttp.ClientTimeout(total=endpoint.timeout_s)
        self.reached = False
        self.answered = False
        self.faults = 0
        """In a row."""
        self.rests_until = 0.0
        self._addresses: dict[str, tuple[URL, Mapping[str, str], str | None]] = {}

    @property
    def awake(self) -> bool:
        return time.monotonic() >= self.rests_until

    def fault(self) -> None:
        """An attempt failed; after some in a row the endpoint rests."""
        self.faults += 1
        if self.faults >= FAULTS_TO_REST:
            self.rest(_longest_pause_s(self.faults - FAULTS_TO_REST))

    def rest(self, seconds: float) -> None:
        """Ask others for so long, if there are any."""
        self.rests_until = max(self.rests_until, time.monotonic() + seconds)

    def address(self, model: str) -> tuple[URL, Mapping[str, str], str | None]:
        """URL and headers of a request to a model, and the proxy on the way, from this machine's environment."""
        if model not in self._addresses:
            url = _url(self.endpoint, model, self._path)
            headers = {"Content-Type": "application/json", **authorization(self.endpoint)}
            self._addresses[model] = (URL(url), headers, _proxy(url))
        return self._addresses[model]


def _url(endpoint: Endpoint, model: str, path: str) -> str:
    base = endpoint.base_url.rstrip("/")
    if endpoint.api_version is None:
        return f"{base}/{path}"
    deployment = urllib.parse.quote(endpoint.deployments.get(model, model), safe="")
    version = urllib.parse.quote(endpoint.api_version, safe="")
    return f"{base}/openai/deployments/{deployment}/{path}?api-version={version}"


def _proxy(url: str) -> str | None:
    parts = urllib.parse.urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def authorization(endpoint: Endpoint) -> dict[str, str]:
    """The header with the endpoint's key, from this machine's environment.

    Raises:
        RunFailure: it is not set.
    """
    name = endpoint.api_key_env
    if name is None:
        return {}
    key = os.environ.get(name, "").strip()
    if not key:
        raise RunFailure(
            f"endpoint.api_key_env={name}: not set on {socket.gethostname()}; set it on every node before Ray starts"
            f"{without_key(endpoint)}"
        )
    return {"Authorization": f"Bearer {key}"} if endpoint.api_version is None else {"api-key": key}


def without_key(endpoint: Endpoint) -> str:
    """How to do without the key that is missing, to end its error message."""
    if endpoint.base_url.startswith(OPENAI):
        return "; for a local server, set endpoint.base_url to its URL and endpoint.api_key_env=null"
    return f"; if {endpoint.base_url} needs no key, set endpoint.api_key_env=null"


def completion_of(body: bytes) -> Completion:
    """The completion in a response's body. Text is valid UTF-8 in it, and token counts are possible ones.

    Raises:
        Unanswered: there is none.
    """
    try:
        answer = json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Unanswered("the response is no chat completion (cut short?)") from error
    except (ValueError, RecursionError):  # complete, but beyond Python's limits: another attempt would cost as much
        return Completion("", UNREADABLE, "", 0, 0)
    return completion_in(answer)


def completion_in(answer: Any) -> Completion:
    """As `completion_of`, of a body that is parsed."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise TypeError("content is no string")
        prompt_tokens, completion_tokens = token_counts(answer.get("usage"), "prompt_tokens", "completion_tokens")
        return Completion(
            text=sound(content or ""),
            refusal=_text(message.get("refusal")) or None,
            finish_reason=_text(choice.get("finish_reason")) or "stop",
            model=_text(answer.get("model")),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise Unanswered("the response is no chat completion (cut short?)") from error


CHAT = Wire("chat/completions", completion_of, worst_case)


def token_counts(usage: Any, *names: str) -> list[int]:
    """The token counts of a response; all 0 if one cannot be true: the request then counts at its worst case."""
    try:
        counts = [int(usage.get(name) or 0) for name in names]
    except (AttributeError, TypeError, ValueError, OverflowError):
        counts = []
    return counts if counts and all(0 <= count <= MOST_TOKENS for count in counts) else [0] * len(names)


def _text(value: Any) -> str:
    """A field that is beside the answer's text; empty if it is no text."""
    return sound(value) if isinstance(value, str) else ""


def _fault(route: _Route, request: Request, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    """What a response that is no success means: for this attempt, for the row or for the run."""
    endpoint = route.endpoint
    message, code = _error(body)
    for secret in authorization(endpoint).values():  # some gateways echo what they refuse
        message = message.replace(secret.removeprefix("Bearer "), "***")
    said = f"HTTP {status}: {message}"
    if status == 401 or (status == 403 and not route.answered):  # later, a 403 is a firewall's dislike of one text
        setting = f"endpoint.api_key_env={endpoint.api_key_env}"
        return RunFailure(f"{setting}: {endpoint.base_url} refuses its key ({said}); set a valid one on every node")
    if status == 404:
        return RunFailure(f"model {request.model}: not at endpoint.base_url={endpoint.base_url} ({said}); correct one")
    if status == 402 or code == "insufficient_quota":
        return RunFailure(f"endpoint.base_url={endpoint.base_url}: the quota is used up ({said}); raise it and rerun")
    if status == 429:
        return _RateLimited(said, paid=False, retry_after_s=_retry_after_s(headers))
    if status in _RETRYABLE or status >= 500:
        kind = _ServerError if status >= 500 else Unanswered
        return kind(said, paid=status in _MAYBE_PAID, retry_after_s=_retry_after_s(headers))
    return RowFailure(said)


def _error(body: bytes) -> tuple[str, str | None]:
    """Message and code of an error body, which may be anything."""
    try:
        error = json.loads(body)["error"]
        return one_line(error["message"]), error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return one_line(body.decode(errors="replace")) or "no message", None


def one_line(value: object) -> str:
    """What an endpoint says, fit for a message: at most 300 characters of valid UTF-8."""
    return sound(" ".join(str(value).split())[:300])


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds the server asks us to wait: `Retry-After` as seconds or a date; 0 without it."""
    value = headers.get("Retry-After", "")
    if re.fullmatch(r"\d+(\.\d*)?", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _longest_pause_s(attempt: int) -> float:
    """Seconds of back-off after failed attempt number `attempt` (from 0), before the jitter."""
    return min(BACKOFF_CAP_S, BACKOFF_S * 2.0 ** min(attempt, 10))


def pause_s(attempt: int, retry_after_s: float) -> float:
    """The pause after failed attempt number `attempt` (from 0): what the server asks for, plus full jitter."""
    return retry_after_s + random.uniform(0.0, _longest_pause_s(attempt))


def replaying(journal: Journal) -> Complete:
    """Asks the journal only; raises Unjournaled for what it does not hold."""

    async def complete(request: Request) -> Completion:
        known = journal.get(request.key)
        if known is None:
            raise Unjournaled(request)
        return known

    return complete


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own: the thread of a notebook has a loop already. Interrupting cancels it."""
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
