"""A node of a training run is about to be taken away: the run saves in time and goes on elsewhere."""

import json
import threading
import time

import pytest
import ray
from ray._private.state import available_resources_per_node
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

from infembed_ray.config import TrainSettings
from infembed_ray.records import columns_of
from infembed_ray.training.events import read_events
from infembed_ray.training.launch import run
from infembed_ray.training.metrics import read_metrics
from tests.modeling import backbones
from tests.training.test_tuples import record

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
NOTICE_S = 15
PREEMPTION = 2
"""Ray's number for the reason of a drain."""


@pytest.fixture
def cluster(monkeypatch):
    """Three nodes of one CPU each, one more than the run needs."""
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
    """After the first steps, give notice to a node with a worker, and kill it when the time is over."""
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


def test_a_preempted_run_saves_on_the_notice_and_resumes_there(cluster, tmp_path):
    (tmp_path / "model").mkdir()
    model = backbones.write("qwen2", tmp_path / "model")
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps(columns_of(record(n))) + "\n" for n in range(12)))
    settings = TrainSettings(
        records=str(records),
        model=model,
        output=str(tmp_path / "out"),
        records_per_step=4,
        instruction_negatives=2,
        epochs=150,
        checkpoint_every=10**6,  # all there is to resume from is what the notice makes it save
        max_failures=0,  # a preemption is none
    )
    gone = threading.Event()
    threading.Thread(target=take_a_node_away, args=(cluster, tmp_path / "out", gone), daemon=True).start()
    published = run(settings)
    assert gone.wait(60)
    (resumed,) = (event for event in read_events(published.path) if event.kind == "resumed")
    assert 0 < resumed.step < 450
    assert [line["step"] for line in read_metrics(published.path)] == list(range(1, 451))
