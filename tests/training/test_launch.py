"""A run in one process, rejected settings, progress and report; test_distributed.py compares it with Ray."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.launch import run
from infembed_ray.training.observability.logs import read_metrics
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


def curve(published):
    return [[m["loss"], m["grad_norm"]] for m in read_metrics(published.path)]


def embeddings(published):
    return InstructionEncoder.from_pretrained(str(published.path)).encode_passages(["passage 1", "x"])


def assert_same_run(one, other):
    np.testing.assert_allclose(curve(one), curve(other), rtol=1e-5)
    assert (embeddings(one) * embeddings(other)).sum(axis=1).min() >= 0.999999


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


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"workers": 2}, "workers"),
        ({"gpus_per_worker": 0.5}, "gpus_per_worker"),
        ({"launcher": "ray", "workers": 3, "records_per_step": 2}, "records_per_step"),
        ({"deepspeed": {"bf16": {"enabled": True}}}, "deepspeed.bf16.enabled"),
        ({"objective": "nce{PIQ}", "records_per_step": 28}, "records_per_step"),
        ({"instruction_negatives": None, "records_per_step": 28}, "instruction_negatives"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_rejected(settings, tmp_path, change, setting):
    model = {"model": backbones.write("modernbert", tmp_path / "model"), "output": str(tmp_path / "out")}
    with pytest.raises(InputError) as error:
        run(settings.model_copy(update=model | change))
    assert [fault.setting for fault in error.value.faults] == [setting]
