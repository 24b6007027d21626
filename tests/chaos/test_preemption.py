"""Preemption of a node: the training saves a checkpoint on the notice and resumes on another node."""

import json
import threading
import time

import pytest
import ray
from ray._private.state import available_resources_per_node
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

from infembed_ray.config.training import TrainSettings
from infembed_ray.training.launch import run
from infembed_ray.training.observability.logs import read_events, read_metrics
from tests.modeling import backbones
from tests.training.test_collate import record

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
NOTICE_S = 15
PREEMPTION = 2
"""Ray's number of the drain reason."""


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of three nodes of one CPU each, one more than the run needs."""
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
    memory = {"object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
    for _ in range(3):
        made.add_node(num_cpus=1, **memory)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def take_a_node_away(cluster, root, gone):
    """After the first step, give notice to a node with a worker, and kill it at the deadline."""
    while not any(read_metrics(path.parent) for path in root.glob(".*.partial/metrics.jsonl")):
        time.sleep(0.2)
    free = available_resources_per_node()
    taken = next(node for node in cluster.worker_nodes if free.get(node.node_id, {}).get("CPU", 0) < 1)
    deadline_ms = int((time.time() + NOTICE_S) * 1000)
    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    gcs.drain_node(taken.node_id, PREEMPTION, "preempted", deadline_ms)
    time.sleep(NOTICE_S + 1)
    cluster.remove_node(taken, allow_graceful=False)
    gone.set()


def test_preempted_run_saves_on_notice_and_resumes(cluster, tmp_path):
    (tmp_path / "model").mkdir()
    model = backbones.write("qwen2", tmp_path / "model")
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps(vars(record(n))) + "\n" for n in range(12)))
    settings = TrainSettings(
        records=str(records),
        model=model,
        output=str(tmp_path / "out"),
        records_per_step=4,
        instruction_negatives=2,
        epochs=150,
        checkpoint_every=10**6,  # so that only the notice saves a checkpoint
        max_failures=0,  # a preemption does not count as a failure
    )
    gone = threading.Event()
    threading.Thread(target=take_a_node_away, args=(cluster, tmp_path / "out", gone), daemon=True).start()
    published = run(settings)
    assert gone.wait(60)
    (resumed,) = (event for event in read_events(published.path) if event.kind == "resumed")
    assert 0 < resumed.step < 450
    assert [line["step"] for line in read_metrics(published.path)] == list(range(1, 451))
