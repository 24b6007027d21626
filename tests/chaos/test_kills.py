"""SIGKILL at random moments, then resume: nothing is lost, no answered request is repeated, and the output is the same.

By the server's log no request may be answered twice; `answered` means that the client received the answer (see
tests/support/stand_in_llm.py). No client can keep an answer that was on its way when the client died. Only the endpoint
can, if it remembers its answers under an `Idempotency-Key`; with that header a request is answered once, whatever dies.
Without it, a killed process loses what it had received but not yet written to its journal, about a millisecond of work.

Actors drain after their driver's death, so killing the driver repeats no answered request at all. Workers outlive their
raylet by a second or two, in which they send and journal; the test counts from their end.
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
from pathlib import Path
from typing import Any

import pytest

from infembed_ray import records, storage
from tests.chaos.seeds import write_seeds
from tests.support.stand_in_llm import StandIn
from tests.support.stand_in_llm import stand_in_process as stand_in

REPOSITORY = Path(__file__).parents[2]
FILES = (records.KEPT_FILE, records.REJECTED_FILE, records.DEAD_LETTER_FILE)
BEHAVIOUR = {"latency_s": 0.05, "jitter_s": 0.1, "mistaken": 0.2, "chaos": 0.25}
KILLS = 10
IN_FLIGHT = 16
ON_THE_WAY_S = 0.5
"""Seconds before a process's death in which an answer may have been sent without reaching its journal."""
WORKERS_OUTLIVE_RAYLET_S = 3.0
SEEDS = 400

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("header", ["Idempotency-Key", None]),
]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeds(tmp_path_factory.mktemp("seeds") / "seeds.jsonl", SEEDS)


def driver(
    seeds: Path, output: Path, server: StandIn, header: str | None = None, **environment: str
) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "infembed_ray.cli", "synthesize", f"seeds={seeds}", f"output={output}"),
        *(f"in_flight={IN_FLIGHT}", "actors=2", f"endpoint.base_url={server.url}", "endpoint.api_key_env=null"),
        *(f"endpoint.idempotency_header={header or 'null'}", "endpoint.timeout_s=5", "endpoint.max_retries=20"),
    ]
    log = (output.parent / "driver.log").open("ab")
    return subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **environment}, stdout=log, stderr=log)


Rows = dict[str, tuple[str, dict[str, Any]]]
"""Id of a seed -> file and columns of its row."""


def rows_of(output: Path) -> Rows:
    published = storage.resolve(output)
    rows = [(file, row) for file in FILES for row in records.read_raw(published / file)]
    assert len(rows) == SEEDS
    return {row.pop("id"): (file, {**row, "provenance": None}) for file, row in rows}


def assert_agree(got: Rows, wanted: Rows) -> None:
    """Every seed has one row; rows that faults spared in both runs are equal. Faults are drawn for each attempt."""
    assert got.keys() == wanted.keys()
    spared = [seed for seed in got if records.DEAD_LETTER_FILE not in (got[seed][0], wanted[seed][0])]
    assert len(spared) > SEEDS / 2
    assert [got[seed] for seed in spared] == [wanted[seed] for seed in spared]


@pytest.fixture(scope="module")
def uninterrupted(seeds: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    output = tmp_path_factory.mktemp("uninterrupted") / "out"
    with stand_in(**BEHAVIOUR) as server:
        assert driver(seeds, output, server).wait() == 0
    return rows_of(output)


Kill = tuple[float, float]
"""Time of the signal, and time at which all killed processes had ended."""


def check(what: str, header: str | None, server: StandIn, kills: list[Kill]) -> None:
    """Check the server's log after some kills."""
    log = server.log()
    answered = server.usable_answers()
    twice = {request for request, times in answered.items() if times > 1}
    ended = dict(Counter(entry["ended"] for entry in log))
    print(f"\n{what}, header {header}: {len(kills)} kills, {len(twice)} requests answered twice; {ended}")
    assert kills
    if header is not None:
        assert not twice
    assert len(twice) <= IN_FLIGHT * len(kills)
    for request in twice:
        for entry in [each for each in server.log("answered") if each["request"] == request][:-1]:
            at = entry["time"]
            assert any(sent - ON_THE_WAY_S < at < gone + ON_THE_WAY_S for sent, gone in kills), (at, kills)


def after_random_share(server: StandIn, rng: random.Random) -> None:
    """Wait for a random number of further answers."""
    wanted = len(server.log("answered")) + rng.randint(20, SEEDS * 6 // KILLS)
    deadline = time.monotonic() + 120
    while len(server.log("answered")) < wanted and time.monotonic() < deadline:
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


def test_a_driver_killed_at_random_moments(
    uninterrupted: Rows, seeds: Path, tmp_path: Path, header: str | None
) -> None:
    rng, kills = random.Random(f"driver {header}"), list[Kill]()
    with stand_in(**BEHAVIOUR) as server:
        for _ in range(KILLS):
            process = driver(seeds, tmp_path / "out", server, header)
            after_random_share(server, rng)
            if process.poll() is not None:
                break
            sent = time.time()
            process.kill()
            process.wait()
            wait_for_writers(tmp_path / "out" / "journal")
            kills.append((sent, time.time()))
        assert driver(seeds, tmp_path / "out", server, header).wait() == 0
        check("driver", header, server, kills)
        assert max(server.usable_answers().values()) == 1
    assert_agree(rows_of(tmp_path / "out"), uninterrupted)


def test_workers_killed_at_random_moments(uninterrupted: Rows, seeds: Path, tmp_path: Path, header: str | None) -> None:
    rng, kills = random.Random(f"worker {header}"), list[Kill]()
    with stand_in(**BEHAVIOUR) as server:
        process = driver(seeds, tmp_path / "out", server, header)
        for _ in range(KILLS):
            after_random_share(server, rng)
            alive = list(workers_of(tmp_path / "out" / "journal"))
            if process.poll() is None and alive:
                sent, victim = time.time(), rng.choice(alive)
                os.kill(victim, signal.SIGKILL)
                while os.path.exists(f"/proc/{victim}/exe"):
                    time.sleep(0.01)
                kills.append((sent, time.time()))
        assert process.wait() == 0
        check("worker", header, server, kills)
    assert_agree(rows_of(tmp_path / "out"), uninterrupted)


def test_nodes_killed_at_random_moments(uninterrupted: Rows, seeds: Path, tmp_path: Path, header: str | None) -> None:
    from ray.cluster_utils import Cluster

    rng, kills = random.Random(f"node {header}"), list[Kill]()
    # The driver joins the head, which keeps the limits; the actors fit only on the other nodes.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20) for _ in range(3)]
    try:
        with stand_in(**BEHAVIOUR) as server:
            process = driver(seeds, tmp_path / "out", server, header, RAY_ADDRESS=cluster.address)
            for _ in range(KILLS):
                after_random_share(server, rng)
                if process.poll() is None:
                    sent = time.time()
                    cluster.remove_node(nodes.pop(0), allow_graceful=False)
                    kills.append((sent, time.time() + WORKERS_OUTLIVE_RAYLET_S))
                    nodes.append(cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20))
            assert process.wait(timeout=600) == 0
            check("node", header, server, kills)
    finally:
        cluster.shutdown()
    assert_agree(rows_of(tmp_path / "out"), uninterrupted)
