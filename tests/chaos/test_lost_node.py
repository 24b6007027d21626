"""A node whose disk is lost with it: with the journal in an object store, a run repeats at most what was not uploaded."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.records import tables
from infembed_ray.storage import steps
from infembed_ray.storage.object_store import SCRATCH
from tests.chaos.seeds import write_seeds
from tests.support.stand_in_llm import stand_in_process as stand_in
from tests.support.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
FILES = (tables.KEPT_FILE, tables.REJECTED_FILE, tables.DEAD_LETTER_FILE)
IN_FLIGHT = 16
UPLOAD_EVERY_S = 2.0
SLACK_S = 1.5
"""Seconds that an upload and the removal of the node may take here."""

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def rows_of(output: str) -> list[list[dict[str, Any]]]:
    published = steps.resolve_input(output, "output")
    return [tables.read_raw(published / file) for file in FILES]


def test_a_lost_node_repeats_only_what_it_had_not_uploaded(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    seeds = write_seeds(tmp_path / "seeds.jsonl", 300)
    scratches = [tmp_path / f"node {number}" for number in range(3)]
    monkeypatch.setenv(SCRATCH, str(tmp_path / "driver"))
    with stand_in(latency_s=0.05, jitter_s=0.1, mistaken=0.2) as server:
        # The driver joins the head, which keeps the limits; the actors fit only on the other nodes.
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
        try:
            nodes = [
                cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, env_vars={SCRATCH: str(scratch)})
                for scratch in scratches
            ]

            def run(output: str, **environment: str) -> subprocess.Popen[bytes]:
                command = [
                    *(sys.executable, "-m", "infembed_ray.cli", "synthesize", f"seeds={seeds}", f"output={output}"),
                    *(f"in_flight={IN_FLIGHT}", "actors=2", f"endpoint.base_url={server.url}"),
                    *("endpoint.api_key_env=null", f"journal_upload_s={UPLOAD_EVERY_S}"),
                ]
                log = (tmp_path / "driver.log").open("ab")
                return subprocess.Popen(
                    command, cwd=REPOSITORY, env={**os.environ, **environment}, stdout=log, stderr=log
                )

            process = run(f"{bucket}/lost", RAY_ADDRESS=cluster.address)
            wait_until(lambda: len(server.log("answered")) >= 700, 120)
            [lost, *_] = [number for number, scratch in enumerate(scratches) if list(scratch.rglob("*.jsonl"))]
            workers = [int(segment.stem.split("-")[-3]) for segment in scratches[lost].glob("journals/*/*.jsonl")]
            killed = time.time()
            cluster.remove_node(nodes[lost], allow_graceful=False)
            for worker in workers:  # workers outlive their raylet, but not their machine
                os.kill(worker, signal.SIGKILL)
            shutil.rmtree(scratches[lost])
            assert process.wait(timeout=300) == 0, (tmp_path / "driver.log").read_text()
        finally:
            cluster.shutdown()
        log = server.log("answered")
        answered = Counter(entry["request"] for entry in log)
        twice = [entry for entry in log if answered[entry["request"]] > 1]
        first = {entry["request"]: entry["time"] for entry in reversed(twice)}
        print(f"{len(answered)} requests, {len(first)} of them answered twice")
        assert first
        assert max(answered.values()) == 2
        assert all(killed - UPLOAD_EVERY_S - SLACK_S < at < killed + SLACK_S for at in first.values())

        assert run(f"{bucket}/undisturbed").wait(timeout=300) == 0
        assert rows_of(f"{bucket}/lost") == rows_of(f"{bucket}/undisturbed")
