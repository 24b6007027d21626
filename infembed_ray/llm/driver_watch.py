"""Drain an actor whose driver was killed: it sends nothing more, journals the answers in flight, and exits.

Without it, the actors of a cluster that dies with its driver would send for two more seconds and lose the last answers. A
cluster that outlives the driver ends its actors at once; their requests in flight are sent again by the next run.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from infembed_ray import ray_compat
from infembed_ray.llm.client import ChatClient
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.ledger import RateLimiter

DRAIN_S = 30.0
"""Seconds until an actor cuts off requests that are still unanswered. Ray's core ends a process that has found no control
store for 60 s."""
RAY_ENVIRONMENT = ray_compat.raylet_death_check(2 * DRAIN_S)
"""Environment of an actor that drains, so that Ray's check for a dead raylet comes after the drain."""

CAN_WATCH = hasattr(os, "pidfd_open")
"""Whether this system can watch a process: Linux."""
_POLL_S = 0.01


class DriverWatch:
    """Watches an actor's driver and drains the actor when it dies. Use it within the actor's event loop.

    Args:
        driver: its process id; None does not watch it.
        exit_process: ends the process without clean-up, which would wait for the dead cluster.
    """

    def __init__(
        self,
        driver: int | None,
        limiter: RateLimiter,
        client: ChatClient,
        journal: Journal,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._driver = driver
        self._limiter = limiter
        self._client = client
        self._journal = journal
        self._exit = exit_process
        self._draining: asyncio.Task[None] | None = None

    @property
    def died(self) -> bool:
        """Whether the driver is dead, so this process is about to exit."""
        return self._draining is not None

    def watch(self) -> None:
        """Start watching; further calls have no effect."""
        driver, self._driver = self._driver, None
        with contextlib.suppress(OSError):  # no such process, or a sandbox without pidfd
            if driver is not None:
                process = os.pidfd_open(driver)
                asyncio.get_running_loop().add_reader(process, self._start_draining, process)

    def _start_draining(self, process: int) -> None:
        asyncio.get_running_loop().remove_reader(process)
        self._limiter.fail("the driver was killed")
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            with contextlib.suppress(OSError):
                self._journal.open()  # the run that resumes waits for processes that write to the journal
            deadline = time.monotonic() + DRAIN_S
            while self._client.busy and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S)
            await self._client.disconnect()
            while self._client.busy:
                await asyncio.sleep(_POLL_S)
        finally:
            self._exit(0)
