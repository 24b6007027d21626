"""SIGKILL at random moments, then resume: nothing is lost, no answered request is repeated, and the output is the same.

By the server's log no request may be answered twice; `answered` means that the client received the answer (see
tests/support/stand_in_llm.py). No client can keep an answer that was on its way when the client died: a killed process loses
what it had received but not yet written to its journal, about a millisecond of work.

A run from the command line has a cluster of its own. Its actors drain after their driver's death, so killing the driver
repeats no answered request at all. A submitted job runs on a cluster that outlives it and ends its actors at once: what is
in flight is asked again. Workers outlive their raylet by a second or two, in which they send and journal; the test counts
from their end.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from infembed_ray.records import tables
from infembed_ray.storage import steps
from tests.chaos.seeds import write_seeds
from tests.support.ports import free_ports
from tests.support.stand_in_llm import StandIn
from tests.support.stand_in_llm import stand_in_process as stand_in

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

REPOSITORY = Path(__file__).parents[2]
FILES = (tables.KEPT_FILE, tables.REJECTED_FILE, tables.DEAD_LETTER_FILE)
BEHAVIOUR = {"latency_s": 0.05, "jitter_s": 0.1, "mistaken": 0.2, "chaos": 0.25}
KILLS = 10
IN_FLIGHT = 16
ON_THE_WAY_S = 0.5
"""Seconds before a process's death in which an answer may have been sent without reaching its journal."""
WORKERS_OUTLIVE_RAYLET_S = 3.0
SEEDS = 800

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("how", ["cli", "job"]),
]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeds(tmp_path_factory.mktemp("seeds") / "seeds.jsonl", SEEDS)


OBJECT_STORE = {"object_store_memory": 80 * 2**20}


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Run a head with the job API, which keeps the limits, and three nodes; the actors fit only on those."""
    from ray.cluster_utils import Cluster

    port, agent = free_ports(2)
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port, "dashboard_agent_listen_port": agent}
    cluster = Cluster(initialize_head=True, head_node_args={**head, **OBJECT_STORE})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1, **OBJECT_STORE)
        yield cluster
    finally:
        cluster.shutdown()


@dataclass(frozen=True)
class Run:
    """A run that can be started again: the CLI, also on a cluster, or with `as_job` a job that is submitted to it."""

    seeds: Path
    output: Path
    server: StandIn
    cluster: Cluster | None = None
    as_job: bool = False

    def start(self) -> subprocess.Popen[bytes]:
        """Start it; the process ends with the run."""
        settings = [
            *(f"seeds={self.seeds}", f"output={self.output}", f"in_flight={IN_FLIGHT}", "actors=2"),
            *(f"endpoint.base_url={self.server.url}", "endpoint.api_key_env=null"),
            *("endpoint.timeout_s=5", "endpoint.max_retries=20"),
        ]
        environment: dict[str, str] = {}
        command = [sys.executable, "-m", "infembed_ray.cli", "synthesize"]
        if self.cluster is not None and self.as_job:
            submit = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--working-dir", str(REPOSITORY)]
            command = [*submit, "--address", f"http://{self.cluster.webui_url}", "--", "python", "jobs/synthesize.py"]
        elif self.cluster is not None:
            environment = {"RAY_ADDRESS": self.cluster.address}
        log = (self.output.parent / "driver.log").open("ab")
        return subprocess.Popen(
            [*command, *settings], cwd=REPOSITORY, env={**os.environ, **environment}, stdout=log, stderr=log
        )

    def kill_driver(self) -> None:
        """Kill the process that runs the pipeline, not the shell or the client of a job."""
        script = "jobs/synthesize.py" if self.as_job else "-m"
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if command[1:2] == [script] and f"output={self.output}" in command:
                process.kill()


Rows = dict[str, tuple[str, dict[str, Any]]]
"""Id of a seed -> file and columns of its row."""


def rows_of(output: Path) -> Rows:
    published = steps.resolve(output)
    rows = [(file, row) for file in FILES for row in tables.read_raw(published / file)]
    assert len(rows) == SEEDS
    return {row.pop("id"): (file, {**row, "provenance": None}) for file, row in rows}


def assert_agree(got: Rows, wanted: Rows) -> None:
    """Every seed has one row; rows that faults spared in both runs are equal. Faults are drawn for each attempt."""
    assert got.keys() == wanted.keys()
    spared = [seed for seed in got if tables.DEAD_LETTER_FILE not in (got[seed][0], wanted[seed][0])]
    assert len(spared) > SEEDS / 2
    print(dict(Counter(file for file, _ in got.values())), len(spared))
    assert [got[seed] for seed in spared] == [wanted[seed] for seed in spared]


@pytest.fixture(scope="module")
def uninterrupted(seeds: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    output = tmp_path_factory.mktemp("uninterrupted") / "out"
    with stand_in(**BEHAVIOUR) as server:
        assert Run(seeds, output, server).start().wait() == 0
    return rows_of(output)


Kill = tuple[float, float]
"""Time of the signal, and time at which all killed processes had ended."""


def check(what: str, server: StandIn, kills: list[Kill]) -> None:
    """Check the server's log after some kills."""
    log = server.log()
    answered = server.usable_answers()
    twice = {request for request, times in answered.items() if times > 1}
    ended = dict(Counter(entry["ended"] for entry in log))
    print(f"\n{what}: {len(kills)} kills, {len(answered)} requests answered, {len(twice)} twice; {ended}")
    assert len(kills) == KILLS
    assert len(twice) <= 2 * IN_FLIGHT * len(kills)
    usable = server.usable()
    for request in twice:
        for at in [each["time"] for each in usable if each["request"] == request][:-1]:
            assert any(sent - ON_THE_WAY_S < at < gone + ON_THE_WAY_S for sent, gone in kills), (at, kills)


