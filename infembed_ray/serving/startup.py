"""Start-up at the lowest nice value, so that it takes little from the replicas that serve on the same cores.

A replica spends most of its start on imports and on reading weights. A priority cannot be raised again without privileges, so
this work runs on a thread of its own, which then ends: on Linux every thread has its own nice value. Elsewhere nothing changes.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

LOWEST = 19
"""Nice value. Ray starts its workers at 15 (`RAY_worker_niceness`), which gives them 2.4 times the share."""
PROBE_TIMEOUT_S = 1.0
HOOK = "infembed_ray.serving.startup.import_modules"
"""For Ray's `worker_process_setup_hook`: a worker calls it before it becomes a replica."""
MODULES = ("ray.serve._private.replica", "infembed_ray.serving.deployments")
ENCODER_HOOK = "infembed_ray.serving.startup.import_encoder_modules"
ENCODER_MODULES = (*MODULES, "infembed_ray.serving.encoding")


def in_background(function: Callable[[], T]) -> T:
    """Return the result of a function that runs at the lowest CPU priority. Threads that it starts stay there."""
    with ThreadPoolExecutor(1, "start-up", initializer=lower_priority) as thread:
        return thread.submit(function).result()


def lower_priority() -> None:
    """Give this thread, and those it starts, the lowest CPU share."""
    # Not SCHED_IDLE: on a machine that is busy with other work, a replica would then hardly ever be ready.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)


def yield_to_api(host: str, port: int) -> None:
    """Lower the priority of this process if an API listens at the address: what it serves now comes first.

    Call it before other threads start, and never before this process starts a cluster, which would inherit the priority.
    """
    with suppress(OSError), socket.create_connection((host, port), PROBE_TIMEOUT_S):
        lower_priority()


def import_modules() -> None:
    """Import what every replica needs."""
    _import(MODULES)


def import_encoder_modules() -> None:
    """Import what a replica of the encoder needs."""
    _import(ENCODER_MODULES)


def _import(modules: tuple[str, ...]) -> None:
    # Whatever is wrong with a module, the replica's constructor reports it better than a worker that does not start.
    with suppress(Exception):
        in_background(lambda: [importlib.import_module(module) for module in modules])
