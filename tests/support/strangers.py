"""Calls to a Ray cluster by a process that has not its token."""

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import grpc
import psutil
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

PROGRAM = """
import sys
from ray._raylet import GcsClient
print("keys:", len(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=10)))
"""


def ask_gcs(address: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """List the keys of a GCS in a process with this environment on top of the test's own."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, address],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def status(port: int, path: str) -> int:
    """Return the HTTP status of a page of this machine, asked without a token."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code


def ports_of_replicas(gcs_port: int) -> Iterator[int]:
    """Yield the ports on which the Serve replicas of a cluster on this machine listen."""
    for process in psutil.process_iter():
        try:
            if not process.cmdline()[0].startswith("ray::ServeReplica:"):
                continue
            of_cluster = any(f":{gcs_port}" in word for parent in process.parents() for word in parent.cmdline())
            connections = process.net_connections() if of_cluster else []
        except (psutil.Error, IndexError):
            continue
        yield from (connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN)


def call_replica(port: int) -> grpc.StatusCode:
    """Return how a replica's port refuses a call of Serve's own service without a token."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            ASGIServiceStub(channel).HandleRequest(ASGIRequest(), timeout=10)
        except grpc.RpcError as refusal:
            return refusal.code()  # type: ignore[no-any-return]
    return grpc.StatusCode.OK