def after_random_share(server: StandIn, rng: random.Random) -> None:
    """Wait for a random number of further answers."""
    wanted = server.answers() + rng.randint(20, SEEDS * 3 // KILLS)
    deadline = time.monotonic() + 120
    while server.answers() < wanted and time.monotonic() < deadline:
        time.sleep(0.02)


def workers_of(journal: Path) -> Iterator[int]:
    """Yield the processes that write to a journal."""
    for segment in journal.glob("*.jsonl"):
        pid = int(segment.stem.split("-")[-3])
        if Path(f"/proc/{pid}").exists():
            yield pid


def wait_for_writers(journal: Path) -> None:
    """Wait until no process writes to a journal."""
    while list(workers_of(journal)):
        time.sleep(0.02)


def test_a_driver_killed_at_random_moments(uninterrupted: Rows, seeds: Path, tmp_path: Path, how: str) -> None:
    rng, kills = random.Random("driver"), list[Kill]()
    with (
        stand_in(**BEHAVIOUR) as server,
        running_cluster() if how == "job" else nullcontext() as cluster,
    ):
        run = Run(seeds, tmp_path / "out", server, cluster, how == "job")
        for _ in range(KILLS):
            process = run.start()
            after_random_share(server, rng)
            if process.poll() is not None:
                break
            sent = time.time()
            run.kill_driver()
            wait_for_writers(run.output / "journal")
            kills.append((sent, time.time()))
            assert process.wait() != 0
        assert run.start().wait() == 0
        check(f"driver, {how}", server, kills)
        if how == "cli":
            assert max(server.usable_answers().values()) == 1
    assert_agree(rows_of(run.output), uninterrupted)


def test_workers_killed_at_random_moments(uninterrupted: Rows, seeds: Path, tmp_path: Path, how: str) -> None:
    rng, kills = random.Random("worker"), list[Kill]()
    with (
        stand_in(**BEHAVIOUR) as server,
        running_cluster() if how == "job" else nullcontext() as cluster,
    ):
        run = Run(seeds, tmp_path / "out", server, cluster, how == "job")
        process = run.start()
        for _ in range(KILLS):
            after_random_share(server, rng)
            alive = list(workers_of(run.output / "journal"))
            if process.poll() is None and alive:
                sent, victim = time.time(), rng.choice(alive)
                os.kill(victim, signal.SIGKILL)
                while os.path.exists(f"/proc/{victim}/exe"):
                    time.sleep(0.01)
                kills.append((sent, time.time()))
        assert process.wait() == 0
        check(f"worker, {how}", server, kills)
    assert_agree(rows_of(run.output), uninterrupted)


def test_nodes_killed_at_random_moments(uninterrupted: Rows, seeds: Path, tmp_path: Path, how: str) -> None:
    rng, kills = random.Random("node"), list[Kill]()
    with stand_in(**BEHAVIOUR) as server, running_cluster() as cluster:
        nodes = [*cluster.worker_nodes]
        run = Run(seeds, tmp_path / "out", server, cluster, how == "job")
        process = run.start()
        for _ in range(KILLS):
            after_random_share(server, rng)
            if process.poll() is None:
                sent = time.time()
                cluster.remove_node(nodes.pop(0), allow_graceful=False)
                kills.append((sent, time.time() + WORKERS_OUTLIVE_RAYLET_S))
                nodes.append(cluster.add_node(num_cpus=1, **OBJECT_STORE))
        assert process.wait(timeout=600) == 0
        check(f"node, {how}", server, kills)
    assert_agree(rows_of(run.output), uninterrupted)
