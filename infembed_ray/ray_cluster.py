"""Connection to a Ray cluster, shared by the `distributed.py` of all stages."""

import contextlib
import logging
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import ray

from infembed_ray import ray_compat, telemetry
from infembed_ray.errors import InputError, StartError, in_one_line
from infembed_ray.progress import say
from infembed_ray.redaction import masked

PROBE_TIMEOUT_S = 10.0
"""Time for a cluster's address to accept a connection, and for killed processes to end."""


def on_a_cluster() -> bool:
    """Return whether this process has joined a cluster or was submitted to one."""
    return ray.is_initialized() or bool(os.environ.get("RAY_ADDRESS"))


def connect(address: str | None = None) -> None:
    """Join the cluster at `address` or RAY_ADDRESS (set in a submitted job); without either, start a local cluster.

    A local cluster has no dashboard, refuses calls without the token of ~/.ray/auth_token, which Ray creates, and ends with
    this process. RAY_AUTH_MODE=disabled would let everyone on the network run code in it.

    Raises:
        InputError: nothing listens at the address.
        StartError: two attempts to start or to join failed.
    """
    warnings.filterwarnings("ignore", "`ray_remote_args_fn` is deprecated")  # only it bounds restarts in Ray 2.60
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this setting, Ray 2.60 warns once per worker about a future default.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # The log of a job includes the output of its workers, with tracebacks. On a terminal that output would hide our
    # progress lines, so it stays in the cluster's log files; exceptions reach the driver anyway.
    options: dict[str, Any] = {
        "logging_level": logging.ERROR,
        "log_to_driver": ray_compat.JOB_CONFIG_VARIABLE in os.environ,
    }
    if address := address or os.environ.get("RAY_ADDRESS"):
        _require_listening(address)
        options["address"] = address
    else:
        # Ray's core logs normal operations of Ray Data as errors (ray issue 53727); real failures raise exceptions.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        for name, default in (ray_compat.NO_RETRY_LOG | ray_compat.START_LIMITS).items():
            os.environ.setdefault(name, default)
        options |= {"address": "local", "include_dashboard": False}
    if telemetry.json_logs():
        options["logging_config"] = ray.LoggingConfig(encoding="JSON", log_level="WARNING")
    for name, default in ray_compat.MEMORY_RETRIES.items():
        os.environ.setdefault(name, default)
    ray_compat.reload_core_config()
    ray_compat.pass_worker_logs_through(masked)
    _init(options)
    # Our progress lines replace Ray Data's progress bars.
    data = ray.data.DataContext.get_current()
    data.enable_progress_bars = False
    data.print_on_execution_start = False
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.ERROR)


@contextlib.contextmanager
def errors_of_tasks() -> Iterator[None]:
    """Raise the InputError of a task that the block waits for without Ray's wrapper."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise error.cause from None
        raise


def require_resources(**asked: tuple[str, float]) -> None:
    """Check what one task takes, where it is known: on this machine. A cluster may still grow, so Ray waits there.

    Args:
        asked: setting -> Ray's resource and the setting's value.

    Raises:
        InputError: the machine has less; the task would wait without end.
    """
    if os.environ.get("RAY_ADDRESS"):
        return
    for setting, (resource, amount) in asked.items():
        if amount > (has := ray.cluster_resources().get(resource, 0.0)):
            fault = f"this machine has {has:g} {resource}"
            raise InputError.of(setting, f"{amount:g}", fault, "lower it, or run on a cluster that has more")


def _init(options: dict[str, Any]) -> None:
    """Call `ray.init`; try once more if it fails, because most failures are time-outs on a busy machine."""
    started = time.monotonic()
    local = options["address"] == "local"
    for attempt in (1, 2):
        before = set(psutil.Process().children())
        try:
            # Only for a local cluster: when joining another cluster fails, Ray's core prints why and ends the process.
            noise = b"Set ray log level from environment variable"
            with _without_lines(noise) if local else contextlib.nullcontext():
                ray.init(**options)
            return
        except Exception as error:
            ray.shutdown()
            _kill(set(psutil.Process().children()) - before)
            failed = f"Ray failed to start ({options['address']}) after {time.monotonic() - started:.0f} s: {in_one_line(error)}"
            if attempt == 2:
                logs = f"{os.environ.get('RAY_TMPDIR', tempfile.gettempdir())}/ray/session_latest/logs"
                advice = "check RAY_ADDRESS, that Ray and Python have the cluster's versions, and the cluster's token"
                if local:
                    busy = "the machine is probably overloaded or out of memory; try again when it is less busy"
                    advice = f"{busy}; Ray's logs are in {logs}"
                raise StartError(f"{failed}; this was the second attempt: {advice}") from error
            say(f"{failed}; trying once more")


@contextlib.contextmanager
def _without_lines(notice: bytes) -> Iterator[None]:
    """Remove the lines that contain a notice of Ray's C++ core from the block's stderr; no setting turns it off."""
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
    """Kill processes and their descendants: Ray does not clean up a cluster that failed to start."""
    killed = []
    for parent in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (*parent.children(recursive=True), parent):
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=PROBE_TIMEOUT_S)


def _require_listening(address: str) -> None:
    """InputError if nothing listens at `host:port`; `ray.init` would wait for minutes and then end the process."""
    host, separator, port = address.rpartition(":")
    if not separator or "/" in host or not port.isdigit():
        return  # `auto`, or a scheme that Ray resolves itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()
    except OSError as error:
        fault = f"RAY_ADDRESS={address}: no cluster listens there ({error.strerror or error})"
        raise InputError(f"{fault}; start it, or unset RAY_ADDRESS to run on this machine alone") from error
