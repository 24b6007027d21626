"""`infembed serve` as a command of its own process."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from infembed_ray.errors import InputError
from infembed_ray.serving.address import require_free_port
from tests.support.waiting import wait_until


def command_line(port: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "infembed_ray.cli", "serve", f"port={port}", *options]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without a cluster's address, and with more variables."""
    return {**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, **more}


def is_free(port: int) -> bool:
    try:
        require_free_port("127.0.0.1", port)
    except InputError:
        return False
    return True


@contextmanager
def serve_command(port: int, *options: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Serve while the block runs; give the process, once it serves, and the lines that it has printed.

    `more` are variables of its environment.
    """
    server = subprocess.Popen(
        command_line(port, *options),
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    threading.Thread(target=lambda: lines.extend(server.stdout or ()), daemon=True).start()
    try:
        wait_until(lambda: any("Ctrl-C" in line for line in lines) or server.poll() is not None, 300)
        assert server.poll() is None, "".join(lines)
        yield server, lines
    finally:
        server.kill()
        server.wait()
