"""Refusals: everything that can be wrong with a request, or in the way of its answer, in OpenAI's shape."""

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
from infembed_ray.serving import schema
from infembed_ray.serving.engine import DeadlineExceeded, EmptySequence, QueueFull
from infembed_ray.serving.service import ReadOnly, ReplicaLost, Stuck

MAX_MESSAGE_CHARACTERS = 500
STUCK_RETRY_S = 30.0
"""Retry-After while changes are not applied: an operator has to restore the log."""
_MANY_MISTAKES = 1000
"""So many are counted, not told: pydantic tells all or nothing, and a request may be made of mistakes."""

STATUSES: Mapping[int, str] = {
    400: "A mistake in the request; `param` names the field",
    401: "No valid API key",
    403: "Not allowed here",
    404: "There is no such model, document or path",
    405: "The path has other methods; `Allow` names them",
    408: "The body did not arrive in time",
    413: "The body is too large; it was not read",
    415: "The body is not sent as application/json",
    429: "Too many requests are waiting: try again after `Retry-After` seconds",
    500: "A fault of the server; its log has it, under the request's id",
    503: "What would answer is not there: try again after `Retry-After` seconds",
    504: "Not answered in time: try again after `Retry-After` seconds",
}
"""What the API refuses with."""


class ApiError(Exception):
    """A request that is not answered, as OpenAI would say it."""

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
        """One that tells the client to try again after `retry_after_s` (in whole seconds, as HTTP wants it)."""
        seconds = max(1, math.ceil(retry_after_s))
        return cls(status, f"{message}; try again in {seconds} s", headers={"Retry-After": str(seconds)}, **more)

    def response(self) -> Response:
        """As an answer."""
        return json_response(schema.ErrorResponse(error=self.error), self.status, self.headers)


def json_response(body: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer serialised once, without FastAPI's second validation of what we built ourselves."""
    return Response(body.__pydantic_serializer__.to_json(body), status, headers, "application/json")


def too_large(most_mib: float) -> ApiError:
    """A body above the limit. The connection closes, because the rest of the body is not read."""
    return ApiError(
        413,
        f"the body is larger than {most_mib:g} MiB; send fewer texts at a time",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def invalid(error: ValidationError) -> ApiError:
    """The first mistake of a body."""
    if error.error_count() > _MANY_MISTAKES:
        return ApiError(400, f"{error.error_count()} mistakes in the body; see /docs for what it takes")
    first = error.errors(include_url=False, include_input=False)[0]
    # After the field comes the form that its value was taken for, where it may have several.
    where = [str(part) for i, part in enumerate(first["loc"]) if not (i == 1 and part in _FORMS)]
    what = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        message = f"the body is no JSON: {what.removeprefix('Invalid JSON: ')}"
    elif first["type"] == "model_type":
        message = "the body must be a JSON object"
    elif first["type"] == "extra_forbidden":
        message = f"{'.'.join(where)}: no such field"
    else:
        message = f"{'.'.join(where)}: {what}" if where else what
    return ApiError(400, message, param=where[0] if where else None)


_FORMS = frozenset({"text", "texts", "tokens", "token arrays", "query", "queries", "instruction", "instructions"})


def _http_error(request: Request, error: HTTPException) -> ApiError:
    headers = error.headers
    if error.status_code == 405:  # the router names the methods of the first route alone
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        methods = {m for route in routes if route.path_regex.match(request.scope["path"]) for m in route.methods or ()}
        headers = {"Allow": ", ".join(sorted(methods))}
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=headers)


HANDLERS: Mapping[type[Exception], Callable[[Request, Any], ApiError]] = {
    ApiError: lambda _, error: error,
    HTTPException: _http_error,
    FilterError: lambda _, error: ApiError(400, str(error), param="filter"),
    EmptySequence: lambda _, error: ApiError(400, f"{error}: give text", param="input"),
    ReadOnly: lambda *_: ApiError(403, "documents are neither put nor deleted here: it is read-only", code="read_only"),
    Stuck: lambda _, error: ApiError.later(
        503, f"changes of documents are not applied: {error}", STUCK_RETRY_S, code="changes_stuck"
    ),
    QueueFull: lambda _, error: ApiError.later(
        429, "too many requests are waiting", error.retry_after_s, type="rate_limit_error", code="queue_full"
    ),
    ReplicaLost: lambda _, error: ApiError.later(
        503, "a part of the service is not there", error.retry_after_s, code="replica_lost"
    ),
    DeadlineExceeded: lambda _, error: ApiError.later(504, str(error), code="deadline_exceeded"),
}
"""What is raised while a request is answered -> how the client is told. Anything else is a 500."""


def _printable(text: str) -> str:
    """In one line of bounded length, without what a terminal obeys or UTF-8 cannot hold."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:MAX_MESSAGE_CHARACTERS])
    return shown if len(text) <= MAX_MESSAGE_CHARACTERS else shown + "..."
