"""Free TCP ports of this machine."""

import contextlib
import os
import random
import socket

FIRST, PER_WORKER, WORKERS = 20_000, 2_000, 6
"""The range 20000-31999: above the ports of Ray's workers, below those that the system gives to outgoing connections."""


def free_port() -> int:
    """Return a free loopback port. Workers of pytest-xdist have disjoint ranges."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return distinct free loopback ports, as `free_port`."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    first = FIRST + worker * PER_WORKER
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(first, first + PER_WORKER), PER_WORKER):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"fewer than {count} free ports from {first} on")
