"""Launchers: the same run under torchrun, in one process and on Ray; rejected settings; progress and report."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.storage.steps import Staging
from infembed_ray.training import launch
from infembed_ray.training.launch import run
from infembed_ray.training.observability.metrics import StepLog, read_metrics
from tests.modeling import backbones
from tests.support.files import write_jsonl
from tests.training.test_collate import record


def records():
    """Return records of uneven lengths, whose instructions have a word of their passages."""
    made = [record(n, instruction=f"good passage {n}") for n in range(7)]
    return [replace(r, document_positive=r.document_positive + " and so on" * 3 * n) for n, r in enumerate(made)]


def decoder_settings(root):
    """Return settings of a decoder without dropout, whose result does not depend on launcher and workers."""
    (root / "model").mkdir()
    return TrainSettings(
        records=str(write_jsonl(root / "records.jsonl", map(vars, records()))),
        model=backbones.write("qwen2", root / "model"),
        output=str(root / "process"),
        launcher="process",
        workers=1,
        records_per_step=4,
        instruction_negatives=2,
        overlap_dropout=0.7,
        overlap_synonyms=0.7,
        learning_rate=1e-3,
        deepspeed={"zero_optimization": {"reduce_bucket_size": 100_000}},
        cpus_per_worker=0.5,
    )


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return decoder_settings(tmp_path_factory.mktemp("launch"))


@pytest.fixture(scope="module")
def in_one_process(settings):
    threads = torch.get_num_threads()
    yield run(settings)
    torch.set_num_threads(threads)


def by_torchrun(settings, tmp_path):
    """Run `infembed train` in two processes, which must not import Ray."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom infembed_ray.cli.main import main\n"
        "status = main(['train', *sys.argv[1:]])\nassert 'ray' not in sys.modules\nsys.exit(status)\n"
    )
    overrides = [f"{k}={json.dumps(v)}" for k, v in settings.model_dump(exclude_defaults=True).items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *overrides], env=environment, capture_output=True, text=True, timeout=500)


def curve(published):
    return [[m["loss"], m["grad_norm"]] for m in read_metrics(published.path)]


def embeddings(published):
    return InstructionEncoder.from_pretrained(str(published.path)).encode_passages(["passage 1", "x"])


def assert_same_run(one, other):
    np.testing.assert_allclose(curve(one), curve(other), rtol=1e-5)
    assert (embeddings(one) * embeddings(other)).sum(axis=1).min() >= 0.999999


@pytest.mark.integration
def test_torchrun_matches_one_process_without_ray(in_one_process, settings, tmp_path):
    two = settings.model_copy(update={"launcher": "torchrun", "workers": 2, "output": str(tmp_path)})
    ran = by_torchrun(two, tmp_path)
    assert ran.returncode == 0, ran.stderr
    made = run(settings.model_copy(update={"output": str(tmp_path)}))  # the launcher is not part of the identity
    assert not made.fresh
    assert made.path.name == in_one_process.path.name
    assert_same_run(made, in_one_process)


@pytest.mark.integration
def test_logged_loss_is_the_mean_of_the_micro_batches(settings, tmp_path):
    """The learning rate is almost 0, so that every micro-batch is embedded by the same model."""
    still = settings.model_copy(update={"learning_rate": 1e-30, "records_per_step": 2, "epochs": 1})
    alone = run(still.model_copy(update={"output": str(tmp_path / "alone")}))
    together = {"output": str(tmp_path / "together"), "records_per_step": 4, "accumulation": 2}
    added = run(still.model_copy(update=together))
    batches, steps = ([m["loss"] for m in read_metrics(made.path)] for made in (alone, added))
    assert len(batches) == 4  # of 7 records: 2, 2, 2, 1
    assert steps == pytest.approx([sum(batches[:2]) / 2, sum(batches[2:]) / 2], rel=1e-5)


