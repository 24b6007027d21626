"""A sweep on a real Ray cluster: killed, run again, extended, and with a trial that cannot work."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from infembed_ray.config import SweepSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import results
from infembed_ray.records import columns_of
from infembed_ray.sweeps.distributed import run
from tests.modeling import backbones
from tests.training.test_tuples import record

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    root = tmp_path_factory.mktemp("sweep")
    (root / "model").mkdir()
    rows = [columns_of(record(n)) for n in range(4)]
    (root / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
def killed(values, tmp_path_factory):
    """Manifests of the steps that were finished when a sweep's driver and cluster were killed.

    These trainings are Ray Train's, those of the other tests their trials' own processes, which is quicker: the same.
    """
    config = tmp_path_factory.mktemp("config") / "sweep.yaml"
    config.write_text(yaml.safe_dump(values | {"concurrent": 1, "train": values["train"] | {"launcher": "ray"}}))
    driver = subprocess.Popen(
        [sys.executable, "-m", "infembed_ray.cli", "sweep", "--config", str(config)],
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        start_new_session=True,
    )
    deadline = time.monotonic() + 240
    while not (finished := manifests(values)):
        assert driver.poll() is None, "the driver ended before a trial's training did"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    return finished


def manifests(values):
    """Manifest of every finished step -> when it was written."""
    return {path: path.stat().st_mtime_ns for path in Path(values["output"]).glob("trials/*/*/*/manifest.json")}


@pytest.fixture(scope="module")
def published(killed, values, ray_cluster):
    return run(SweepSettings.of(values))


def test_a_killed_sweep_repeats_nothing_and_ends_in_the_table(published, killed, values):
    made = manifests(values)
    assert len(made) == 2 * 4
    assert killed.items() <= made.items()
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


def test_the_same_sweep_again_has_nothing_to_do(published, values):
    again = run(SweepSettings.of(values))
    assert not again.fresh
    assert again.path == published.path


def test_a_failing_trial_is_told_of_and_ends_nothing_else(published, values):
    before = manifests(values)
    wider = values | {"variants": {"too wide": {"matryoshka": [4096]}}, "seeds": [1]}
    with pytest.raises(InputError, match=r"1 of 3 trials failed, the first: InputError: matryoshka=4096.*same command"):
        run(SweepSettings.of(wider))
    assert before.items() <= manifests(values).items()
    (table,) = published.path.parent.glob(".*.partial/table.md")
    assert "| too wide | failed |" in table.read_text()
    assert "| uni{P} | " in table.read_text()
