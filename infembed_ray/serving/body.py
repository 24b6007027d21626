"""Reads request bodies at the edge: a request enters admission control only once its body is complete.

A slow upload then holds no place in the admission window, and the memory for bodies is bounded.
"""

from __future__ import annotations

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.serving.gate import REQUEST_ID
from infembed_ray.serving.refusals import ApiError, too_large
from infembed_ray.serving.throttle import refusal

LIMIT = "INFEMBED_MAX_BODY_MIB"
"""Environment variable of Serve's proxies and replicas: the `max_body_mib` that Serve was started with."""
READ_TIMEOUT_S = 30.0
"""Longest time from the end of the headers to the last byte of the body."""
BODIES_HELD = 32
"""Memory bound of a proxy for the bodies of all its requests, in bodies of the largest size. Keys are checked later, so
clients without one count as well: fence the port from strangers."""
SMALL_BYTES = 2**16
"""Bodies up to this size are read even beyond that bound, so that large uploads cannot shut out searches."""
LINGER_S = 2.0
"""Time for which a refused body is read and discarded: closing a connection with unread data can lose the answer."""


class BodyReader:
    """ASGI middleware: passes a request on with its whole body as one message.

    It refuses a body that is too large (413) or too slow (408), and a large one when too many are held (429). It also
    drops an X-Request-Id that is no id, because Serve returns whatever it gets.

    Args:
        app: the next application.
        max_body_mib: largest body.
    """

    def __init__(self, app: ASGIApp, max_body_mib: float) -> None:
        self._app = app
        self._mib = max_body_mib
        self._most = max_body_mib * 2**20
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then pass the request on or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        chunks: list[bytes] = []
        try:
            with anyio.move_on_after(READ_TIMEOUT_S) as timer:
                refused = await self._read(scope, receive, chunks)
            if timer.cancelled_caught:
                refused = ApiError(408, f"the body did not arrive within {READ_TIMEOUT_S:g} s")
            if refused is None:
                chunks[:] = [b"".join(chunks)]
                headers = [(n, v) for n, v in scope["headers"] if n != b"x-request-id" or REQUEST_ID.fullmatch(v)]
                return await self._app({**scope, "headers": headers}, _whole(chunks[0], receive), send)
        except _Disconnected:
            return None
        finally:
            self._held -= sum(map(len, chunks))
            chunks.clear()
        refused.headers["Connection"] = "close"  # the rest of the body is not read
        await refused.response()(scope, receive, _lingering(receive, send))

    async def _read(self, scope: Scope, receive: Receive, chunks: list[bytes]) -> ApiError | None:
        """Append the body's chunks; returns the refusal of a body that is not taken."""
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit() and int(announced) > self._most:
            return too_large(self._mib)
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Disconnected
            chunk, more = message.get("body", b""), message.get("more_body", False)
            chunks.append(chunk)
            size += len(chunk)
            self._held += len(chunk)
            if size > self._most:
                return too_large(self._mib)
            if size > SMALL_BYTES and self._held > BODIES_HELD * self._most:
                return refusal()
        return None


class _Disconnected(Exception):
    """The client closed the connection before the end of its body."""


def _whole(body: bytes, receive: Receive) -> Receive:
    """A channel that gives the whole body and then what comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return pending.pop() if pending else await receive()

    return received


def _lingering(receive: Receive, send: Send) -> Send:
    """A channel that discards the rest of the request before it ends the answer."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            with anyio.move_on_after(LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    return sent
