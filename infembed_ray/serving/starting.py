"""Waits until a Serve application runs, and says why it does not."""

from __future__ import annotations

import time

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatus

from infembed_ray.errors import StartError, quoted_input_error
from infembed_ray.progress import say
from infembed_ray.ray_failures import memory_report

START_TIMEOUT_S = 600.0
"""Time for replicas to start: a large model is read and warmed up, and a node may have to be added first. `Plan.reading_s` is
added for the index and the model."""
POLL_S = 0.5
MAX_POLL_S = 5.0
"""Least and most seconds between two status queries to Serve's controller; each costs it work."""
PROGRESS_S = 10.0
"""Seconds between two lines about a starting application."""


def wait_until_running(name: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait for an application, with progress lines.

    Raises:
        InputError: a replica raised it.
        StartError: the application failed or did not start in time.
    """
    started = time.monotonic()
    deadline, progress_at = started + timeout_s, started + PROGRESS_S
    while (found := serve.status().applications[name]).status != ApplicationStatus.RUNNING:
        failed = found.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
        if failed or time.monotonic() > deadline:
            raise _start_failure(name, found)
        if time.monotonic() > progress_at:
            say(f"serve: waiting for {name}: {_pending(found)}")
            progress_at = time.monotonic() + PROGRESS_S
        # A status costs 0.1 s of CPU, which the replicas need on a small machine: poll every 5 % of the time waited so far.
        time.sleep(min(max(POLL_S, (time.monotonic() - started) / 20), MAX_POLL_S))


def _start_failure(name: str, application: ApplicationStatusOverview) -> Exception:
    """Return why an application did not start: the last lines of its replicas' tracebacks."""
    messages = [deployment.message for deployment in application.deployments.values() if deployment.message]
    if mistake := next(filter(None, map(quoted_input_error, messages)), None):
        return mistake
    reasons = [memory_report(message) or message.strip().splitlines()[-1] for message in messages]
    return StartError(f"{name} did not start: {'; '.join(reasons) or application.message}")


def _pending(application: ApplicationStatusOverview) -> str:
    """Return which deployments of an application have not started, and what resources the cluster has left."""
    pending = [
        f"{name} ({', '.join(f'{count} {state.lower()}' for state, count in deployment.replica_states.items())})"
        + (f": {' '.join(deployment.message.split())}" if deployment.message else "")
        for name, deployment in application.deployments.items()
        if deployment.status != DeploymentStatus.HEALTHY
    ]
    total, free = ray.cluster_resources(), ray.available_resources()
    left = [f"{free.get(name, 0.0):g} of {total[name]:g} {name}" for name in ("CPU", "GPU") if name in total]
    return f"{'; '.join(pending) or application.message}; free: {', '.join(left)}"
