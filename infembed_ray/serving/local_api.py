"""The API of this machine, as other commands see it: its port and what it serves."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable

from infembed_ray.errors import InputError

PROBE_TIMEOUT_S = 2.0
POLL_S = 0.5


def require_free_port(host: str, port: int, timeout_s: float = 0.0) -> None:
    """InputError unless `host:port` can be bound, now or within a time."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + timeout_s
    while True:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise InputError(
                        f"port={port}: cannot be bound at {host} ({error.strerror}); "
                        "stop the process that listens there, or set another port=..."
                    ) from error
        time.sleep(POLL_S)


def served_fingerprint(url: str, path: str = "/healthz") -> str | None:
    """Return the fingerprint of the API at a URL of this machine; None if there is none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without the environment's proxy
    try:
        with opener.open(url + path, timeout=PROBE_TIMEOUT_S) as response:
            fingerprint = json.load(response)["deployment"]
    except (OSError, ValueError, KeyError, TypeError):  # nothing, or another server; HTTPError is an OSError
        return None
    return str(fingerprint)


def wait_for_interrupt(each_second: Callable[[], None]) -> None:
    """Wait for SIGINT or SIGTERM; call a function about every second meanwhile."""
    interrupted = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: interrupted.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        while not interrupted.wait(1):  # handlers run here, also for a signal that another thread received
            each_second()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
