"""Under overload most requests are refused before there is work with them: each costs more than its refusal is worth.

Adaptive throttling (Beyer et al., Site Reliability Engineering, chapter 21): who passes requests on refuses a share of
them itself, once more have been refused behind it than there is use in asking. What is let through is still more than
what is taken, so that no room is left unused, and that it has become calm again is seen at once.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.serving.refusals import ApiError

PATHS = frozenset({"/v1/search", "/v1/embeddings"})
"""Where there is work with a request."""
SURPLUS = 1.5
"""Requests that are let through for each that is taken."""
MEMORY_S = 1.0
"""After which a request has 1/e of its weight."""
FEW = 10.0
"""So many are let through in any case."""
UNDER_WAY_S = 3.0
"""No more are let through than are taken in so many seconds, as long as those are not answered."""
FEW_UNDER_WAY = 128
"""But so many in any case."""


class Throttle:
    """ASGI middleware before what may answer 429.

    Args:
        app: it.
        clock: seconds.
        draw: a random number in [0, 1).
    """

    def __init__(
        self, app: ASGIApp, clock: Callable[[], float] = time.monotonic, draw: Callable[[], float] = random.random
    ) -> None:
        self._app = app
        self._clock = clock
        self._draw = draw
        self._asked = 0.0
        self._taken = 0.0
        self._under_way = 0
        self._at = clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] not in PATHS:
            return await self._app(scope, receive, send)
        self._forget()
        share = (self._asked - max(SURPLUS * self._taken, FEW)) / (self._asked + 1)
        if self._draw() < share or self._under_way >= max(FEW_UNDER_WAY, UNDER_WAY_S * self._taken / MEMORY_S):
            self._asked += 1
            return await refusal().response()(scope, receive, send)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._forget()
                self._asked += 1  # now, not when it came: an answer that takes its time is no refusal
                self._taken += message["status"] != 429
            await send(message)

        self._under_way += 1
        try:
            await self._app(scope, receive, noted)
        finally:
            self._under_way -= 1

    def _forget(self) -> None:
        now = self._clock()
        kept = math.exp((self._at - now) / MEMORY_S)
        self._at = now
        self._asked *= kept
        self._taken *= kept


def refusal() -> ApiError:
    """Of a request that is one too many."""
    return ApiError.later(429, "too many requests are waiting", 2.0, type="rate_limit_error", code="queue_full")
