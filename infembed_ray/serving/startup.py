"""Start-up at the lowest CPU priority, so that the replicas that serve on the same cores keep them.

A replica spends most of its start on imports and on reading weights. Linux schedules each thread by its own policy, and a
priority cannot be raised again without privileges. So this work runs on a thread of its own, which then ends.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import psutil

T = TypeVar("T")

REPLICA = "ray::ServeReplica:infembed"
"""Beginning of the process title that Ray gives to our replicas."""
MODULES = ("ray.serve._private.replica", "infembed_ray.serving.deployments")
ENCODER_MODULES = (*MODULES, "infembed_ray.serving.encoding")


def in_background(function: Callable[[], T]) -> T:
    """Return the result of a function.

    It runs at the lowest CPU priority if a replica of ours is on this machine. Threads that it starts then stay there.
    """
    if not _replica_here():
        return function()
    with ThreadPoolExecutor(1, "start-up", initializer=lower_priority) as thread:
        return thread.submit(function).result()


def lower_priority() -> None:
    """Leave the cores to all others that want them (SCHED_IDLE): this thread, and those that it starts."""
    with suppress(AttributeError, OSError):  # not Linux, or not permitted
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


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


def _replica_here() -> bool:
    for process in psutil.process_iter():
        with suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith(REPLICA) and process.pid != os.getpid():
                return True
    return False
