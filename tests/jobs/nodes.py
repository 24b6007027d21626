"""A Ray cluster whose nodes share no directory: each sees an empty /tmp of its own, and outputs can only be in a store.

Nodes share the machine's installed software (the image of a real cluster), and reach one another and the store by TCP.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.jobs.head import PORTS, RAY, ROOT, wait_until_up
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

TOKEN = "any-secret-of-at-least-thirty-two-characters"
PRIVATE = ("unshare", "--mount", "--propagation", "private", "sh", "-c")
"""Starts a command in a mount namespace of its own (util-linux)."""
NODE_PORTS = PORTS[3:8]


def require_private_nodes() -> None:
    """Skip where nodes cannot have a /tmp of their own."""
    if ROOT.is_relative_to(tempfile.gettempdir()):
        pytest.skip(f"the checkout is below {tempfile.gettempdir()}, which nodes would not see")
    if subprocess.run([*PRIVATE, "mount -t tmpfs tmpfs /tmp"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount (root, or CAP_SYS_ADMIN)")


@dataclass(frozen=True)
class Job:
    """The process of a `ray job submit`, which ends with the job."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def printed(self) -> str:
        """The job's output so far."""
        return self.log.read_text(encoding="utf-8")

    def wait_for(self, reached: Callable[[], object]) -> None:
        """Wait for a condition during the job."""
        wait_until(lambda: reached() or self.process.poll() is not None, seconds=300, poll_s=0.1)
        assert self.process.poll() is None, f"the job has ended:\n{self.printed}"

    def finish(self) -> str:
        """Wait for the end; returns what the job printed."""
        self.process.wait(timeout=600)
        assert self.process.returncode == 0, self.printed
        return self.printed


@dataclass
class Nodes:
    """A head and workers.

    Attributes:
        address: of the job API.
        workers: processes of the nodes besides the head; a killed one stays in the list.
    """

    address: str
    gcs: str
    environment: dict[str, str]
    log: Path
    start_head: Callable[[], subprocess.Popen[bytes]]
    head: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def add(self, **environment: str) -> None:
        """Start another worker node; it joins some seconds later."""
        command = [str(RAY), "start", f"--address={self.gcs}", "--block", *_resources(4)]
        command += _ports(NODE_PORTS)[1]
        self.workers.append(_start(command, self.environment | environment, self.log))

    def kill_gcs(self) -> None:
        """Kill the head's GCS and wait: `ray start --block` ends, and with it the head's container."""
        namespace = _namespace(self.head)
        (gcs,) = (pid for pid in _members(namespace) if psutil.Process(pid).name() == "gcs_server")
        os.kill(gcs, signal.SIGKILL)
        self.head.wait(timeout=60)
        _kill_members(namespace)

    def restart_head(self) -> None:
        """Start the head by the same command until it stays, as Kubernetes does; its GCS has its state from Redis."""
        deadline = time.monotonic() + 300
        while not self._answers():
            if self.head.poll() is not None:
                self.head = self.start_head()
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.page(f"{self.address}/api/jobs/", self.environment["RAY_AUTH_TOKEN"]))
        return False

    def kill_busiest(self) -> None:
        """Kill all processes of the worker node that has used most CPU time; its files are gone, too. Start another one."""
        _kill(max((worker for worker in self.workers if worker.poll() is None), key=_cpu_seconds))
        self.add()

    def wait_for(self, nodes: int) -> None:
        """Wait until this many nodes live."""
        wait_until(lambda: self._living() >= nodes, seconds=120, poll_s=0.5)

    def _living(self) -> int:
        try:
            page = self.page(f"{self.address}/nodes?view=summary", self.environment["RAY_AUTH_TOKEN"])
        except OSError:  # the head is starting
            return 0
        return sum(node["raylet"].get("state") == "ALIVE" for node in json.loads(page)["data"]["summary"])

    @staticmethod
    def page(url: str, key: str) -> str:
        """Return a page that requires a key or the token."""
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return str(response.read().decode())

    def files(self) -> Iterator[Path]:
        """Yield what the living nodes have in their own /tmp: Ray's logs and the scratch directories."""
        for process in (self.head, *self.workers):
            if process.poll() is None:
                yield from Path(f"/proc/{process.pid}/root/tmp").rglob("*")

    def submit(self, verb: str, *overrides: str, options: Sequence[str] = ()) -> Job:
        """Submit a script of jobs/; do not wait for it. `options` are those of `ray job submit`."""
        command = [str(RAY), "job", "submit", "--address", self.address, "--working-dir", str(ROOT), *options]
        log = self.log.with_name(f"{verb}.log")
        with log.open("w") as stream:
            process = subprocess.Popen(
                [*command, "--", "python", f"jobs/{verb}.py", *overrides],
                env=self.environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        return Job(process, log)


@contextlib.contextmanager
def running_nodes(
    workers: int, environment: dict[str, str], directory: Path, head_cpus: int = 1, **of_head: str
) -> Iterator[Nodes]:
    """Run a head without work of its own and some workers; kill all of them at the end.

    Args:
        workers: number of nodes besides the head.
        environment: variables of all processes, such as the store's address, or another token.
        directory: for the log.
        head_cpus: CPUs for work on the head.
        of_head: variables of the head only.
    """
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    secrets = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    ports, flags = _ports(PORTS)
    command = [str(RAY), "start", "--head", "--block", "--dashboard-host=127.0.0.1"]
    command += [*_resources(head_cpus), *flags]
    log = directory / "nodes.log"
    everywhere = kept | secrets | environment
    start = partial(_start, command, everywhere | of_head, log)
    address, gcs = f"http://127.0.0.1:{ports['dashboard-port']}", f"127.0.0.1:{ports['port']}"
    nodes = Nodes(address, gcs, everywhere, log, start, start())
    try:
        wait_until_up(nodes.address, nodes.head, log)
        for _ in range(workers):
            nodes.add()
        nodes.wait_for(workers + 1)
        yield nodes
    finally:
        for process in (*nodes.workers, nodes.head):
            _kill(process)


def _resources(cpus: int) -> list[str]:
    return [f"--num-cpus={cpus}", f"--object-store-memory={120 * 2**20}"]


def _ports(names: tuple[str, ...]) -> tuple[dict[str, int], list[str]]:
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    return ports, [f"--{name}={port}" for name, port in ports.items()]


def _start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("a") as stream:
        return subprocess.Popen(
            [*PRIVATE, 'mount -t tmpfs tmpfs /tmp && exec "$@"', "node", *command],
            env=environment,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a node."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        _kill_members(_namespace(process), process)
    process.wait()


def _kill_members(namespace: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Kill all processes in a mount namespace: workers have sessions of their own. Reap the one that this process started."""
    deadline = time.monotonic() + 10
    while members := _members(namespace):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if process is not None:
            process.poll()
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {members} of a killed node do not end")
        time.sleep(0.05)


def _namespace(process: subprocess.Popen[bytes]) -> str:
    return os.readlink(f"/proc/{process.pid}/ns/mnt")


def _cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """CPU time of all processes of a node."""
    total = 0.0
    for pid in _members(_namespace(process)):
        with contextlib.suppress(psutil.Error):
            total += sum(psutil.Process(pid).cpu_times()[:2])
    return total


def _members(namespace: str) -> list[int]:
    """Processes in a mount namespace."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended
            if os.readlink(f"/proc/{pid}/ns/mnt") == namespace:
                members.append(pid)
    return members
