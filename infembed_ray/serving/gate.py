"""What every request passes before the API's routes, and every answer on its way out: ids, keys, headers, counts."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.serving.auth import ApiKeys, is_loopback
from infembed_ray.serving.metrics import HttpMetrics
from infembed_ray.serving.refusals import ApiError

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/docs", "/openapi.json"})
"""What needs no key, and neither do the playground's files; everything else does, unless there are none."""
OPEN_PREFIX = "/playground/"

HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)
"""On every answer that does not bring its own. Pages get only what this server has; there is no CORS."""

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
"""An X-Request-Id that is returned to its client; any other value is replaced."""


class Gate:
    """ASGI middleware. Nothing of an unwelcome caller's body is read.

    A request without a key gets 401 where keys are asked for. Where none are, the API is for its own machine, and a
    request under a foreign host name gets 403: a web page in the browser of that machine could send it, by a name
    that leads to 127.0.0.1 (DNS rebinding).

    Args:
        app: the routes.
        keys: one of them is asked for; without any, callers of this machine are welcome.
        metrics: count the requests.
        request_ids: answers carry X-Request-Id, the client's own or a new one.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics: HttpMetrics, request_ids: bool) -> None:
        self._app, self._keys, self._metrics, self._request_ids = app, keys, metrics, request_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or refuse it; a fault of ours is logged and answered 500."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start = time.perf_counter()
        status: int | None = None
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16).encode()

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = list(message["headers"])
                names = {name for name, _ in given}
                given += [header for header in HEADERS if header[0] not in names]
                if self._request_ids:
                    given.append((b"x-request-id", request_id))
                message["headers"] = given
            await send(message)

        self._metrics.begun()
        try:
            if refusal := self._refusal(scope["path"], headers):
                await refusal.response()(scope, receive, send_marked)
            else:
                await self._app(scope, receive, send_marked)
        except ClientDisconnect:
            pass  # in the middle of its body: there is nobody to answer
        except Exception as error:
            # Never the request's texts, nor its path, which may be a document's id: they may be confidential.
            log.error("%s %s failed (request %s)", scope["method"], _route(scope), request_id.decode(), exc_info=error)
            if status is not None:
                raise  # half an answer has gone: breaking the connection is all that is left
            fault = ApiError(500, "internal error; the server's log has it", code="internal_error")
            await fault.response()(scope, receive, send_marked)
        finally:
            self._metrics.ended(_route(scope), status, time.perf_counter() - start)

    def _refusal(self, path: str, headers: Mapping[bytes, bytes]) -> ApiError | None:
        if not self._keys:
            host = headers.get(b"host", b"").decode("latin-1")
            if is_loopback(_hostname(host)):
                return None
            return ApiError(
                403,
                f"host {host!r}: this API has no keys and answers its own machine only, as 127.0.0.1 or localhost; "
                "give it API keys to reach it under another name",
                code="foreign_host",
            )
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIX) or self._keys.accept(headers.get(b"authorization")):
            return None
        return ApiError(
            401,
            "give a valid API key: Authorization: Bearer KEY",
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _hostname(host: str) -> str:
    """Of a Host header: without the port, and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] or host if host.count(":") == 1 else host


def _route(scope: Scope) -> str | None:
    return getattr(scope.get("route"), "path", None)
