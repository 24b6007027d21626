"""Reads request bodies at the edge: a request enters admission control only once its body is complete.

A slow upload then holds no place in the concurrency limit, and the memory for bodies is bounded.
"""

from __future__ import annotations

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.serving.http.errors import MAX_BODY_MIB, HttpError, too_large, too_many_requests
from infembed_ray.serving.http.middleware import REQUEST_ID

MAX_BODY_BYTES = MAX_BODY_MIB * 2**20
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


class BodyReader:
    """ASGI middleware: passes a request on with its whole body as one message.

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
