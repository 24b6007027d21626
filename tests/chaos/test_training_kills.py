"""SIGKILL of a worker, then of the driver, at random steps of a training: the model must not change.

Two workers on CPU, fp32, every ZeRO stage. Ray Train replaces a killed worker within the run. The test starts a killed
driver again, as a job queue would. Neither may change a loss, the order of the data or a weight.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from infembed_ray.storage import steps
from infembed_ray.training.observability.logs import read_metrics
from tests.training.test_collate import record

STEPS, EVERY = 24, 3
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def records_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    rows = [vars(record(n)) for n in range(STEPS)]
    for n, row in enumerate(
        rows
    ):  # long enough to be killed during a step, and uneven, so that the workers' batches differ
        row["document_positive"] += " and so on" * (20 + 7 * (n % 5))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def driver(records_file: Path, minilm: str, stage: int, output: Path) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "infembed_ray.cli", "train", f"records={records_file}", f"model={minilm}"),
        *(f"output={output}", f"zero_stage={stage}", "objective=multi{P,I}", "instruction_negatives=2"),
        *("records_per_step=2", "epochs=2", "learning_rate=2e-4", f"checkpoint_every={EVERY}", "cpus_per_worker=0.5"),
    ]
    log = (output.parent / "driver.log").open("ab")
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def steps_of(output: Path) -> int:
    """Return the steps in the log of a running training."""
    return max((len(read_metrics(path)) for path in output.glob(".*.partial")), default=0)


def wait_for_step(step: int, output: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while steps_of(output) < step:
        assert process.poll() is None, (output.parent / "driver.log").read_text()
        assert time.monotonic() < deadline, f"no step {step} in time"
        time.sleep(0.02)


def training_workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "RayTrainWorker" in " ".join(child.cmdline())]


def outcome(output: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the logged curve, without timings, and the exported weights."""
    published = steps.resolve(output)
    decided = ("step", "loss", "grad_norm", "learning_rate", "records")
    curve = [{key: line[key] for key in decided if key in line} for line in read_metrics(published)]
    weights = {name: tensor for file in published.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return curve, weights


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_run_killed_at_random_steps_gives_the_same_model(
    stage: int, records_file: Path, minilm: str, tmp_path: Path
) -> None:
    outputs = [tmp_path / name / "out" for name in ("undisturbed", "disturbed")]
    for output in outputs:
        output.parent.mkdir()
    assert driver(records_file, minilm, stage, outputs[0]).wait() == 0
    expected_curve, expected_weights = outcome(outputs[0])
    assert len(expected_curve) == STEPS

    rng = random.Random(stage)
    first, second = sorted(rng.sample(range(EVERY + 1, STEPS - 2), 2))
    output = outputs[1]
    process = driver(records_file, minilm, stage, output)
    wait_for_step(first, output, process)
    victim = rng.choice(training_workers(process))
    victim.kill()
    victim.wait()
    wait_for_step(second, output, process)
    whole_group = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(whole_group, timeout=60)
    at = steps_of(output)
    assert at < STEPS
    assert driver(records_file, minilm, stage, output).wait() == 0, (output.parent / "driver.log").read_text()

    curve, weights = outcome(output)
    print(f"\nstage {stage}: a worker killed at step {first}, the driver at step {at}")
    assert curve == expected_curve
    assert weights.keys() == expected_weights.keys()
    assert all((weights[name] == expected_weights[name]).all() for name in weights)
