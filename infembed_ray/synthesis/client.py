"""Asking an OpenAI-compatible endpoint: bounded, patient with faults, never twice for the same thing.

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
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import aiohttp

from infembed_ray.config import Endpoint
from infembed_ray.synthesis.chat import Complete, Completion, Request, RowFailure, RunFailure, Unjournaled
from infembed_ray.synthesis.journal import Journal

BACKOFF_S = 0.5
"""Longest pause before the first retry; it doubles with each further one, up to BACKOFF_CAP_S."""
BACKOFF_CAP_S = 60.0

_RETRYABLE = {408, 409, 425, 429}  # and every 5xx


class _Retryable(Exception):
    """An attempt failed that may succeed later, not before `retry_after_s`."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ChatClient:
    """Chat completions from one endpoint, through a journal. Use it within one event loop.

    The key comes from this machine's environment, and only when something must be sent.

    Args:
        endpoint: where, and how patiently.
        journal: looked up before anything is sent, appended to before an answer is used.
        in_flight: most requests in flight. A request that waits for its retry is not in flight.
    """

    def __init__(self, endpoint: Endpoint, journal: Journal, in_flight: int) -> None:
        self._endpoint = endpoint
        self._url = f"{endpoint.base_url.rstrip('/')}/chat/completions"
        self._journal = journal
        self._slots = asyncio.Semaphore(in_flight)
        self._session: aiohttp.ClientSession | None = None
        self._asking: dict[str, asyncio.Task[Completion]] = {}
        self._reached = False
        self._failure: RunFailure | None = None

    async def complete(self, request: Request) -> Completion:
        """The completion of a request: from the journal, from a twin that is in flight already, or from the endpoint.

        Raises:
            RowFailure: the endpoint refuses this request, or every retry failed.
            RunFailure: the endpoint refuses all requests (key, model, quota) or was never reached. From then on,
                nothing more is sent.
        """
        known = self._journal.get(request.key)
        if known is not None:
            return known
        twin = self._asking.get(request.key)
        if twin is not None:
            return replace(await asyncio.shield(twin), replayed=True)
        task = asyncio.create_task(self._ask(request))
        self._asking[request.key] = task
        try:
            return await asyncio.shield(task)
        finally:
            del self._asking[request.key]

    async def close(self) -> None:
        """Close all connections; the next request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(self, request: Request) -> Completion:
        try:
            completion = await self._send(request)
            await self._journal.append(request, completion)
        except RunFailure as failure:
            self._failure = failure
            raise
        return completion

    async def _send(self, request: Request) -> Completion:
        attempts = self._endpoint.max_retries + 1
        for attempt in range(attempts):
            try:
                async with self._slots:
                    if self._failure is not None:
                        raise self._failure
                    return await self._attempt(request)
            except _Retryable as failure:
                reason = str(failure)
                if attempt + 1 < attempts:
                    await asyncio.sleep(_pause_s(attempt, failure.retry_after_s))
        if not self._reached:
            raise RunFailure(f"endpoint.base_url={self._endpoint.base_url}: cannot be reached ({reason})")
        raise RowFailure(f"{reason}; tried {attempts} times")

    async def _attempt(self, request: Request) -> Completion:
        session = self._session or self._open_session()
        try:
            async with session.post(self._url, json=request.body) as response:
                body = await response.read()
        except asyncio.TimeoutError as error:
            raise _Retryable(f"no answer within {self._endpoint.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Retryable(f"connection failed: {_one_line(error)}") from error
        self._reached = True
        if response.status != 200:
            raise _fault(self._endpoint, request, response.status, response.headers, body)
        return _completion(body)

    def _open_session(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the slots are the limit
            timeout=aiohttp.ClientTimeout(total=self._endpoint.timeout_s),
            headers=_authorization(self._endpoint),
            trust_env=True,
        )
        return self._session


def _authorization(endpoint: Endpoint) -> dict[str, str]:
    name = endpoint.api_key_env
    if name is None:
        return {}
    key = os.environ.get(name, "").strip()
    if not key:
        machine = socket.gethostname()
        raise RunFailure(f"endpoint.api_key_env={name}: not set on {machine}; set it on every node before Ray starts")
    return {"Authorization": f"Bearer {key}"}


def _completion(body: bytes) -> Completion:
    try:
        answer = json.loads(body)
        choice = answer["choices"][0]
        message, usage = choice["message"], answer.get("usage") or {}
        return Completion(
            text=_text(message.get("content")),
            refusal=message.get("refusal"),
            finish_reason=choice.get("finish_reason") or "stop",
            model=answer.get("model") or "",
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Retryable("the response is no chat completion (cut short?)") from error


def _text(content: Any) -> str:
    if content is not None and not isinstance(content, str):
        raise TypeError("content is no string")
    return content or ""


def _fault(endpoint: Endpoint, request: Request, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    """What a response that is no success means: for this attempt, for the row or for the run."""
    message, code = _error(body)
    said = f"HTTP {status}: {message}"
    if status in (401, 403):
        setting = f"endpoint.api_key_env={endpoint.api_key_env}"
        return RunFailure(f"{setting}: {endpoint.base_url} refuses its key ({said}); set a valid one on every node")
    if status == 404:
        return RunFailure(f"model {request.model}: not at endpoint.base_url={endpoint.base_url} ({said}); correct one")
    if status == 402 or code == "insufficient_quota":
        return RunFailure(f"endpoint.base_url={endpoint.base_url}: the quota is used up ({said}); raise it and rerun")
    if status in _RETRYABLE or status >= 500:
        return _Retryable(said, _retry_after_s(headers))
    return RowFailure(said)


def _error(body: bytes) -> tuple[str, str | None]:
    """Message and code of an error body, which may be anything."""
    try:
        error = json.loads(body)["error"]
        return _one_line(error["message"]), error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        return _one_line(body.decode(errors="replace")) or "no message", None


def _one_line(value: object) -> str:
    return " ".join(str(value).split())[:300]


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds the server asks us to wait: `Retry-After` as seconds or a date; 0 without it."""
    value = headers.get("Retry-After", "")
    if re.fullmatch(r"\d+(\.\d*)?", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


def _pause_s(attempt: int, retry_after_s: float) -> float:
    """The pause after failed attempt number `attempt` (from 0): what the server asks for, plus full jitter."""
    return retry_after_s + random.uniform(0.0, min(BACKOFF_CAP_S, BACKOFF_S * 2**attempt))


def replaying(journal: Journal) -> Complete:
    """Asks the journal only; raises Unjournaled for what it does not hold."""

    async def complete(request: Request) -> Completion:
        known = journal.get(request.key)
        if known is None:
            raise Unjournaled(request)
        return known

    return complete
