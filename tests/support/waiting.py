"""Wait on a condition instead of sleeping."""

import asyncio
import time
import urllib.request
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60, poll_s: float = 0.02) -> None:
    """Poll a condition until it is true.

    Raises:
        AssertionError: it is still false after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"condition still false after {seconds:g} s"
        time.sleep(poll_s)


async def wait_until_async(condition: Callable[[], object], seconds: float = 60, poll_s: float = 0.001) -> None:
    """Poll a condition without blocking the event loop, as `wait_until`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"condition still false after {seconds:g} s"
        await asyncio.sleep(poll_s)


def answers(url: str) -> bool:
    """Return whether a server answers at a URL."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
