"""A sweep on a Ray cluster: killed, run again, extended, with a failing trial, and in an object store."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster

from infembed_ray.config.sweeps import SweepSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import results
from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.places import read_binary
from infembed_ray.storage.steps import find_input
from infembed_ray.sweeps.distributed import run, trials
from infembed_ray.training.launch import run as train
from tests.modeling import backbones
from tests.support.files import write_jsonl
from tests.support.object_store import upload
from tests.support.waiting import wait_until
from tests.training.test_collate import record

MEMORY = 80 * 2**20


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    root = tmp_path_factory.mktemp("sweep")
    (root / "model").mkdir()
    write_jsonl(root / "records.jsonl", (vars(record(n)) for n in range(4)))
    return {
        "train": {
            "records": str(root / "records.jsonl"),
            "launcher": "process",
            "workers": 1,
            "cpus_per_worker": 0.5,
            "records_per_step": 2,
            "epochs": 1,
            "instruction_negatives": 1,
        },
        "evaluate": {"records": str(root / "records.jsonl")},
        "models": {"tiny": backbones.write("llama", root / "model")},
        "objectives": ["uni{P}"],
        "seeds": [1, 2],
        "base": False,
        "concurrent": 2,
        "output": str(root / "output"),
    }


@pytest.fixture(scope="module")
def interrupted(values):
    """Manifests of the finished steps of an interrupted sweep: the training of its first trial."""
    first = trials(SweepSettings.from_mapping(values))[0]
    train(first.train)
    assert len(manifests(values)) == 1
    return manifests(values)


@pytest.mark.slow
def test_sweep_with_a_killed_driver_repeats_no_finished_training(ray_cluster, values, tmp_path):
    """The trainings use Ray Train; those of the other tests use launcher=process, which is quicker and equivalent."""
    values = values | {
        "concurrent": 1,
        "train": values["train"] | {"launcher": "ray"},
        "output": str(tmp_path / "output"),
    }
    config = tmp_path / "sweep.yaml"
    config.write_text(yaml.safe_dump(values))
    driver = subprocess.Popen(
        [sys.executable, "-m", "infembed_ray.cli", "sweep", "--config", str(config)],
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        start_new_session=True,
    )
    wait_until(lambda: manifests(values) or driver.poll() is not None, 240)
    assert driver.poll() is None, "the driver ended before a trial's training did"
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    killed = manifests(values)
    run(SweepSettings.from_mapping(values))
    assert killed.items() <= manifests(values).items()


def manifests(values):
    """Return manifest of every finished step -> time when it was written."""
    return {path: path.stat().st_mtime_ns for path in Path(values["output"]).glob("trials/*/*/*/manifest.json")}


@pytest.fixture(scope="module")
def published(interrupted, values, ray_cluster):
    return run(SweepSettings.from_mapping(values))


def test_interrupted_sweep_resumes_without_repeating_trials(published, interrupted, values):
    made = manifests(values)
    assert len(made) == 2 * 2  # a training and an evaluation each
    assert interrupted.items() <= made.items()
    evaluated = results.read(published.path)
    assert list(evaluated.models) == [f"{row}, tiny, seed {seed}" for row in values["objectives"] for seed in (1, 2)]
    assert evaluated.models["uni{P}, tiny, seed 2"]["train"]["objective"] == "uni{P}"
    markdown = (published.path / "table.md").read_text()
    assert "| uni{P} (2 seeds) |" in markdown
    assert " ± " in markdown


def test_finished_sweep_is_not_repeated(published, values):
    again = run(SweepSettings.from_mapping(values))
    assert not again.fresh
    assert again.path == published.path


def test_failing_trial_is_named_and_others_continue(published, values, capsys):
    before = manifests(values)
    wider = values | {"variants": {"too wide": {"matryoshka": [4096]}}, "seeds": [1]}
    with pytest.raises(
        InputError, match=r"1 of 2 trials failed, the first: too wide, tiny, seed 1: InputError: matryoshka"
    ):
        run(SweepSettings.from_mapping(wider))
    assert before.items() <= manifests(values).items()
    assert "failed: too wide, tiny, seed 1" in capsys.readouterr().out


def stored_settings(place):
    return SweepSettings.from_mapping(
        {
            "train": {
                "records": f"{place}/records.jsonl",
                "workers": 2,
                "cpus_per_worker": 1.5,
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


@pytest.mark.ray
@pytest.mark.slow
def test_a_sweep_on_nodes_without_a_common_directory_gives_the_same_table(bucket, tmp_path, monkeypatch):
    local, folder = tmp_path / "local", Folder.open(f"{bucket}/{tmp_path.name}", "output")
    (local / "model").mkdir(parents=True)
    backbones.write("llama", local / "model")
    write_jsonl(local / "records.jsonl", (vars(record(n)) for n in range(4)))
    upload(local, folder)
    monkeypatch.setenv(SCRATCH, str(tmp_path / "driver"))
    nodes = [tmp_path / f"node-{number}" for number in range(2)]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": MEMORY})
    try:
        for node in nodes:  # with room for one worker each
            cluster.add_node(num_cpus=2, object_store_memory=MEMORY, env_vars={SCRATCH: str(node)})
        ray.init(cluster.address, log_to_driver=False)
        expected, published = run(stored_settings(local)), run(stored_settings(folder))
    finally:
        ray.shutdown()
        cluster.shutdown()
    output = find_input(f"{folder}/output", "output")
    assert published.uri == output.uri
    for name in ("table.md", results.PER_QUERY_FILE):
        assert read_binary(output / name) == (expected.path / name).read_bytes()
    (model,) = (local / "output/trials").glob("*/checkpoint/*/model.safetensors")
    (name,) = (name for name in (folder / "output/trials").entries() if name.endswith("/model.safetensors"))
    assert read_binary(folder / "output/trials" / name) == model.read_bytes()
    assert not stored(tmp_path / "driver", "*.safetensors")
    for node in nodes:
        assert stored(node / "inputs", "model.safetensors")  # the backbone, by the worker of this node
        assert not stored(node / "training", "*")
