"""Worst cases of requests, also at endpoints that ignore the cap of an answer.

The cap bounds an answer only where the endpoint keeps to it, which the dialects tell (module `dialects`). Otherwise a request
is reserved at twice the longest answer to its step so far, and under a budget the requests of a step begin slowly: one is
in flight at first, and each answer admits one more. So the first answers show how long they are while little is in flight.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from infembed_ray.llm.chat import CAP, Completion, Request
from infembed_ray.llm.endpoint import WireFormat
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.rate_limits import Amounts

MARGIN = 2
"""Worst case of an answer without a cap, as a multiple of the longest answer to the same step so far."""


class WorstCases:
    """What requests can use. Use it within one event loop.

    Args:
        budgeted: whether the USD are limited.
        warn: sends a message to the user.
    """

    def __init__(self, wire: WireFormat, table: PriceTable, budgeted: bool, warn: Callable[[str], None]) -> None:
        self.capped: set[str] = set()
        """Models that keep to the cap at every endpoint."""
        self._wire, self._table, self._warn = wire, table, warn
        self._budgeted = budgeted
        self._longest: defaultdict[tuple[str, str], int] = defaultdict(int)  # by model and step
        self._room: defaultdict[tuple[str, str], asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(1))

    def cap(self, request: Request) -> int | None:
        """Return the most completion tokens to expect; None if the request has no cap."""
        cap: int | None = request.parameters.get(CAP)
        if cap is None or request.model in self.capped:
            return cap
        return max(cap, MARGIN * self._longest[request.model, request.step])

    def amounts(self, request: Request, cap: int | None) -> Amounts:
        """Return the most that a request can use with an answer of `cap` tokens."""
        if cap != request.parameters.get(CAP):
            request = replace(request, parameters={**request.parameters, CAP: cap})
        return self._wire.worst_case(request, self._table)

    def learn(self, request: Request, completion: Completion) -> None:
        """Note the length of an answer; warn once of each model that exceeds its cap."""
        key = request.model, request.step
        self._longest[key] = max(self._longest[key], completion.completion_tokens)
        if completion.completion_tokens > request.parameters.get(CAP, completion.completion_tokens):
            self.capped.discard(request.model)
            self._warn(
                f"model {request.model}: an answer has more tokens than its max_tokens, which the endpoint ignores; from now on "
                f"each request counts at {MARGIN} times the longest answer to its step"
            )
        if key in self._room:
            self._room[key].release()

    @asynccontextmanager
    async def room(self, request: Request) -> AsyncIterator[None]:
        """Wait until enough answers to the request's step have shown how long they are."""
        if not self._budgeted or CAP not in request.parameters or request.model in self.capped:
            yield
            return
        async with self._room[request.model, request.step]:
            yield
