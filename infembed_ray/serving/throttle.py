"""Adaptive concurrency limit (AIMD): rejects requests with 429 before routing, because a late rejection costs more.

The limit falls by one for each request that the service behind it rejects with 429, and recovers with the time since the
last of those. Under steady overload it therefore settles just above what the service can bear, with about one late
rejection a second. After a transient it is back at its maximum within `RECOVERY_S`, whether or not requests come.
Nothing else counts as overload: time-outs and slow clients leave the limit as it is.
"""

from __future__ import annotations

from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.serving.refusals import ApiError

PATHS = ("/v1/search", "/v1/embeddings", "/v1/documents")
"""Paths that cost work; each has a limit of its own."""
MOST = 256
"""Maximum limit: by Little's law enough for 1,000 requests/s that each take 250 ms."""
FEWEST = 8
"""Minimum limit."""
RECOVERY_S = 8.0
"""Seconds without overload in which the limit grows from its minimum to its maximum."""


class Window:
    """Limit on the requests of one path that are in flight."""

    def __init__(self) -> None:
        self.under_way = 0
        self._floor = float(MOST)  # the limit at the last overload
        self._overloaded_at = monotonic()

    @property
    def limit(self) -> float:
        """Requests that may be in flight now."""
        # Cubic growth as in TCP CUBIC: slow at first, so steady overload costs few late rejections.
        recovered = min(1.0, (monotonic() - self._overloaded_at) / RECOVERY_S)
        return min(MOST, self._floor + (MOST - FEWEST) * recovered**3)

    @property
    def full(self) -> bool:
        """Would one more request exceed the limit?"""
        return self.under_way >= self.limit

    def shrink(self) -> None:
        """Lower the limit by one, from the requests in flight if those are fewer than it."""
        self._floor = max(FEWEST, min(self.limit, self.under_way) - 1)
        self._overloaded_at = monotonic()


class Throttle:
    """ASGI middleware that applies the limits.

    Args:
        app: answers 429 when it is overloaded.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # One limit a path: large requests of one kind are rejected sooner and must not shut out the other kinds.
        self._windows = {path: Window() for path in PATHS}
        self._refusal = refusal().response()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or reject it."""
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
                if message["status"] == 429:
                    window.shrink()
                window.under_way -= 1  # before it is sent: a client that reads slowly takes no place
            await send(message)

        window.under_way += 1
        try:
            await self._app(scope, receive, noted)
        finally:
            window.under_way -= not answered


def refusal() -> ApiError:
    """Return the answer to a request over the limit."""
    return ApiError.later(429, "too many requests are waiting", 2.0, type="rate_limit_error", code="queue_full")
