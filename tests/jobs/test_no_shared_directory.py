"""The six stages as jobs on three nodes that share no directory, with all outputs in an S3-compatible store.

One node is killed during each stage. The outputs must equal those of the same stages with local directories.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.quickstart import sample
from tests.jobs.head import ROOT
from tests.jobs.nodes import Nodes, require_private_nodes, running_nodes
from tests.support.files import read_jsonl, write_jsonl
from tests.support.object_store import BUCKET, published, server_process, system
from tests.support.ports import free_port
from tests.support.stand_in_llm import StandIn, stand_in
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.end_to_end, pytest.mark.timeout(1500)]

SEEDS = 40
CALLS = 8
"""Calls of a seed that is kept."""
ACTORS, IN_FLIGHT = 2, 6
UPLOAD_S = 2.0
LATENCY_S = 0.3


# ------------------------------------------------------------------------------------------------ the cluster


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An S3-compatible server in a process of its own; yields the variables that name it."""
    with server_process(tmp_path_factory.mktemp("store")) as environment:
        yield environment


@pytest.fixture(scope="module")
def llm() -> Iterator[StandIn]:
    with stand_in(latency_s=LATENCY_S) as server:
        yield server


@pytest.fixture(scope="module")
def nodes(store: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    require_private_nodes()
    with running_nodes(2, store, tmp_path_factory.mktemp("nodes")) as cluster:
        yield cluster


# --------------------------------------------------------------------------------------------------- the stages


@dataclass(frozen=True)
class Outputs:
    """The same output in the store and in a local directory, and what the job printed."""

    uri: str
    local: Path
    files: dict[str, bytes]
    """Name -> bytes of the published files in the store; shards without the id of their attempt."""
    printed: str

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads(self.files["manifest.json"])

    def assert_equal(self, *names: str) -> None:
        """The named files (patterns) are the same in both, byte for byte."""
        for pattern in names:
            wanted = {str(f.relative_to(self.local)): f.read_bytes() for f in self.local.glob(pattern) if f.is_file()}
            assert wanted, pattern
            for name, content in wanted.items():
                assert self.files[name] == content, name


class Stages:
    """Runs stages in both places. Local ones run in this machine's own directory, each with a cluster of its own."""

    def __init__(self, nodes: Nodes, store: dict[str, str], directory: Path) -> None:
        self.nodes = nodes
        self.store = store
        self.local = directory / "local"
        self.system = system(store)

    def run(
        self,
        verb: str,
        settings: dict[str, Any],
        killed_when: Callable[[str], object] | None,
        inputs: dict[str, Outputs] | None = None,
    ) -> Outputs:
        """Run a stage in both places; kill a node during the job.

        Args:
            verb: of the stage.
            settings: the same in both places.
            killed_when: a condition on what the job has printed; None kills no node.
            inputs: setting -> an output of an earlier stage.
        """
        shared = [f"{name}={value}" for name, value in settings.items()]
        stored = [f"{name}={output.uri}" for name, output in (inputs or {}).items()]
        uri, local = f"s3://{BUCKET}/{verb}", self.local / verb
        job = self.nodes.submit(verb, *shared, *stored, f"output={uri}")
        if killed_when is not None:
            job.wait_for(lambda: killed_when(job.printed))
            self.nodes.kill_busiest()
        printed = job.finish()
        mine = [f"{name}={output.local}" for name, output in (inputs or {}).items()]
        command = [sys.executable, "-m", "infembed_ray.cli", verb, *shared, *mine, f"output={local}"]
        alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=self.local.parent, env=alone, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        newest = (local / "latest").read_text().strip()
        return Outputs(uri, local / newest, published(self.system, f"{BUCKET}/{verb}"), printed)


@pytest.fixture(scope="module")
def stages(nodes: Nodes, store: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Stages:
    return Stages(nodes, store, tmp_path_factory.mktemp("stages"))


def upload(stages: Stages, file: Path) -> str:
    """Copy a file to the store; returns its URI."""
    with stages.system.open_output_stream(f"{BUCKET}/inputs/{file.name}") as stream:
        stream.write(file.read_bytes())
    return f"s3://{BUCKET}/inputs/{file.name}"


@pytest.fixture(scope="module")
def synthesized(stages: Stages, llm: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    rows = [
        row | {"split": "test" if n % 4 == 0 else "train"} for n, row in enumerate(read_jsonl(sample.SEEDS)[:SEEDS])
    ]
    seeds = upload(stages, write_jsonl(tmp_path_factory.mktemp("seeds") / "seeds.jsonl", rows))
    settings = {
        "seeds": seeds,
        "endpoint.base_url": llm.url,
        "endpoint.api_key_env": "null",
        "generator.model": "stand-in",
        "judge.model": "stand-in",
        "actors": ACTORS,
        "in_flight": IN_FLIGHT,
        "journal_upload_s": UPLOAD_S,
    }
    return stages.run("synthesize", settings, lambda _: len(llm.log("answered")) > SEEDS * CALLS // 3)


@pytest.fixture(scope="module")
def trained(stages: Stages, synthesized: Outputs, minilm: str) -> Outputs:
    settings = {
        "model": minilm,
        "split": "train",
        "records_per_step": 4,
        "epochs": 1,
        "instruction_negatives": 2,
        "cpus_per_worker": 1,
        "workers": 2,
        "checkpoint_every": 2,
    }
    return stages.run("train", settings, re.compile(r"train: [2-9]/").search, {"records": synthesized})


@pytest.fixture(scope="module")
def evaluated(stages: Stages, synthesized: Outputs, trained: Outputs, minilm: str) -> Outputs:
    settings = {"split": "test", "models.base": minilm}
    inputs = {"records": synthesized, "models.trained": trained}
    return stages.run("evaluate", settings, re.compile("evaluate: 2 models").search, inputs)


@pytest.fixture(scope="module")
def indexed(
    stages: Stages, synthesized: Outputs, trained: Outputs, tmp_path_factory: pytest.TempPathFactory
) -> Outputs:
    seeds = read_jsonl(sample.SEEDS)
    rows = [{"id": row["id"], "text": row["passage"]} for row in seeds]
    corpus = upload(stages, write_jsonl(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", rows))
    return stages.run("index", {"corpus": corpus, "shards": 2}, re.compile("^index: ", re.M).search, {"model": trained})


# ----------------------------------------------------------------------------------------------------- the tests


def test_records_equal_local_ones_and_only_the_window_is_asked_again(synthesized: Outputs, llm: StandIn) -> None:
    synthesized.assert_equal("records.parquet", "rejected.parquet", "dead_letter.parquet")
    assert synthesized.manifest["counts"]["kept"] == SEEDS
    asked = Counter(entry["request"] for entry in llm.log("answered"))
    local = sum(asked.values()) - SEEDS * CALLS  # the local run asks everything once more
    window = ACTORS * IN_FLIGHT * (UPLOAD_S / LATENCY_S + 2)
    assert SEEDS * CALLS <= local <= SEEDS * CALLS + window


def test_the_analysis_reads_and_writes_the_store(stages: Stages, synthesized: Outputs) -> None:
    analyzed = stages.run("analyze", {}, None, {"records": synthesized})
    counts = analyzed.manifest["counts"]
    assert counts == {kind: synthesized.manifest["counts"][kind] for kind in counts}
    assert counts["kept"] == SEEDS


def test_the_checkpoint_equals_a_local_one_after_a_node_was_lost(trained: Outputs) -> None:
    trained.assert_equal("model.safetensors")


def test_the_evaluation_equals_a_local_one(evaluated: Outputs) -> None:
    evaluated.assert_equal("table.md", "per_query.parquet")


def test_the_shards_equal_local_ones(indexed: Outputs) -> None:
    indexed.assert_equal("shard-*/*")


def test_the_api_answers_from_the_store_and_survives_a_node(stages: Stages, indexed: Outputs) -> None:
    port = free_port()
    job = stages.nodes.submit("serve", f"index={indexed.uri}", f"port={port}", "wait=false")
    job.finish()
    wanted = read_jsonl(sample.SEEDS)[0]
    assert _first_hit(port, wanted["passage"]) == wanted["id"]
    stages.nodes.kill_busiest()

    def answers() -> bool:
        try:
            return _first_hit(port, wanted["passage"]) == wanted["id"]
        except OSError:
            return False

    wait_until(answers, seconds=180, poll_s=1)


def _first_hit(port: int, text: str) -> str:
    body = json.dumps({"query": text, "instruction": "The text itself.", "top_k": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/search", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["hits"][0]["id"])
