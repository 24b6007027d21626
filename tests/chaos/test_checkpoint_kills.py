"""SIGKILL of all workers while a checkpoint is written in the background: the newest complete one must be as it was.

Two workers of Ray Train with gloo, fp32, every ZeRO stage. The run that resumes must end with the same losses and
weights, bit by bit, as a run that was not disturbed.
"""

import os
import subprocess
import sys

import psutil
import pytest
from safetensors.numpy import load_file

from infembed_ray.storage import steps
from infembed_ray.training.checkpoints.checkpoint import Checkpoint
from infembed_ray.training.observability.logs import read_metrics
from tests.support.files import write_jsonl
from tests.support.waiting import wait_until
from tests.training.checkpoints.states import complete, warnings
from tests.training.test_collate import record

STEPS = 12
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def records_file(tmp_path_factory):
    rows = (vars(record(n)) for n in range(STEPS))
    return write_jsonl(tmp_path_factory.mktemp("records") / "records.jsonl", rows)


def start(records_file, minilm, stage, output):
    command = [
        *(sys.executable, "-m", "infembed_ray.cli", "train", "workers=2", "cpus_per_worker=0.5", f"zero_stage={stage}"),
        *(f"records={records_file}", f"model={minilm}", f"output={output}", "checkpoint_every=2"),
        *("objective=multi{P,I}", "instruction_negatives=2", "records_per_step=2", "epochs=2", "learning_rate=2e-4"),
    ]
    output.mkdir(parents=True, exist_ok=True)
    log = (output.parent / f"{output.name}.log").open("ab")
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def outcome(output):
    published = steps.resolve(output)
    curve = [[line["step"], line["loss"], line["grad_norm"]] for line in read_metrics(published)]
    return curve, {name: w for file in published.glob("*.safetensors") for name, w in load_file(file).items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_kill_while_a_checkpoint_is_written_leaves_the_newest_complete_one(stage, records_file, minilm, tmp_path):
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "out"
    assert start(records_file, minilm, stage, undisturbed).wait() == 0, (tmp_path / "undisturbed.log").read_text()
    run = start(records_file, minilm, stage, output)

    def being_written():
        assert run.poll() is None, (tmp_path / "out.log").read_text()
        found = {path.name: path for path in output.glob(".*.partial/states/step-*")}
        done = {path.name for partial in output.glob(".*.partial") for path in complete(partial)}
        files = [file for tag in found.keys() - done for file in found[tag].glob("*.pt") if file.stat().st_size]
        return bool(done and files)

    wait_until(being_written, 300)
    workers = psutil.Process(run.pid).children(recursive=True)
    for process in [*workers, run]:
        process.kill()
    psutil.wait_procs(workers, timeout=60)
    run.wait()

    [partial] = output.glob(".*.partial")
    newest = complete(partial)[-1]
    saved = Checkpoint.parse(newest.name, (newest / "complete.json").read_text())
    assert len(saved.files) == (1 if stage == 0 else 2 + (2 if stage == 3 else 1))
    assert not any(checksum.mismatch(newest / name) for name, checksum in saved.files.items())

    assert start(records_file, minilm, stage, output).wait() == 0, (tmp_path / "out.log").read_text()
    published = steps.resolve(output)
    [skipped] = warnings(published)
    assert skipped.endswith(f"it is incomplete (no complete.json); the run resumes from step {saved.progress.step}")
    curve, weights = outcome(output)
    expected_curve, expected_weights = outcome(undisturbed)
    assert curve == expected_curve
    assert weights.keys() == expected_weights.keys()
    assert all((weights[name] == expected_weights[name]).all() for name in weights)
