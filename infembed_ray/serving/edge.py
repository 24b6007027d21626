"""ASGI middleware of Ray Serve's HTTP proxy: reads bodies, limits the requests in flight, and gives Serve's errors OpenAI's shape.

With HAProxy in front, the server of every ingress replica is built with the same.
"""

import logging
from collections.abc import Iterable
from time import monotonic

import anyio
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.errors import in_one_line
from infembed_ray.serving.http.errors import (
    KEY_LIMIT_HEADER,
    MAX_BODY_BYTES,
    HttpError,
    too_large,
    too_many_requests,
)
from infembed_ray.serving.http.middleware import REQUEST_ID

READ_TIMEOUT_S = 30.0
"""Longest time from the end of the headers to the last byte of the body."""
MAX_BODIES_IN_MEMORY = 32
"""Memory bound of a proxy for the bodies of all its requests, as a number of bodies of the largest size. API keys are
checked later, so requests without a key count as well: do not expose the port to untrusted networks."""
SMALL_BYTES = 2**16
"""Bodies up to this size are read even beyond that bound, so that large uploads cannot block searches."""
LINGER_S = 2.0
"""Time for which the rest of a rejected body is read and discarded. Closing a connection with unread data can lose the
answer."""
LIMITED_PATHS = ("/v1/search", "/v1/rerank", "/v2/rerank", "/v1/embeddings", "/v1/documents")
"""Paths that use the encoder or the shards; each has its own limit, which the same paths of all collections share."""
MAX_LIMIT = 256
"""Maximum limit: by Little's law enough for 1,000 requests/s that each take 250 ms."""
MIN_LIMIT = 8
RECOVERY_S = 8.0
"""Seconds without overload in which the limit grows from its minimum to its maximum."""
_KEY_LIMIT_HEADER = KEY_LIMIT_HEADER.lower().encode()
API_HEADER = b"x-content-type-options"
"""A header on every answer of the API and on none of Serve's own."""

log = logging.getLogger(__name__)


def middlewares() -> list[Middleware]:
    """Return the proxy's middleware, the innermost first. Serve's proxy imports this function by its path."""
    return [Middleware(ApiErrors), Middleware(AdmissionControl), Middleware(BodyReader)]


# ------------------------------------------------------------------------------------------------------------ bodies


class BodyReader:
    """Passes a request on with its whole body as one message, so that a slow upload holds no place in the concurrency limit.

    It rejects a body that is too large (413) or too slow (408), and a large one when too many are in memory (429). It also
    removes a malformed X-Request-Id, because Serve returns any value unchecked.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._bytes_in_memory = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then pass the request on or reject it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        chunks: list[bytes] = []
        try:
            with anyio.move_on_after(READ_TIMEOUT_S) as timer:
                rejection = await self._read(scope, receive, chunks)
            if timer.cancelled_caught:
                rejection = HttpError(408, f"the body did not arrive within {READ_TIMEOUT_S:g} s")
            if rejection is None:
                chunks[:] = [b"".join(chunks)]
                headers = [(n, v) for n, v in scope["headers"] if n != b"x-request-id" or REQUEST_ID.fullmatch(v)]
                return await self._app({**scope, "headers": headers}, _whole(chunks[0], receive), send)
        except _Disconnected:
            return None
        finally:
            self._bytes_in_memory -= sum(map(len, chunks))
            chunks.clear()
        rejection.headers["Connection"] = "close"  # the rest of the body is not read
        await rejection.response()(scope, receive, _lingering(receive, send))

    async def _read(self, scope: Scope, receive: Receive, chunks: list[bytes]) -> HttpError | None:
        """Append the body's chunks; return the error for a rejected body."""
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
            return too_large()
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Disconnected
            chunk, more = message.get("body", b""), message.get("more_body", False)
            chunks.append(chunk)
            size += len(chunk)
            self._bytes_in_memory += len(chunk)
            if size > MAX_BODY_BYTES:
                return too_large()
            if size > SMALL_BYTES and self._bytes_in_memory > MAX_BODIES_IN_MEMORY * MAX_BODY_BYTES:
                return too_many_requests()
        return None


class _Disconnected(Exception):
    """The client closed the connection before the end of its body."""


