"""The connection to a Ray cluster, shared by the stages' own `distributed.py`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import psutil
import ray

from infembed_ray.errors import InputError, StartError, in_one_line
from infembed_ray.progress import say

START_LIMITS = {
    "RAY_gcs_server_port_wait_time_s": "90",
    "RAY_raylet_start_wait_time_s": "90",
    "RAY_agent_register_timeout_ms": "90000",
}
"""How long each process of a local cluster may take to start. Ray's own 30 s are too short on a busy machine."""
PROBE_TIMEOUT_S = 10.0
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray in the driver of a submitted job."""


def on_a_cluster() -> bool:
    """Does this process belong to a cluster: has it joined one, or was it submitted to one?"""
    return ray.is_initialized() or bool(os.environ.get("RAY_ADDRESS"))


def connect(address: str | None = None) -> None:
    """Join the cluster at `address` or RAY_ADDRESS (set in a submitted job), else start one on this machine.

    A local cluster binds to loopback, has no dashboard and ends with this process.

    Raises:
        InputError: nothing listens at the address.
        StartError: Ray failed to start or to join twice.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray 2.60 warns once per worker about a future default; the setting it asks for is this one.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A job's log shows what its workers print, tracebacks included. On a terminal it would drown our own lines, so
    # there workers' output stays in the cluster's log files; results, progress and exceptions reach the driver anyway.
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": _JOB in os.environ}
    if address := address or os.environ.get("RAY_ADDRESS"):
        _require_listening(address)
        options["address"] = address
    else:
        # Ray's core prints as errors what Ray Data does on purpose (issue 53727); real failures arrive as exceptions.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        # Ray Serve kills its controller while calls to it are pending; the driver would print that they are retried.
        os.environ.setdefault("RAY_enable_output_error_log_if_still_retry", "0")
        for limit, default in START_LIMITS.items():
            os.environ.setdefault(limit, default)
        options |= {"address": "local", "include_dashboard": False}
    ray._raylet.Config.initialize("")  # private: Ray reads its variables once, when it is imported
    _init(options)
    # Our own progress lines replace Ray Data's bars.
    data = ray.data.DataContext.get_current()
    data.enable_progress_bars = False
    data.print_on_execution_start = False
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.ERROR)


def _init(options: dict[str, Any]) -> None:
    """Call `ray.init`, and once more if it fails: most failures are time-outs of a machine that was busy."""
    started = time.monotonic()
    local = options["address"] == "local"
    for attempt in (1, 2):
        before = set(psutil.Process().children())
        try:
            # Only of our own cluster: when joining another one fails, Ray's core ends the process and prints why.
            quiet = _without(b"Set ray log level from environment variable") if local else contextlib.nullcontext()
            with quiet:
                ray.init(**options)
            return
        except Exception as error:
            ray.shutdown()
            _kill(set(psutil.Process().children()) - before)
            failed = f"Ray failed to start ({options['address']}) after {time.monotonic() - started:.0f} s: {in_one_line(error)}"
            if attempt == 2:
                logs = f"{os.environ.get('RAY_TMPDIR', tempfile.gettempdir())}/ray/session_latest/logs"
                advice = (
                    f"the machine is probably overloaded or out of memory, try again when it is less busy; Ray's logs are in {logs}"
                    if local
                    else "check RAY_ADDRESS, that Ray and Python have the cluster's versions, and the cluster's token"
                )
                raise StartError(f"{failed}; this was the second attempt: {advice}") from error
            say(f"{failed}; trying once more")


@contextlib.contextmanager
def _without(notice: bytes) -> Iterator[None]:
    """Drop the lines with a notice of Ray's C++ core, which no setting turns off, from the stderr of the block."""
    with tempfile.TemporaryFile() as captured:
        stderr = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            os.write(2, b"".join(line for line in captured if notice not in line))


def _kill(processes: set[psutil.Process]) -> None:
    """Kill processes and all that they started: Ray forgets those of a cluster that did not finish starting."""
    killed = []
    for parent in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (*parent.children(recursive=True), parent):
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=PROBE_TIMEOUT_S)


def _require_listening(address: str) -> None:
    """InputError if nothing listens at `host:port`. `ray.init` would wait for minutes and then end the process."""
    host, separator, port = address.rpartition(":")
    if not separator or "/" in host or not port.isdigit():
        return  # `auto`, or a scheme that Ray resolves itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise InputError(
            f"RAY_ADDRESS={address}: no cluster listens there ({error.strerror or error}); start it, or unset RAY_ADDRESS to "
            "run on this machine alone"
        ) from error
