"""Start-up at the lowest CPU priority (SCHED_IDLE), so that a new replica does not slow down the replicas that serve.

A replica spends most of its start on imports and on reading weights. Linux schedules each thread by its own policy, and a
priority cannot be raised again without privileges. So this work runs on a separate thread, which then ends.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import psutil

from infembed_ray.ray_compat import REPLICA_MODULE, REPLICA_TITLE

T = TypeVar("T")

REPLICA = f"{REPLICA_TITLE}infembed"
"""Beginning of the process title of this package's replicas."""
MODULES = (REPLICA_MODULE, "infembed_ray.serving.replicas")
ENCODER_MODULES = (*MODULES, "infembed_ray.serving.encoder.engine")


def in_background(function: Callable[[], T]) -> T:
    """Return the result of a function. If a replica of this package runs on this machine, call it at the lowest priority.

    Threads that the function starts then keep that priority.
    """
    if not _replica_here():
        return function()
    with ThreadPoolExecutor(1, "start-up", initializer=lower_priority) as thread:
        return thread.submit(function).result()


def lower_priority() -> None:
    """Set the lowest CPU priority (SCHED_IDLE) for this thread and the threads that it starts."""
    with suppress(AttributeError, OSError):  # not Linux, or not permitted
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def import_modules() -> None:
    """Import the modules of every replica."""
    _import(MODULES)


def import_encoder_modules() -> None:
    """Import the modules of an encoder replica."""
    _import(ENCODER_MODULES)


def _import(modules: tuple[str, ...]) -> None:
    # The replica's constructor reports a failing import better than a worker that does not start.
    with suppress(Exception):
        in_background(lambda: [importlib.import_module(module) for module in modules])


def _replica_here() -> bool:
    for process in psutil.process_iter():
        with suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith(REPLICA) and process.pid != os.getpid():
                return True
    return False
