"""ASGI middleware of the API: request ids, API keys, security headers and metrics."""

import logging
import re
import secrets
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.serving.http.auth import ALLOWED, ApiKeys, is_loopback
from infembed_ray.serving.http.errors import HttpError, key_rate_limited

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/docs", "/openapi.json"})
"""Paths that need no API key, like the playground's files under `OPEN_PREFIX`."""
OPEN_PREFIX = "/playground/"
LATENCY_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
"""Upper bounds of the latency histogram, in seconds."""

HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),  # the URL of the playground contains the query
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)
"""Default headers of every answer. Pages load from this server only, and there is no CORS."""

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
"""An X-Request-Id that is returned to the client; any other value is replaced."""


class ApiMiddleware:
    """Checks keys before the body is read, adds the response headers and counts the requests.

    The routes learn which collections the key may use (`auth.ALLOWED`). An API without keys serves its own machine only: a
    request with a foreign Host header gets 403. Otherwise a web page in a browser of that machine could send requests under a
    host name that resolves to 127.0.0.1 (DNS rebinding).

    It counts requests by route, never by path, to bound the series. With `request_ids` answers carry X-Request-Id, the
    client's own or a new one.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, registry: CollectorRegistry, request_ids: bool) -> None:
        self._app, self._keys, self._request_ids = app, keys, request_ids
        self._requests = Counter("infembed_http_requests", "Requests answered.", ("route", "status"), registry=registry)
        self._seconds = Histogram(
            "infembed_http_request_seconds",
            "Time from a request's headers to the end of its answer.",
            ("route",),
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._in_flight = Gauge("infembed_http_in_flight", "Requests being answered now.", registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or reject it. Any other exception is logged and answered with 500."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start = time.perf_counter()
        status: int | None = None
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16).encode()

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = {name for name, _ in message["headers"]}
                added = [header for header in HEADERS if header[0] not in names]
                if self._request_ids:
                    added.append((b"x-request-id", request_id))
                message["headers"] = [*message["headers"], *added]
            await send(message)

        self._in_flight.inc()
        try:
            if rejection := self._check(scope["method"], scope["path"], headers):
                await rejection.response()(scope, receive, send_with_headers)
            else:
                await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            pass  # before the end of its body: there is no client to answer
        except Exception as error:
            # The request's texts and its path, which may be a document's id, can be confidential: log neither.
            text, name = "%s %s failed (request %s)", request_id.decode()
            log.error(text, scope["method"], _route(scope), name, exc_info=error, extra={"request_id": name})
            if status is not None:
                raise  # part of an answer has been sent: only the connection can be broken
            internal = HttpError("internal_error", "internal error; the server's log has the details")
            await internal.response()(scope, receive, send_with_headers)
        finally:
            self._in_flight.dec()
            route = _route(scope) or "none"
            self._requests.labels(route, str(status or "gone")).inc()  # gone: the client disconnected
            self._seconds.labels(route).observe(time.perf_counter() - start)

    def _check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> HttpError | None:
        """Return the error for a request that is not allowed; note which collections its key may use."""
        ALLOWED.set(None)
        if not self._keys:
            host = headers.get(b"host", b"").decode("latin-1")
            if is_loopback(_hostname(host)):
                return None
            fault = f"host {host!r}: this API has no keys and serves its own machine only, as 127.0.0.1 or localhost"
            return HttpError("foreign_host", f"{fault}; configure API keys to reach it under another name")
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return None
        key = self._keys.find(headers.get(b"authorization"))
        if key is None:
            message = "send a valid API key: Authorization: Bearer KEY"
            return HttpError("invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})
        scope = "admin" if path == "/metrics" else "write" if method in ("PUT", "DELETE") else "read"
        if scope not in key.scopes:
            message = f"this API key has no scope {scope!r}, which {method} {path} needs; use a key that has it"
            return HttpError("missing_scope", message)
        if wait_s := self._keys.wait_s(key):
            return key_rate_limited(key.rate or 0.0, wait_s)
        ALLOWED.set(key.collections)
        return None


def _hostname(host: str) -> str:
    """Return the name in a Host header, without the port and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] or host if host.count(":") == 1 else host


def _route(scope: Scope) -> str | None:
    return getattr(scope.get("route"), "path", None)
