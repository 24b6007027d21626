"""Anomaly detection: its rules on given figures, and trainings that fail."""

import math

import pytest
import torch

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.records.tables import Record
from infembed_ray.training.observability.logs import read_events, read_metrics
from infembed_ray.training.observability.metrics import Monitor
from tests.modeling import backbones
from tests.support.workers import run_workers, share_process_group
from tests.training.test_collate import record


@pytest.fixture
def events():
    return []


@pytest.fixture
def monitor(events):
    return Monitor(3e-4, events.append)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_non_finite_loss_stops_the_run_and_names_its_records(monitor, events, loss):
    monitor.check(1, "the loss", 1e30, ["a"])
    assert monitor.stopped is None
    monitor.check(7, "the loss", loss, [f"r{n}" for n in range(11)])
    (event,) = events
    assert (event.step, event.kind, event.action, event.message) == (7, "nonfinite", "stop", monitor.stopped)
    for said in ("r0, r1, r2, r3, r4, r5, r6, r7 and 3 more", "learning_rate=0.0003"):
        assert said in monitor.stopped


def test_consecutive_steps_without_negatives_are_logged_once(monitor, events):
    for step, share in enumerate([1.0, 1.0, 1.0, 0.5, 1.0], start=1):
        monitor.check_negatives(step, share, ["a"])
    assert [(e.step, e.kind, e.action) for e in events] == [(1, "no_negatives", "warn"), (5, "no_negatives", "warn")]
    assert monitor.stopped is None


# ------------------------------------------------------------------------------------------------------- real runs

ALIKE = Record("-", *["how is aspirin dosed"] * 7)


def train(model, directory, records, **changes):
    """Train as a worker; return why the run stopped, or None at its end."""
    from infembed_ray.training.loop import train_worker

    chosen = {"records_per_step": 2, "epochs": 1, "max_grad_norm": 1e30, "checkpoint_every": 1}
    settings = TrainSettings(records="-", model=model, output="-", **(chosen | changes))
    directory.mkdir(exist_ok=True)
    try:
        train_worker(settings, records, directory, torch.device("cpu"))
    except InputError as error:
        return str(error)
    return None


def worker(rank, model, directory):
    destroy = share_process_group()
    several = [record(n) for n in range(12)]
    ended = {}
    for stage in (0, 3):
        ended[stage] = train(model, directory / str(stage), several, learning_rate=1e25, zero_stage=stage)
    ended["again"] = train(model, directory / "0", several, learning_rate=1e25, zero_stage=0)
    ended["alike"] = train(model, directory / "alike", [ALIKE] * 6, zero_stage=0)
    destroy()
    return ended


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Directory of the runs, and why each of them stopped."""
    directory = tmp_path_factory.mktemp("runs")
    model = backbones.write("modernbert", tmp_path_factory.mktemp("modernbert"))
    ended, ended_on_worker_1 = run_workers(worker, 2, model, directory)
    assert ended == ended_on_worker_1
    return directory, ended


@pytest.mark.integration
def test_diverging_run_stops_and_publishes_nothing(runs):
    directory, ended = runs
    for stage in (0, 3):
        assert ended[stage].startswith("step 2: ")
        assert [line["step"] for line in read_metrics(directory / str(stage))] == [1]
        assert not list((directory / str(stage)).glob("*.safetensors"))


@pytest.mark.integration
def test_a_checkpoint_that_has_diverged_stops_the_resumed_run_before_a_step(runs):
    directory, ended = runs
    assert ended["again"].startswith("step 1: the sum of the model's embeddings")
    assert [event.kind for event in read_events(directory / "0")] == ["resumed", "nonfinite"]


@pytest.mark.integration
def test_identical_records_are_logged_as_without_negatives(runs):
    directory, ended = runs
    assert ended["alike"] is None
    assert [(e.step, e.kind, e.action) for e in read_events(directory / "alike")] == [(1, "no_negatives", "warn")]
    metrics = read_metrics(directory / "alike")
    assert [(line["loss"], line["without_negatives"]) for line in metrics] == [(0.0, 1.0)] * 3