def _whole(body: bytes, receive: Receive) -> Receive:
    """Return a channel that gives the whole body and then what the client sends next."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_whole() -> Message:
        return pending.pop() if pending else await receive()

    return receive_whole


def _lingering(receive: Receive, send: Send) -> Send:
    """Return a channel that discards the rest of the request before it ends the answer."""

    async def send_and_discard(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            with anyio.move_on_after(LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    return send_and_discard


# --------------------------------------------------------------------------------------------------------- admission


class ConcurrencyLimit:
    """Adaptive limit (AIMD) on the requests of one path that are in flight.

    It falls by one for each request that the service behind it rejects with 429, and recovers with the time since the last of
    those rejections: under steady overload it settles just above the capacity, and after a transient it is back at its
    maximum within `RECOVERY_S`. Nothing else counts as overload.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._limit_at_overload = float(MAX_LIMIT)
        self._overloaded_at = monotonic()

    @property
    def limit(self) -> float:
        """Requests that may be in flight now."""
        # Cubic growth as in TCP CUBIC: slow at first, so steady overload costs few late rejections.
        recovered = min(1.0, (monotonic() - self._overloaded_at) / RECOVERY_S)
        return min(MAX_LIMIT, self._limit_at_overload + (MAX_LIMIT - MIN_LIMIT) * recovered**3)

    def decrease(self) -> None:
        """Lower the limit to one below itself or below the requests in flight, whichever is less."""
        self._limit_at_overload = max(MIN_LIMIT, min(self.limit, self.in_flight) - 1)
        self._overloaded_at = monotonic()


class AdmissionControl:
    """Rejects requests over the limits with 429 before routing, because a late rejection costs more."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # One limit per path: large requests of one kind are rejected sooner and must not block the other kinds.
        self._limits = {path: ConcurrencyLimit() for path in LIMITED_PATHS}
        self._limits["/v2/rerank"] = self._limits["/v1/rerank"]  # two paths of one route
        self._rejection = too_many_requests().response()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or reject it."""
        limit = self._limits.get(_without_collection(scope["path"])) if scope["type"] == "http" else None
        if limit is None:
            return await self._app(scope, receive, send)
        if limit.in_flight >= limit.limit:
            return await self._rejection(scope, receive, send)
        answered = False

        async def observed_send(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start" and not answered:
                answered = True
                if message["status"] == 429 and not has_header(message["headers"], _KEY_LIMIT_HEADER):
                    limit.decrease()
                limit.in_flight -= 1  # before sending: a client that reads slowly takes no place
            await send(message)

        limit.in_flight += 1
        try:
            await self._app(scope, receive, observed_send)
        finally:
            limit.in_flight -= not answered


def _without_collection(path: str) -> str:
    """Return the path of the default collection for that of another one: any client can make up names of collections."""
    parts = path.split("/")
    return f"/v1/{parts[4]}" if parts[:3] == ["", "v1", "collections"] and len(parts) == 5 else path


def has_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bool:
    """Return whether ASGI headers contain a header, given its name in lower case."""
    return any(other.lower() == name for other, _ in headers)


# ------------------------------------------------------------------------------------------------------------ errors


class ApiErrors:
    """Replaces errors of Serve's own: a bare 500 for a request in a lost ingress replica, and plain text for its rejections.

    They get a status that asks the client to try again, because every operation of the API can be repeated.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; pass an answer of the API on, or answer an error of Serve's own as the API reports it."""
        if scope["type"] != "http" or scope["path"].startswith("/-/"):  # Serve's own paths
            return await self._app(scope, receive, send)
        begun = gone = False
        status = 500

        async def receive_until_gone() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or message["type"] == "http.disconnect"
            return message

        async def send_if_ours(message: Message) -> None:
            nonlocal begun, status
            if message["type"] == "http.response.start" and not begun:
                status = message["status"]
                begun = status < 400 or has_header(message["headers"], API_HEADER)
            if begun:
                await send(message)

        try:
            await self._app(scope, receive_until_gone, send_if_ours)
        except Exception as error:
            if begun:
                raise  # part of an answer has been sent: only the connection can be broken
            log.warning("a request did not reach a replica: %s", in_one_line(error))
        if not begun and not gone:
            await _api_error(status).response()(scope, receive, send)


def _api_error(serve_status: int) -> HttpError:
    """Return an error of Serve's own as the API reports it."""
    if serve_status == 404:
        return HttpError("not_ready", "nothing is served here yet")
    if serve_status == 429:
        return too_many_requests()
    return HttpError("replica_lost", "a part of the service is not available")
