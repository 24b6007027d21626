"""SIGKILL at random moments, then resume: nothing is lost, next to nothing is paid twice, the output is the same.

What a kill can repeat: a request whose answer the server had sent but the dying process had not read and appended to
its journal. Answers on their way at that moment, and no others: that is what the server's log must show. Actors outlive
their driver by a second or two, in which they go on and journal; their end is what counts.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infembed_ray import records, storage
from tests.stand_in_llm import StandIn, stand_in

REPOSITORY = Path(__file__).parents[2]
FILES = (records.KEPT_FILE, records.REJECTED_FILE, records.DEAD_LETTER_FILE)
BEHAVIOUR = {"latency_s": 0.05, "jitter_s": 0.1, "mistaken": 0.2, "refusal": 0.01, "server_error": 0.01}
ON_THE_WAY_S = 0.5
"""An answer that the server sent less than so long before a process died may not have been in its journal yet."""
WORKERS_OUTLIVE_RAYLET_S = 3.0
SEEDS = 400

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("seeds") / "seeds.jsonl"
    rng = random.Random(0)
    words = [
        f"{a}{b}{c}" for a in ("bra", "tol", "mer", "quin") for b in ("da", "li", "so") for c in ("ndor", "vex", "pila")
    ]
    rows = (
        {"id": str(number), "query": f"about {number}", "passage": f"{number}: {' '.join(rng.choices(words, k=40))}"}
        for number in range(SEEDS)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def driver(seeds: Path, output: Path, server: StandIn, **environment: str) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "infembed_ray.cli", "synthesize", f"seeds={seeds}", f"output={output}"),
        *("in_flight=16", "actors=2", f"endpoint.base_url={server.url}", "endpoint.api_key_env=null"),
    ]
    log = (output.parent / "driver.log").open("ab")
    return subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **environment}, stdout=log, stderr=log)


def rows_of(output: Path) -> list[list[dict[str, Any]]]:
    published = storage.resolve(output)
    return [records.read_raw(published / file) for file in FILES]


@pytest.fixture(scope="module")
def uninterrupted(seeds: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    output = tmp_path_factory.mktemp("uninterrupted") / "out"
    with stand_in(**BEHAVIOUR) as server:
        assert driver(seeds, output, server).wait() == 0
    return rows_of(output)


Kill = tuple[float, float]
"""When the signal was sent, and when the processes that it ended were all gone."""


def repeated(server: StandIn, kills: list[Kill]) -> int:
    """How many answers were paid for twice; each was on its way to a dying process."""
    answers: dict[str, list[float]] = defaultdict(list)
    for entry in server.log("answered"):
        answers[entry["request"]].append(entry["time"])
    again = [times for times in answers.values() if len(times) > 1]
    for times in again:
        for first in times[:-1]:
            assert any(sent - ON_THE_WAY_S < first < gone + ON_THE_WAY_S for sent, gone in kills), (first, kills)
    return len(again)


def after_random_share(server: StandIn, rng: random.Random) -> None:
    """Wait until a random share of the answers of a whole run are there; at least some more than now."""
    wanted = len(server.log("answered")) + rng.randint(20, SEEDS * 6 // 4)
    deadline = time.monotonic() + 120
    while len(server.log("answered")) < wanted and time.monotonic() < deadline:
        time.sleep(0.02)


def report(what: str, server: StandIn, kills: list[Kill], twice: int) -> None:
    answered = len(server.log("answered"))
    print(
        f"\n{what}: {len(kills)} kills, {answered} answers, {twice} paid twice, {Counter(e['ended'] for e in server.log())}"
    )


def test_a_driver_killed_at_random_moments(
    uninterrupted: list[list[dict[str, Any]]], seeds: Path, tmp_path: Path
) -> None:
    rng, kills = random.Random(1), list[Kill]()
    with stand_in(**BEHAVIOUR) as server:
        for _ in range(4):
            process = driver(seeds, tmp_path / "out", server)
            after_random_share(server, rng)
            if process.poll() is not None:
                break
            sent = time.time()
            process.kill()
            process.wait()
            gone(tmp_path / "out" / "journal")
            kills.append((sent, time.time()))
        assert driver(seeds, tmp_path / "out", server).wait() == 0
        report("driver", server, kills, repeated(server, kills))
    assert kills
    assert rows_of(tmp_path / "out") == uninterrupted


def workers_of(journal: Path) -> Iterator[int]:
    """Processes that write to a journal."""
    for segment in journal.glob("*.jsonl"):
        pid = int(segment.stem.split("-")[-2])
        if Path(f"/proc/{pid}").exists():
            yield pid


def gone(journal: Path) -> None:
    """Wait until nobody writes to a journal any more."""
    while list(workers_of(journal)):
        time.sleep(0.02)


def test_workers_killed_at_random_moments(
    uninterrupted: list[list[dict[str, Any]]], seeds: Path, tmp_path: Path
) -> None:
    rng, kills = random.Random(2), list[Kill]()
    with stand_in(**BEHAVIOUR) as server:
        process = driver(seeds, tmp_path / "out", server)
        for _ in range(4):
            after_random_share(server, rng)
            alive = list(workers_of(tmp_path / "out" / "journal"))
            if process.poll() is None and alive:
                sent, victim = time.time(), rng.choice(alive)
                os.kill(victim, signal.SIGKILL)
                while Path(f"/proc/{victim}/fd").exists() and os.path.exists(f"/proc/{victim}/exe"):
                    time.sleep(0.01)
                kills.append((sent, time.time()))
        assert process.wait() == 0
        report("worker", server, kills, repeated(server, kills))
    assert kills
    assert rows_of(tmp_path / "out") == uninterrupted


def test_nodes_killed_at_random_moments(uninterrupted: list[list[dict[str, Any]]], seeds: Path, tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    rng, kills = random.Random(3), list[Kill]()
    # The driver joins the head, where the limits are kept; the actors find room on the other nodes only.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20) for _ in range(3)]
    try:
        with stand_in(**BEHAVIOUR) as server:
            process = driver(seeds, tmp_path / "out", server, RAY_ADDRESS=cluster.address)
            for _ in range(2):
                after_random_share(server, rng)
                if process.poll() is None:
                    sent = time.time()
                    cluster.remove_node(nodes.pop(), allow_graceful=False)
                    kills.append((sent, time.time() + WORKERS_OUTLIVE_RAYLET_S))
            assert process.wait(timeout=600) == 0
            report("node", server, kills, repeated(server, kills))
    finally:
        cluster.shutdown()
    assert kills
    assert rows_of(tmp_path / "out") == uninterrupted
