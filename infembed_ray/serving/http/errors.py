"""Errors of the HTTP API: every exception that a request can raise -> status and body in OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from infembed_ray.retrieval.filters import FilterError
from infembed_ray.retrieval.updates.write_ahead_log import ChangeError
from infembed_ray.serving import schema
from infembed_ray.serving.encoder.batching import DeadlineExceeded, EmptySequence, QueueFull
from infembed_ray.serving.service import NotApplied, ReadOnly, ReplicaLost, Stuck, TooManyChanges

MAX_MESSAGE_CHARACTERS = 500
STUCK_RETRY_S = 30.0
"""Retry-After while changes are not applied: an operator must restore the write-ahead log or give it space."""
_MAX_DETAILED_ERRORS = 1000
"""With more validation errors than this, the message gives only their number: pydantic renders all of them or none."""

STATUSES: Mapping[int, str] = {
    400: "The request is invalid; `param` names the field",
    401: "No valid API key",
    403: "The API key lacks the scope or the collection, the index is read-only, or an API without keys is called under a foreign host name",
    404: "No such model, collection, document or path",
    405: "The path does not support the method; `Allow` lists those it supports",
    408: "The body did not arrive in time",
    413: "The body is too large; it was not read",
    415: "The Content-Type is not application/json",
    429: "Too many requests are waiting, or more come than the API key allows: try again after `Retry-After` seconds",
    500: "Internal error; the server's log has the details, with the request id",
    503: "A part of the service is not available, or changes are not applied: try again after `Retry-After` seconds",
    504: "No answer in time: try again after `Retry-After` seconds",
    507: "As many documents have changed as may: compact the index",
}
"""Description of every error status of the API."""


class ApiError(Exception):
    """An error answer in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = schema.Error(
            message=_printable(message),
            type=type or ("server_error" if status >= 500 else "invalid_request_error"),
            param=param and _printable(param),
            code=code,
        )
        self.headers = dict(headers or {})

    @classmethod
    def later(cls, status: int, message: str, retry_after_s: float = 1.0, **more: Any) -> ApiError:
        """Return an error that asks the client to retry after `retry_after_s`, rounded up to whole seconds as HTTP requires."""
        seconds = max(1, math.ceil(retry_after_s))
        return cls(status, f"{message}; try again in {seconds} s", headers={"Retry-After": str(seconds)}, **more)

    def response(self) -> Response:
        """Return the HTTP response."""
        return json_response(schema.ErrorResponse(error=self.error), self.status, self.headers)


def json_response(body: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response that is serialised once, without FastAPI's second validation of our own models."""
    return Response(body.__pydantic_serializer__.to_json(body), status, headers, "application/json")


def too_large(most_mib: float) -> ApiError:
    """Return the error for a body above the limit. The connection closes, because the rest of the body is not read."""
    return ApiError(
        413,
        f"the body is larger than {most_mib:g} MiB; send fewer texts at a time",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def too_many_requests() -> ApiError:
    """Return the answer to a request over the limit."""
    return ApiError.later(429, "too many requests are waiting", 2.0, type="rate_limit_error", code="queue_full")


KEY_LIMIT_HEADER = "X-RateLimit-Limit-Requests"
"""Header of answers to requests above the rate limit of their API key; they are no sign of overload."""


def key_rate_limited(rate: float, wait_s: float) -> ApiError:
    """Return the answer to a request above the rate limit of its API key (requests per second)."""
    message = f"this API key allows {rate:g} requests per second"
    error = ApiError.later(429, message, wait_s, type="rate_limit_error", code="rate_limit_exceeded")
    error.headers[KEY_LIMIT_HEADER] = f"{rate:g}"
    return error


def invalid(error: ValidationError) -> ApiError:
    """Return the error for the first invalid field of a body."""
    if error.error_count() > _MAX_DETAILED_ERRORS:
        return ApiError(400, f"the body has {error.error_count()} errors; see /docs for its schema")
    first = error.errors(include_url=False, include_input=False)[0]
    # The second part may be the tag of a union, which the client does not know.
    field = [str(part) for i, part in enumerate(first["loc"]) if not (i == 1 and part in _UNION_TAGS)]
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        message = f"the body is not valid JSON: {reason.removeprefix('Invalid JSON: ')}"
    elif first["type"] == "model_type":
        message = "the body must be a JSON object"
    elif first["type"] == "extra_forbidden":
        message = f"{'.'.join(field)}: no such field"
    else:
        message = f"{'.'.join(field)}: {reason}" if field else reason
    return ApiError(400, message, param=field[0] if field else None)


_UNION_TAGS = frozenset({"text", "texts", "tokens", "token arrays", "query", "queries", "instruction", "instructions"})


def _http_error(request: Request, error: HTTPException) -> ApiError:
    headers = error.headers
    if error.status_code == 405:  # the router lists the methods of the first route only
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        methods = {m for route in routes if route.path_regex.match(request.scope["path"]) for m in route.methods or ()}
        headers = {"Allow": ", ".join(sorted(methods))}
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=headers)


EXCEPTION_HANDLERS: Mapping[type[Exception], Callable[[Request, Any], ApiError]] = {
    ApiError: lambda _, error: error,
    HTTPException: _http_error,
    FilterError: lambda _, error: ApiError(400, str(error), param="filter"),
    ChangeError: lambda _, error: ApiError(400, str(error), param="documents"),
    EmptySequence: lambda _, error: ApiError(400, f"{error}: send text", param="input"),
    ReadOnly: lambda *_: ApiError(403, "this index is read-only: documents cannot be put or deleted", code="read_only"),
    Stuck: lambda _, error: ApiError.later(
        503, f"changes of documents are not applied: {error}", STUCK_RETRY_S, code="changes_stuck"
    ),
    TooManyChanges: lambda _, error: ApiError(
        507,
        f"compact_at: {error.args[0]} documents differ from the index version, and at most {error.args[1]} may; "
        "run `infembed index compact` and serve the next version, raise compact_at, or use an external engine, which takes "
        "any number of changes",
        code="too_many_changes",
    ),
    NotApplied: lambda _, error: ApiError.later(
        503,
        f"min_sequence={error.args[0]}: {error.args[1]} has applied the changes up to {error.args[2]} only",
        param="min_sequence",
        code="changes_not_applied",
    ),
    QueueFull: lambda _, error: ApiError.later(
        429, "too many requests are waiting", error.retry_after_s, type="rate_limit_error", code="queue_full"
    ),
    ReplicaLost: lambda _, error: ApiError.later(
        503, "a part of the service is not available", error.retry_after_s, code="replica_lost"
    ),
    DeadlineExceeded: lambda _, error: ApiError.later(504, str(error), code="deadline_exceeded"),
}
"""Exception of a request -> error answer. Any other exception is a 500."""


def _printable(text: str) -> str:
    """Return one line of bounded length, without control characters or characters that UTF-8 cannot encode."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:MAX_MESSAGE_CHARACTERS])
    return shown if len(text) <= MAX_MESSAGE_CHARACTERS else shown + "..."
