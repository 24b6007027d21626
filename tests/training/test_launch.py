"""The launchers: the same run from the command line under torchrun, in one process and on Ray; and who is refused."""

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

from infembed_ray.config import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records import columns_of
from infembed_ray.training import launch
from infembed_ray.training.launch import run
from infembed_ray.training.metrics import MetricsLog, read_metrics
from tests.modeling import backbones
from tests.training.test_tuples import record


def records():
    """Of uneven lengths."""
    made = [record(n) for n in range(7)]
    return [replace(r, document_positive=r.document_positive + " and so on" * 3 * n) for n, r in enumerate(made)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Of a run of a decoder without dropout: what it computes depends on the launcher and the workers in nothing."""
    root = tmp_path_factory.mktemp("launch")
    (root / "records.jsonl").write_text("".join(json.dumps(columns_of(r)) + "\n" for r in records()))
    (root / "model").mkdir()
    return TrainSettings(
        records=str(root / "records.jsonl"),
        model=backbones.write("qwen2", root / "model"),
        output=str(root / "process"),
        launcher="process",
        workers=1,
        records_per_step=4,
        instruction_negatives=2,
        learning_rate=1e-3,
        deepspeed={"zero_optimization": {"reduce_bucket_size": 100_000}},
        cpus_per_worker=0.5,
    )


@pytest.fixture(scope="module")
def in_one_process(settings):
    threads = torch.get_num_threads()
    yield run(settings)
    torch.set_num_threads(threads)


def by_torchrun(settings, tmp_path):
    """`infembed train` in two processes, none of which may import Ray."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom infembed_ray.cli import main\n"
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


def test_torchrun_trains_what_one_process_trains_and_without_ray(in_one_process, settings, tmp_path):
    two = settings.model_copy(update={"launcher": "torchrun", "workers": 2, "output": str(tmp_path)})
    ran = by_torchrun(two, tmp_path)
    assert ran.returncode == 0, ran.stderr
    made = run(settings.model_copy(update={"output": str(tmp_path)}))  # where it trained does not make another output
    assert not made.fresh
    assert made.path.name == in_one_process.path.name
    np.testing.assert_allclose(curve(made), curve(in_one_process), rtol=1e-5)
    assert (embeddings(made) * embeddings(in_one_process)).sum(axis=1).min() >= 0.999999


@pytest.mark.ray
def test_ray_trains_what_torchrun_and_one_process_train(ray_cluster, in_one_process, settings, tmp_path):
    made = run(settings.model_copy(update={"launcher": "ray", "workers": 2, "output": str(tmp_path)}))
    np.testing.assert_allclose(curve(made), curve(in_one_process), rtol=1e-5)
    assert (embeddings(made) * embeddings(in_one_process)).sum(axis=1).min() >= 0.999999


def test_the_logged_loss_of_a_step_is_the_mean_of_its_batches(settings, tmp_path):
    """At a learning rate of nothing, so that the batches find the same model whether they accumulate or not."""
    still = settings.model_copy(update={"learning_rate": 1e-30, "records_per_step": 2, "epochs": 1})
    alone = run(still.model_copy(update={"output": str(tmp_path / "alone")}))
    together = {"output": str(tmp_path / "together"), "records_per_step": 4, "accumulation": 2}
    added = run(still.model_copy(update=together))
    batches, steps = ([m["loss"] for m in read_metrics(made.path)] for made in (alone, added))
    assert len(batches) == 4  # of 7 records: 2, 2, 2, 1
    assert steps == pytest.approx([sum(batches[:2]) / 2, sum(batches[2:]) / 2], rel=1e-5)


def test_a_worker_that_hears_of_a_preemption_saves_at_the_end_of_that_step(settings, tmp_path):
    from infembed_ray.training.loop import train_worker

    steps_heard = iter([False, True, True])  # and then the machine goes
    saved = settings.model_copy(update={"checkpoint_every": 1000})
    with pytest.raises(StopIteration):
        train_worker(saved, records(), tmp_path, torch.device("cpu"), lambda: next(steps_heard))
    (state,) = (tmp_path / "states").glob("step-*/complete.json")
    assert state.parent.name.startswith("step-00000002")


def test_the_deepspeed_json_is_in_the_output(in_one_process):
    written = json.loads((in_one_process.path / "deepspeed.json").read_text())
    assert written["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 100_000}


def test_torchrun_ends_all_processes_with_one_line_where_the_first_refuses(settings, tmp_path):
    ran = by_torchrun(settings.model_copy(update={"launcher": "torchrun", "workers": 3}), tmp_path)
    assert ran.returncode != 0
    assert ran.stderr.count("infembed train: workers=3: launcher=torchrun has 2 processes; set workers=2") == 1
    assert "exitcode  : 2" in ran.stderr
    assert "InputError" not in ran.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launcher": "torchrun"}, "launcher=torchrun: torchrun has not started this process"),
        ({"workers": 2}, "workers=2: launcher=process has 1 processes; set workers=1"),
        ({"gpus_per_worker": 0.5}, "gpus_per_worker=0.5: launcher=process knows whole GPUs"),
        ({"accumulation": 3}, "records_per_step=4: does not divide into accumulation=3"),
        (
            {"launcher": "ray", "workers": 3, "accumulation": 2},
            "records_per_step=4: accumulation=2 batches of 2 leave some of workers=3 .* set records_per_step=6 or more",
        ),
        ({"accumulation": 3, "tokens_per_step": 64}, "tokens_per_step=.*: too few"),
        ({"keep_best": 1}, "keep_best=1: without validation"),
        ({"zero_stage": 3, "compile": True}, "compile=true: zero_stage=3"),
        ({"deepspeed": {"bf16": {"enabled": True}}}, "deepspeed.bf16.enabled: is given by precision"),
    ],
)
def test_what_does_not_fit_the_launcher_is_one_line(settings, change, message):
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
def test_joint_texts_are_counted_by_the_records_that_a_batch_has(settings, tmp_path, limit, change, message):
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(columns_of(record(n))) + "\n" for n in range(28)))
    model = {"model": backbones.write("modernbert", tmp_path / "model"), "output": str(tmp_path / "out")}
    with pytest.raises(InputError, match=message):
        run(settings.model_copy(update={"records": str(file), **model, **limit, **change}))


def test_a_report_that_cannot_be_written_does_not_hide_what_became_of_the_run(settings, tmp_path, capsys):
    (tmp_path / launch.report.REPORT).mkdir()
    launch._report(tmp_path, settings, 7, 4)
    assert capsys.readouterr().out.startswith("train: warning: report.html cannot be written (IsADirectoryError")


def test_a_resumed_run_shows_the_steps_before_as_done_and_those_that_are_cut_as_not(tmp_path, monkeypatch):
    shown = []

    @contextmanager
    def track(title, total, done):
        shown.append(done)
        yield lambda n, note: shown.append(n)

    monkeypatch.setattr(launch, "track", track)
    figures = {"loss": 1.0, "grad_norm": 1.0, "tokens_per_second": 1.0}
    log = MetricsLog(tmp_path, 0)
    for step in range(1, 8):
        log.write(step=step, **figures)
    with launch._progress(tmp_path, 9, 4):
        time.sleep(0.1)
        MetricsLog(tmp_path, 4).write(step=5, **figures)
    assert shown == [4, 1]
