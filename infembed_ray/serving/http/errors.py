"""Errors of the HTTP API: every exception that a request can raise -> status and body in OpenAI's shape."""

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
from infembed_ray.serving.encoder.batching import DeadlineExceeded, QueueFull
from infembed_ray.serving.service import NotApplied, ReplicaLost, Stuck, TooManyChanges

MAX_BODY_BYTES = 8 * 2**20
"""Largest request body."""
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
CODES: Mapping[str, int] = {
    "invalid_api_key": 401,
    "missing_scope": 403,
    "collection_not_allowed": 403,
    "foreign_host": 403,
    "read_only": 403,
    "model_not_found": 404,
    "collection_not_found": 404,
    "document_not_found": 404,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "queue_full": 429,
    "rate_limit_exceeded": 429,
    "internal_error": 500,
    "not_ready": 503,
    "replica_lost": 503,
    "changes_stuck": 503,
    "changes_not_applied": 503,
    "deadline_exceeded": 504,
    "too_many_changes": 507,
}
"""Error code of the API -> its status. Errors without a code are told apart by `param` and the message."""
RETRIED = frozenset({429, 503, 504})
"""Statuses that ask the client to try again, with `Retry-After`."""
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class HttpError(Exception):
    """An error answer in OpenAI's shape.

    Args:
        kind: one of `CODES`, or the status of an error without a code.
        param: the faulty field.
        retry_after_s: for a status of `RETRIED`, whose message also names it; rounded up to whole seconds.
    """

    def __init__(
        self,
        kind: str | int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float = 1.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        code, self.status = (kind, CODES[kind]) if isinstance(kind, str) else (None, kind)
        self.headers = dict(headers or {})
        if self.status in RETRIED:
            seconds = max(1, math.ceil(retry_after_s))
            message = f"{message}; try again in {seconds} s"
            self.headers["Retry-After"] = str(seconds)
        super().__init__(message)
        self.error = schema.Error(
            message=_printable(message),
            type=_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
            param=param and _printable(param),
            code=code,
        )

    def response(self) -> Response:
        """Return the HTTP response."""
        return json_response(schema.ErrorResponse(error=self.error), self.status, self.headers)


def json_response(body: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response that is serialised once, without FastAPI's second validation of our own models."""
    return Response(body.__pydantic_serializer__.to_json(body), status, headers, "application/json")


def too_large() -> HttpError:
    """Return the error for a body above the limit. The connection closes, because the rest of the body is not read."""
    message = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB; send fewer texts at a time"
    return HttpError("body_too_large", message, headers={"Connection": "close"})


def too_many_requests(retry_after_s: float = 2.0) -> HttpError:
    """Return the answer to a request over the limit."""
    return HttpError("queue_full", "too many requests are waiting", retry_after_s=retry_after_s)


KEY_LIMIT_HEADER = "X-RateLimit-Limit-Requests"
"""Header of answers to requests above the rate limit of their API key; they are no sign of overload."""


def key_rate_limited(rate: float, wait_s: float) -> HttpError:
    """Return the answer to a request above the rate limit of its API key (requests per second)."""
    message = f"this API key allows {rate:g} requests per second"
    return HttpError("rate_limit_exceeded", message, retry_after_s=wait_s, headers={KEY_LIMIT_HEADER: f"{rate:g}"})


def invalid(error: ValidationError) -> HttpError:
    """Return the error for the first invalid field of a body."""
    if error.error_count() > _MAX_DETAILED_ERRORS:
        return HttpError(400, f"the body has {error.error_count()} errors; see /openapi.json for its schema")
    first = error.errors(include_url=False, include_input=False)[0]
    # A part may be the tag of a union, which the client does not know.
    field = [str(part) for part in first["loc"] if part not in _UNION_TAGS]
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        message = f"the body is not valid JSON: {reason.removeprefix('Invalid JSON: ')}"
    elif first["type"] == "model_type":
        message = f"{'.'.join(field) or 'the body'} must be a JSON object"
    elif first["type"] == "extra_forbidden":
        message = f"{'.'.join(field)}: no such field"
    else:
        message = f"{'.'.join(field)}: {reason}" if field else reason
    return HttpError(400, message, param=field[0] if field else None)


_UNION_TAGS = frozenset({"_text", "_texts", "_object"})


def _http_error(request: Request, error: HTTPException) -> HttpError:
    headers = error.headers
    if error.status_code == 405:  # the router lists the methods of the first route only
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        methods = {m for route in routes if route.path_regex.match(request.scope["path"]) for m in route.methods or ()}
        headers = {"Allow": ", ".join(sorted(methods))}
    return HttpError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=headers)


EXCEPTION_HANDLERS: Mapping[type[Exception], Callable[[Request, Any], HttpError]] = {
    HttpError: lambda _, error: error,
    HTTPException: _http_error,
    FilterError: lambda _, error: HttpError(400, str(error), param="filter"),
    ChangeError: lambda _, error: HttpError(400, str(error), param="documents"),
    Stuck: lambda _, error: HttpError(
        "changes_stuck", f"changes of documents are not applied: {error}", retry_after_s=STUCK_RETRY_S
    ),
    TooManyChanges: lambda _, error: HttpError(
        "too_many_changes",
        f"compact_at: {error.args[0]} documents differ from the index version, and at most {error.args[1]} may; run `infembed index compact` and serve the next version, raise compact_at, or use an external engine, which takes any number of changes",
    ),
    NotApplied: lambda _, error: HttpError(
        "changes_not_applied",
        f"min_sequence={error.args[0]}: {error.args[1]} has applied the changes up to {error.args[2]} only",
        param="min_sequence",
    ),
    QueueFull: lambda _, error: too_many_requests(error.retry_after_s),
    ReplicaLost: lambda *_: HttpError("replica_lost", "a part of the service is not available"),
    DeadlineExceeded: lambda _, error: HttpError("deadline_exceeded", str(error)),
}
"""Exception of a request -> error answer. Any other exception is a 500."""


def _printable(text: str) -> str:
    """Return one line of bounded length, without control characters or characters that UTF-8 cannot encode."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:MAX_MESSAGE_CHARACTERS])
    return shown if len(text) <= MAX_MESSAGE_CHARACTERS else shown + "..."
