"""Under overload requests are refused before there is work with them: each costs more than its refusal is worth.

How many may be under way at a time nobody has to say: the window shrinks by one with each that is refused behind it, and
grows by a fraction of one with each that is taken. So it settles where that fraction of those let through is refused; few
go the long way to be refused there, and no room is left unused.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.serving.refusals import ApiError

PATHS = ("/v1/search", "/v1/embeddings", "/v1/documents")
"""Where there is work with a request."""
FIRST = 128
"""Requests that may be under way before anything is known."""
FEWEST = 8
"""So many may be in any case."""
GROWTH = 0.02
"""Of the window, for each request that is taken while it is in use."""
OVERLOADED = frozenset({429, 504})
"""What is answered where too much is waiting."""


class Window:
    """How many requests of one kind are under way, and how many may be."""

    def __init__(self) -> None:
        self.under_way = 0
        self._size = float(FIRST)

    @property
    def full(self) -> bool:
        """Is there no room for another?"""
        return self.under_way >= self._size

    def note(self, status: int) -> None:
        """Learn from the answer to one of them."""
        if status in OVERLOADED:
            self._size = max(FEWEST, self._size - 1)
        elif status < 400 and self.under_way > self._size / 2:  # else nothing is learnt about its bound
            self._size += GROWTH


class Throttle:
    """ASGI middleware before what may answer 429.

    Args:
        app: it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # Apart, so that large requests of one kind, which are refused sooner, do not shut the door to the other.
        self._windows = {path: Window() for path in PATHS}
        self._refusal = refusal().response()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        window = self._windows.get(scope["path"]) if scope["type"] == "http" else None
        if window is None:
            return await self._app(scope, receive, send)
        if window.full:
            return await self._refusal(scope, receive, send)
        answered = False

        async def noted(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start" and not answered:
                answered = True
                window.note(message["status"])
                window.under_way -= 1  # before it is sent: a client that does not read keeps nobody out
            await send(message)

        window.under_way += 1
        try:
            await self._app(scope, receive, noted)
        finally:
            window.under_way -= not answered


def refusal() -> ApiError:
    """Of a request that is one too many."""
    return ApiError.later(429, "too many requests are waiting", 2.0, type="rate_limit_error", code="queue_full")
