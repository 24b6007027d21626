"""Drain an actor whose driver was killed: it sends nothing more, journals the answers in flight, and exits.

If the driver started the cluster, the raylet dies with it. The actors live on for about two seconds, until Ray notices and
ends them without a signal. In that time they would send more requests and lose the last answers. So an actor on the
driver's machine watches the driver's process (pidfd) and drains. On a cluster that outlives the driver, Ray ends the actors
within 0.1 s of the driver's death; requests in flight are then cut off and sent again by the next run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from infembed_ray.synthesis.client import ChatClient
from infembed_ray.synthesis.journal import Journal
from infembed_ray.synthesis.limits import Gate

DRAIN_S = 30.0
"""Seconds until an actor closes the connections whose requests are still unanswered. Ray's core ends a process that has
found no control store for 60 s."""
RAY_ENVIRONMENT = {"RAY_raylet_death_check_interval_milliseconds": str(int(2 * DRAIN_S * 1000))}
"""Environment of an actor that drains, so that Ray's check for a dead raylet comes after the drain."""

_LOOK_S = 0.01


class Process(NamedTuple):
    """A process that others on its machine can watch."""

    namespace: str
    """The boot and the pid namespace in which the id is valid: containers on a machine have namespaces of their own."""
    id: int


def this_process() -> Process | None:
    """This process; None where processes cannot be watched (not Linux, or a sandbox without pidfd)."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return Process(f"{boot} {os.readlink('/proc/self/ns/pid')}", os.getpid())
    except (AttributeError, OSError):
        return None


class Orphan:
    """Watches the driver of an actor. Use it within the actor's event loop.

    Args:
        driver: its `this_process`. It is watched if its namespace is this process's.
        gate, client, journal: of the actor.
        exit_process: ends the process without clean-up, which would wait for the dead cluster.
    """

    def __init__(
        self,
        driver: Process | None,
        gate: Gate,
        client: ChatClient,
        journal: Journal,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        here = this_process()
        self._driver = driver.id if driver and here and driver.namespace == here.namespace else None
        self._gate = gate
        self._client = client
        self._journal = journal
        self._exit = exit_process
        self._watched = False
        self._draining: asyncio.Task[None] | None = None

    @property
    def orphaned(self) -> bool:
        """The driver is dead: this process is about to exit."""
        return self._draining is not None

    def watch(self) -> None:
        """Begin to watch, at the first call."""
        if self._watched or self._driver is None:
            return
        self._watched = True
        try:
            process = os.pidfd_open(self._driver)
        except ProcessLookupError:
            self._begin()
        except OSError:  # the kernel or the sandbox has no pidfd
            return
        else:
            asyncio.get_running_loop().add_reader(process, self._ended, process)

    def _ended(self, process: int) -> None:
        asyncio.get_running_loop().remove_reader(process)
        self._begin()

    def _begin(self) -> None:
        self._gate.fail("the driver was killed")
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            with contextlib.suppress(OSError):
                self._journal.open()  # the run that resumes waits for processes that write to the journal
            deadline = time.monotonic() + DRAIN_S
            while self._client.busy and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK_S)
            await self._client.hang_up()
            while self._client.busy:
                await asyncio.sleep(_LOOK_S)
        finally:
            self._exit(0)