@pytest.mark.integration
def test_preemption_notice_saves_a_checkpoint_at_the_end_of_the_step(settings, tmp_path):
    from infembed_ray.training.loop import train_worker

    steps_heard = iter([False, True, True])  # then the node is lost
    saved = settings.model_copy(update={"checkpoint_every": 1000})
    with pytest.raises(StopIteration):
        train_worker(saved, records(), tmp_path, torch.device("cpu"), lambda: next(steps_heard))
    (state,) = (tmp_path / "states").glob("step-*/complete.json")
    assert state.parent.name.startswith("step-00000002")


@pytest.mark.integration
def test_output_shows_the_deepspeed_configuration(in_one_process):
    written = json.loads((in_one_process.path / "deepspeed.json").read_text())
    assert written["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 100_000}


@pytest.mark.integration
def test_torchrun_stops_all_processes_with_one_error_line(settings, tmp_path):
    ran = by_torchrun(settings.model_copy(update={"launcher": "torchrun", "workers": 3}), tmp_path)
    assert ran.returncode != 0
    assert ran.stderr.count("infembed train: workers=3: launcher=torchrun has 2 processes; set workers=2") == 1
    assert "exitcode  : 2" in ran.stderr
    assert "InputError" not in ran.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launcher": "torchrun"}, "launcher=torchrun: torchrun did not start this process"),
        ({"workers": 2}, "workers=2: launcher=process has 1 process; set workers=1"),
        ({"gpus_per_worker": 0.5}, "gpus_per_worker=0.5: launcher=process supports whole GPUs"),
        ({"accumulation": 3}, "records_per_step=4: does not divide into accumulation=3"),
        (
            {"launcher": "ray", "workers": 3, "accumulation": 2},
            "records_per_step=4: accumulation=2 micro-batches of 2 leave some of workers=3 .* set records_per_step=6 or more",
        ),
        ({"accumulation": 3, "tokens_per_step": 64}, "tokens_per_step=.*: too small"),
        ({"keep_best": 1}, "keep_best=1: without validation"),
        ({"zero_stage": 3, "compile": True}, "compile=true: zero_stage=3"),
        ({"deepspeed": {"bf16": {"enabled": True}}}, "deepspeed.bf16.enabled: the setting precision decides it"),
    ],
)
def test_settings_that_do_not_fit_the_launcher_are_rejected(settings, change, message):
    with pytest.raises(InputError, match=message):
        run(settings.model_copy(update=change))


@pytest.mark.parametrize("limit", [{"records_per_step": 28}, {"tokens_per_step": 100_000}])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction_negatives": None}, "instruction_negatives=null: up to 4704 joint texts"),
        ({"objective": "nce{PIQ}", "instruction_negatives": 0}, "objective=nce.* 3136 joint texts"),
    ],
)
def test_joint_texts_of_the_largest_batch_are_limited(settings, tmp_path, limit, change, message):
    file = write_jsonl(tmp_path / "records.jsonl", (vars(record(n)) for n in range(28)))
    model = {"model": backbones.write("modernbert", tmp_path / "model"), "output": str(tmp_path / "out")}
    with pytest.raises(InputError, match=message):
        run(settings.model_copy(update={"records": str(file), **model, **limit, **change}))


def test_failed_report_is_only_a_warning(settings, tmp_path, capsys):
    (tmp_path / launch.report.REPORT).mkdir()
    launch._report(tmp_path, settings, 7, 4)
    assert capsys.readouterr().out.startswith("train: warning: report.html cannot be written (IsADirectoryError")


def test_progress_of_a_resumed_run_starts_at_its_checkpoint(tmp_path, monkeypatch):
    shown = []

    @contextmanager
    def track(title, total, done):
        shown.append(done)
        yield lambda n, note: shown.append(n)

    monkeypatch.setattr(launch, "track", track)
    figures = {"loss": 1.0, "grad_norm": 1.0, "tokens_per_second": 1.0}
    log = StepLog(tmp_path, 0)
    for step in range(1, 8):
        log.write(step=step, **figures)
    with launch._progress(Staging(tmp_path), 9, 4):
        time.sleep(0.1)
        StepLog(tmp_path, 4).write(step=5, **figures)
    assert shown == [4, 1]
