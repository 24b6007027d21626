"""A sweep with everything in an object store, on nodes without a common file system."""

from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from infembed_ray.config.sweeps import SweepSettings
from infembed_ray.evaluation import results
from infembed_ray.object_store import SCRATCH, Folder
from infembed_ray.places import read_binary
from infembed_ray.records import columns_of
from infembed_ray.storage import find_input
from infembed_ray.sweeps.distributed import run
from tests.modeling import backbones
from tests.support.files import write_jsonl
from tests.support.object_store import upload
from tests.training.test_collate import record

MEMORY = 80 * 2**20


def settings(place):
    return SweepSettings.from_mapping(
        {
            "train": {
                "records": f"{place}/records.jsonl",
                "workers": 2,
                "cpus_per_worker": 1,
                "records_per_step": 2,
                "epochs": 1,
                "instruction_negatives": 1,
                "validation": {"records": f"{place}/records.jsonl", "every": 1},
            },
            "evaluate": {"records": f"{place}/records.jsonl", "actors": 1},
            "models": {"tiny": f"{place}/model"},
            "objectives": ["multi{P,I}"],
            "seeds": [1],
            "concurrent": 1,
            "output": f"{place}/output",
        }
    )


def stored(scratch: Path, pattern: str) -> list[str]:
    return [file.name for file in scratch.rglob(pattern)]


@pytest.mark.slow
@pytest.mark.ray
def test_a_sweep_on_nodes_without_a_common_directory_gives_the_same_table(bucket, tmp_path, monkeypatch):
    local, folder = tmp_path / "local", Folder.open(f"{bucket}/{tmp_path.name}", "output")
    (local / "model").mkdir(parents=True)
    backbones.write("llama", local / "model")
    write_jsonl(local / "records.jsonl", (columns_of(record(n)) for n in range(4)))
    upload(local, folder)
    monkeypatch.setenv(SCRATCH, str(tmp_path / "driver"))
    nodes = [tmp_path / f"node-{number}" for number in range(2)]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": MEMORY})
    try:
        for node in nodes:  # with room for one worker each
            cluster.add_node(num_cpus=1.1, object_store_memory=MEMORY, env_vars={SCRATCH: str(node)})
        ray.init(cluster.address, log_to_driver=False)
        expected, found = run(settings(local)), run(settings(folder))
    finally:
        ray.shutdown()
        cluster.shutdown()
    output = find_input(f"{folder}/output", "output")
    assert found.uri == output.uri
    for name in ("table.csv", results.PER_QUERY_FILE):
        assert read_binary(output / name) == (expected.path / name).read_bytes()
    (model,) = (local / "output/trials").glob("*/checkpoint/*/model.safetensors")
    (name,) = (name for name in (folder / "output/trials").entries() if name.endswith("/model.safetensors"))
    assert read_binary(folder / "output/trials" / name) == model.read_bytes()
    assert not stored(tmp_path / "driver", "*.safetensors")
    for node in nodes:
        assert stored(node / "inputs", "model.safetensors")  # the backbone, by the worker of this node
        assert not stored(node / "training", "*")
