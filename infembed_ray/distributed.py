"""The connection to a Ray cluster, shared by the stages' own `distributed.py`."""

from __future__ import annotations

import logging
import os

import ray


def on_a_cluster() -> bool:
    """Does this process belong to a cluster: has it joined one, or was it submitted to one?"""
    return ray.is_initialized() or bool(os.environ.get("RAY_ADDRESS"))


def connect() -> None:
    """Join the cluster this process belongs to (a submitted job: RAY_ADDRESS is set), else start one on this machine.

    A local cluster binds to loopback, has no dashboard and ends with this process.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray 2.60 warns once per worker about a future default; the setting it asks for is this one.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Workers' logs stay in the cluster's log files (dashboard, `ray logs`): what a worker has to say to the person who
    # started the step arrives as results, progress lines or the exception that ended it.
    options = {"logging_level": logging.ERROR, "log_to_driver": False}
    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, **options)
    else:
        # Ray's core prints as errors what Ray Data does on purpose (issue 53727); real failures arrive as exceptions.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        ray.init(address="local", include_dashboard=False, **options)
    # Our own progress lines replace Ray Data's bars.
    data = ray.data.DataContext.get_current()
    data.enable_progress_bars = False
    data.print_on_execution_start = False
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.ERROR)
