"""Start-up at a low CPU priority (nice 19), so that a new replica hardly slows down the replicas that serve (nice 15).

A replica spends most of its start on imports and on reading weights. Linux schedules each thread by its own priority, and
it cannot be raised again without privileges. So this work runs on a separate thread, which then ends.
"""

import importlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from infembed_ray.ray_compat import REPLICA_MODULE, UNUSED_BY_REPLICAS

T = TypeVar("T")

MODULES = (REPLICA_MODULE, "infembed_ray.serving.replicas")
MODEL_MODULES = (*MODULES, "infembed_ray.modeling.encoder")


def in_background(function: Callable[[], T]) -> T:
    """Return the result of a function, called at a low priority. Threads that it starts keep that priority."""
    with ThreadPoolExecutor(1, "start-up", initializer=lower_priority) as thread:
        return thread.submit(function).result()


def lower_priority() -> None:
    """Set a low CPU priority (nice 19) for this thread and the threads that it starts."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def import_modules() -> None:
    """Import the modules of every replica."""
    _import(MODULES)


def import_model_modules() -> None:
    """Import the modules of a replica with a model."""
    _import(MODEL_MODULES)


def _import(modules: tuple[str, ...]) -> None:
    sys.modules.setdefault(UNUSED_BY_REPLICAS, None)  # type: ignore[arg-type]  # counts as not installed
    # The replica's constructor reports a failing import better than a worker that does not start.
    with suppress(Exception):
        in_background(lambda: [importlib.import_module(module) for module in modules])
    if sys.modules[UNUSED_BY_REPLICAS] is None:
        del sys.modules[UNUSED_BY_REPLICAS]
