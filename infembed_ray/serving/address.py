"""The address of the API on this machine: whether a port is free, what is served there, and by which cluster."""

import json
import socket
import time
import urllib.request
from pathlib import Path

from infembed_ray import ray_compat
from infembed_ray.errors import InputError
from infembed_ray.storage.object_store import scratch

POLL_S = 0.1
PROBE_TIMEOUT_S = 2.0


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
                    fault = f"cannot be bound at {host} ({error.strerror})"
                    remedy = "stop the process that listens there, or set another port=..."
                    raise InputError.of("port", port, fault, remedy) from error
        time.sleep(POLL_S)


def served_fingerprint(url: str) -> str | None:
    """Return the fingerprint of the API at a URL of this machine; None if there is none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without the environment's proxy
    try:
        with opener.open(f"{url}/healthz", timeout=PROBE_TIMEOUT_S) as response:
            fingerprint = json.load(response)["deployment"]
    except (OSError, ValueError, KeyError, TypeError):  # nothing, or another server; HTTPError is an OSError
        return None
    return str(fingerprint)


def address_file(port: int) -> Path:
    """Return the file in which `infembed serve` notes its cluster for later commands of this machine."""
    return scratch() / f"serve-{port}.address"


def other_cluster(port: int) -> InputError:
    """Return the error for an API that this command cannot replace."""
    remedy = "stop it, set RAY_ADDRESS to its cluster, or set another port"
    return InputError.of("port", port, "another cluster's API is served there", remedy)


def free_haproxy_ports() -> dict[str, str]:
    """Choose free ports for HAProxy's own pages, so that several clusters can run on a machine."""
    with socket.socket() as metrics, socket.socket() as statistics:
        metrics.bind(("", 0))  # HAProxy listens on all interfaces
        statistics.bind(("", 0))
        return ray_compat.haproxy_ports(metrics.getsockname()[1], statistics.getsockname()[1])
