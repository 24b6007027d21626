"""Adaptive concurrency limit (AIMD): rejects requests with 429 before routing, because a late rejection costs more.

The limit falls by one for each request that the service behind it rejects with 429. It recovers with the time since the
last of those rejections. Under steady overload it settles just above the service's capacity, with about one late rejection
a second. After a transient it is back at its maximum within `RECOVERY_S`, whether or not requests arrive. Nothing else
counts as overload: time-outs, slow clients and the rate limits of API keys leave the limit unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.serving.http.errors import KEY_LIMIT_HEADER, too_many_requests

LIMITED_PATHS = ("/v1/search", "/v1/embeddings", "/v1/documents")
"""Paths that use the encoder or the shards; each has its own limit, which the same paths of all collections share."""
MAX_LIMIT = 256
"""Maximum limit: by Little's law enough for 1,000 requests/s that each take 250 ms."""
MIN_LIMIT = 8
"""Minimum limit."""
RECOVERY_S = 8.0
"""Seconds without overload in which the limit grows from its minimum to its maximum."""
_KEY_LIMIT_HEADER = KEY_LIMIT_HEADER.lower().encode()


class ConcurrencyLimit:
    """Limit on the requests of one path that are in flight."""

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

    @property
    def full(self) -> bool:
        """Whether one more request would exceed the limit."""
        return self.in_flight >= self.limit

    def decrease(self) -> None:
        """Lower the limit to one below itself or below the requests in flight, whichever is less."""
        self._limit_at_overload = max(MIN_LIMIT, min(self.limit, self.in_flight) - 1)
        self._overloaded_at = monotonic()


class AdmissionControl:
    """ASGI middleware that applies the limits.

    Args:
        app: answers 429 when it is overloaded.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # One limit per path: large requests of one kind are rejected sooner and must not block the other kinds.
        self._limits = {path: ConcurrencyLimit() for path in LIMITED_PATHS}
        self._rejection = too_many_requests().response()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or reject it."""
        limit = self._limits.get(_without_collection(scope["path"])) if scope["type"] == "http" else None
        if limit is None:
            return await self._app(scope, receive, send)
        if limit.full:
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
