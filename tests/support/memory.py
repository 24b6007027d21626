"""Memory that a call takes, measured in a process of its own: tracemalloc counts every thread of its process."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def peak_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the most memory (bytes) that Python held during a second call of a function of a module."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_peak, function, arguments).result()


def _peak(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    function(*arguments)  # what is allocated once
    tracemalloc.start()
    function(*arguments)
    return tracemalloc.get_traced_memory()[1]
