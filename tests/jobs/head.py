"""A private Ray head that requires a token, and `ray job submit` to it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.ports import free_ports

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
PORTS = (
    "port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "node-manager-port",
    "object-manager-port",
    "ray-client-server-port",
)


@dataclass(frozen=True)
class Head:
    """Address of the job API, an environment with its token, and the ports by the names of `PORTS`."""

    address: str
    environment: dict[str, str]
    ports: dict[str, int]

    def submit(self, verb: str, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Submit a script of jobs/ and wait for its end; `environment` changes the submitter's environment only."""
        command = [RAY, "job", "submit", "--address", self.address, "--working-dir", ROOT]
        return subprocess.run(
            [*command, "--", "python", f"jobs/{verb}.py", *overrides],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )


@contextlib.contextmanager
def running_head(secrets: dict[str, str]) -> Iterator[Head]:
    """Run a head, and kill it with all its processes; `secrets` are in the environment of every job."""
    # Not pytest's tmp_path: paths of Ray's Unix sockets may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        token, log = prepared_token(Path(directory)), Path(directory, "head.log")
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        command = [RAY, "start", "--head", "--block", f"--temp-dir={directory}", "--dashboard-host=127.0.0.1"]
        command += ["--num-cpus=8", f"--object-store-memory={150 * 2**20}"]
        command += [f"--{name}={port}" for name, port in ports.items()]
        with log.open("w") as stream:
            head = subprocess.Popen(
                command, env=environment | secrets, stdout=stream, stderr=stream, start_new_session=True
            )
        try:
            address = f"http://127.0.0.1:{ports['dashboard-port']}"
            wait_until_up(address, head, log)
            yield Head(address, environment, ports)
        finally:
            os.killpg(head.pid, signal.SIGKILL)  # SIGTERM would first drain the node, for 30 s
            head.wait()
            _wait_until_gone(directory)


def prepared_token(home: Path) -> Path:
    """Run the commands of docs/operations/cluster.md that prepare the token and the secrets; return the token's file."""
    page = (ROOT / "docs" / "operations" / "cluster.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```bash\n(pip install boto3.*?)```", page, re.DOTALL)
    _, _, commands = block.partition("\n")
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    subprocess.run(["bash", "-ec", commands], env=bare | {"HOME": str(home), "EDITOR": "touch"}, check=True)
    token = home / ".infembed" / "cluster" / "auth_token"
    assert [file.stat().st_mode & 0o77 for file in (token, token.with_name("secrets.env"))] == [0, 0]
    return token


def wait_until_up(address: str, head: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the job API answers, with 401 to a request without a token."""
    deadline = time.monotonic() + 90
    while (status := _status(f"{address}/api/jobs/")) is None:
        if time.monotonic() > deadline or head.poll() is not None:
            raise RuntimeError(f"no dashboard at {address}:\n{log.read_text()}")
        time.sleep(0.5)
    assert status == 401, f"status {status} without a token"


def _status(url: str) -> int | None:
    """Return the HTTP status of a page; None if there is no answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code
    except OSError:
        return None


def _wait_until_gone(directory: str) -> None:
    """Wait for the workers, which end by themselves once their raylet is gone."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        if directory not in listing.stdout:
            return
        time.sleep(0.5)
