"""Under overload requests are refused before there is work with them: each costs more than its refusal is worth.

How many may be under way at a time nobody has to say: the window shrinks by one with each that is refused behind it, and
grows by a fraction of one with each that is taken. So it settles where that fraction of those let through is refused; few
go the long way to be refused there, and no room is left unused.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.serving.refusals import ApiError

PATHS = frozenset({"/v1/search", "/v1/embeddings"})
"""Where there is work with a request."""
FIRST = 128
"""Requests that may be under way before anything is known."""
FEWEST = 8
"""So many may be in any case."""
GROWTH = 0.02
"""Of the window, for each request that is taken while it is in use."""
OVERLOADED = frozenset({429, 504})
"""What is answered where too much is waiting."""


class Throttle:
    """ASGI middleware before what may answer 429.

    Args:
        app: it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._window = float(FIRST)
        self._under_way = 0
        self._refusal = refusal().response()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] not in PATHS:
            return await self._app(scope, receive, send)
        if self._under_way >= self._window:
            return await self._refusal(scope, receive, send)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._note(message["status"])
            await send(message)

        self._under_way += 1
        try:
            await self._app(scope, receive, noted)
        finally:
            self._under_way -= 1

    def _note(self, status: int) -> None:
        if status in OVERLOADED:
            self._window = max(FEWEST, self._window - 1)
        elif status < 400 and self._under_way > self._window / 2:  # else nothing is learnt about its bound
            self._window += GROWTH


def refusal() -> ApiError:
    """Of a request that is one too many."""
    return ApiError.later(429, "too many requests are waiting", 2.0, type="rate_limit_error", code="queue_full")
