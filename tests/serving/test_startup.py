from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from infembed_ray.serving import startup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have nice values of their own on Linux only")

NICE = "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_only_what_runs_in_the_background_has_the_lowest_priority() -> None:
    before = nice()
    assert startup.in_background(nice) == startup.LOWEST
    assert nice() == before


def test_what_the_background_function_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        startup.in_background(lambda: 1 // 0)


@pytest.mark.parametrize("listens", [True, False])
def test_the_command_yields_only_to_an_api_that_listens(listens: bool) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        code = f"from infembed_ray.serving import startup; startup.yield_to_api(*{server.getsockname()}); {NICE}"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == (startup.LOWEST if listens else nice())


def test_the_hooks_import_what_replicas_need_and_leave_the_main_thread_alone() -> None:
    code = (
        "import sys; from infembed_ray.serving import startup; startup.import_modules();"
        f"print(set(startup.MODULES) <= set(sys.modules), 'torch' in sys.modules); {NICE}"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False", str(nice())]
