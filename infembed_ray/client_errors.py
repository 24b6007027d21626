"""Errors of the HTTP client."""

from __future__ import annotations

from dataclasses import dataclass

import httpx2


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
    """Return the error that an answer describes."""
    after = answer.headers.get("retry-after", "")
    try:
        error = answer.json()["error"]
        values = {name: error[name] for name in ("message", "type", "param", "code")}
    except (ValueError, TypeError, KeyError):  # the answer of another server, such as a proxy in between
        values = {"message": " ".join(answer.text.split())[:200] or answer.reason_phrase}
    values |= {"request_id": answer.headers.get("x-request-id")}
    return ApiError(answer.status_code, **values, retry_after_s=float(after) if after.isdecimal() else 0.0)
