"""A sweep on a Ray cluster: killed, run again, extended, and with a failing trial."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from infembed_ray.config.sweeps import SweepSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import results
from infembed_ray.records import columns_of
from infembed_ray.sweeps.distributed import run
from infembed_ray.sweeps.trials import trials
from infembed_ray.training.launch import run as train
from tests.modeling import backbones
from tests.support.files import write_jsonl
from tests.support.waiting import wait_until
from tests.training.test_collate import record

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    root = tmp_path_factory.mktemp("sweep")
    (root / "model").mkdir()
    write_jsonl(root / "records.jsonl", (columns_of(record(n)) for n in range(4)))
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
        "objectives": ["uni{P}", "multi{P,I}"],
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
    assert len(made) == 2 * 4
    assert interrupted.items() <= made.items()
    rows = list(csv.DictReader((published.path / "table.csv").open()))
    assert [(r["row"], r["model"], r["seed"]) for r in rows] == [
        (objective, "tiny", seed) for objective in values["objectives"] for seed in ("1", "2")
    ]
    found = results.read(published.path)
    assert list(found.models) == [f"{r['row']}, tiny, seed {r['seed']}" for r in rows]
    assert found.models["uni{P}, tiny, seed 2"]["train"]["objective"] == "uni{P}"
    for row, figures in zip(rows, found.figures.values(), strict=True):
        assert figures["records"]["nDCG@10 (I+,Q+)"] == float(row["nDCG@10 (I+,Q+)"])
    markdown = (published.path / "table.md").read_text()
    assert "| uni{P} |" in markdown
    assert " ± " in markdown


def test_finished_sweep_is_not_repeated(published, values):
    again = run(SweepSettings.from_mapping(values))
    assert not again.fresh
    assert again.path == published.path


def test_failing_trial_is_in_the_table_and_others_continue(published, values):
    before = manifests(values)
    wider = values | {"variants": {"too wide": {"matryoshka": [4096]}}, "seeds": [1]}
    with pytest.raises(
        InputError, match=r"1 of 3 trials failed, the first: InputError: matryoshka=4096.*same command again"
    ):
        run(SweepSettings.from_mapping(wider))
    assert before.items() <= manifests(values).items()
    (table,) = published.path.parent.glob(".*.partial/table.md")
    assert "| too wide | failed |" in table.read_text()
    assert "| uni{P} | " in table.read_text()
