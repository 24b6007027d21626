"""Errors of the HTTP client, and when it attempts a call again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import httpx2

RETRIED_STATUS = frozenset({429, 502, 503, 504})
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0


class Error(Exception):
    """A call failed."""


@dataclass(eq=False)
class ApiError(Error):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        message, type, param, code: fields of an OpenAI error object; `param` names the faulty field.
        request_id: id of the request in the server's log.
        retry_after_s: pause that the server asks for; 0 if it asks for none.
    """

    status: int
    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    request_id: str | None = None
    retry_after_s: float = 0.0

    def __str__(self) -> str:
        where = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.status} {self.code or self.type or 'error'}: {self.message}{where}"


class Unreachable(Error):
    """No answer arrived within `timeout_s`; `__cause__` is the last failure."""


def api_error(answer: httpx2.Response) -> ApiError:
    """Return the error of an answer that is no success."""
    after = answer.headers.get("retry-after", "")
    try:
        error = answer.json()["error"]
        values = {name: error[name] for name in ("message", "type", "param", "code")}
    except (ValueError, TypeError, KeyError):  # the answer of another server, such as a proxy in between
        values = {"message": " ".join(answer.text.split())[:200] or answer.reason_phrase}
    values |= {"request_id": answer.headers.get("x-request-id")}
    return ApiError(answer.status_code, **values, retry_after_s=float(after) if after.isdecimal() else 0.0)


class Attempts:
    """The attempts of one call within its time-out."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._made = 0

    def start(self) -> float:
        """Count an attempt; return the seconds that it may take."""
        self._made += 1
        return max(self._deadline - time.monotonic(), 0.001)

    def pause_after(self, error: httpx2.TransportError | ApiError) -> float:
        """Return the seconds until the next attempt; raise if no attempt is left."""
        least = error.retry_after_s if isinstance(error, ApiError) else 0.0
        pause = least + random.uniform(0, min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self._made - 1)))
        retried = not isinstance(error, ApiError) or error.status in RETRIED_STATUS
        if retried and time.monotonic() + pause < self._deadline:
            return pause
        if isinstance(error, ApiError):
            raise error
        reason = str(error) or type(error).__name__
        raise Unreachable(f"no answer within {self._timeout_s:g} s (attempts: {self._made}): {reason}") from error
