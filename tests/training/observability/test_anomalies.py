"""Anomaly detection: its rules on given figures, and trainings that fail."""

import math
import re
import shutil
from dataclasses import replace

import pytest
import torch

from infembed_ray.config.training import Anomalies, TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.records.tables import Record
from infembed_ray.training.observability.anomalies import FEWEST, SKIPPED, WINDOW, Monitor
from infembed_ray.training.observability.events import EventLog, read_events
from infembed_ray.training.observability.metrics import read_metrics
from infembed_ray.training.sampler import Sampler
from tests.modeling import backbones
from tests.support.workers import run_workers, share_process_group
from tests.training.observability.test_trackers import scalars
from tests.training.test_collate import record


def settings_of(**anomalies):
    return TrainSettings(records="r", model="m", output="o", learning_rate=3e-4, anomalies=Anomalies(**anomalies))


def monitor(directory, losses=(), **anomalies):
    return Monitor(settings_of(**anomalies), EventLog(directory, 0), losses)


def figures(loss, without_negatives=0.0):
    return {"loss": loss, "without_negatives": without_negatives}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_non_finite_loss_stops_the_run_with_a_reason(tmp_path, loss):
    watch = monitor(tmp_path)
    assert not watch.approves(7, figures(loss), [f"r{n}" for n in range(11)])
    (event,) = read_events(tmp_path)
    assert (event.step, event.kind, event.action) == (7, "nonfinite", "stop")
    assert watch.stopped == event.message
    assert "\n" not in event.message
    assert event.message.startswith(f"step 7: the loss is {loss} (records r0, r1, r2, r3, r4, r5, r6, r7 and 3 more)")
    assert "anomalies.nonfinite=skip" in event.message
    assert "learning_rate=0.0003" in event.message


def test_non_finite_loss_is_skipped_if_configured(tmp_path):
    watch = monitor(tmp_path, nonfinite="skip")
    assert not watch.approves(1, figures(math.nan), ["a"])
    assert watch.stopped is None
    assert read_events(tmp_path)[0].action == "skip"


@pytest.mark.parametrize("of_loss", [True, False])
def test_many_skipped_steps_in_a_row_stop_the_run(tmp_path, of_loss):
    watch = monitor(tmp_path, nonfinite="skip")

    def step(number, finite):
        value = 1.0 if finite else math.nan
        if watch.approves(number, figures(value if of_loss else 1.0), ["a"]):
            watch.check_gradients(number, 1.0 if of_loss else value, ["a"])

    for number in range(1, SKIPPED):
        step(number, finite=False)
    step(SKIPPED, finite=True)
    for number in range(1, SKIPPED):
        step(SKIPPED + number, finite=False)
    assert watch.stopped is None
    step(2 * SKIPPED, finite=False)
    assert re.match(
        rf"step {2 * SKIPPED}: .*, and {SKIPPED} steps in a row had no update, so the weights have diverged: stopped, "
        r"nothing is published; lower learning_rate=0.0003, which starts the run from the beginning$",
        watch.stopped,
    )
    assert read_events(tmp_path)[-1].action == "stop"


@pytest.mark.parametrize(("policy", "stopped"), [("skip", False), ("stop", True)])
def test_non_finite_gradients_are_logged(tmp_path, policy, stopped):
    watch = monitor(tmp_path, nonfinite=policy)
    watch.check_gradients(3, 1e30, ["a"])
    assert read_events(tmp_path) == []
    watch.check_gradients(4, math.inf, ["a"])
    assert [(e.step, e.action) for e in read_events(tmp_path)] == [(4, policy)]
    assert (watch.stopped is not None) == stopped


@pytest.mark.parametrize(("policy", "approved"), [("warn", True), ("skip", False), ("stop", False)])
def test_loss_far_above_the_median_is_a_spike(tmp_path, policy, approved):
    watch = monitor(tmp_path, [1.0] * FEWEST, spike=policy, spike_factor=3)
    assert watch.approves(11, figures(3.0), ["a"])
    assert watch.approves(12, figures(3.1), ["b"]) == approved
    (event,) = read_events(tmp_path)
    assert (event.step, event.kind, event.action) == (12, "spike", policy)
    assert "3.1 times the median of the last 11" in event.message
    assert (watch.stopped is not None) == (policy == "stop")


def test_no_spike_before_enough_losses_or_without_spike_factor(tmp_path):
    early = monitor(tmp_path, [1.0] * (FEWEST - 1), spike_factor=2)
    assert early.approves(10, figures(100.0), ["a"])
    unasked = Monitor(settings_of(), EventLog(tmp_path, 0), [1.0] * WINDOW)
    assert unasked.approves(51, figures(100.0), ["a"])
    assert {event.kind for event in read_events(tmp_path)} <= {"resumed"}


def test_usual_loss_follows_the_run_and_ignores_failed_steps(tmp_path):
    watch = monitor(tmp_path, [*[9.0] * 5, *[None] * 40, *[1.0] * WINDOW], spike_factor=2)
    assert watch.approves(1, figures(5.0), [])
    assert [e.kind for e in read_events(tmp_path)] == ["spike"]
    for step in range(WINDOW):
        watch.approves(2 + step, figures(5.0), [])
    before = len(read_events(tmp_path))
    assert watch.approves(99, figures(9.0), [])  # less than twice the median of 5
    assert len(read_events(tmp_path)) == before


@pytest.mark.parametrize(("policy", "approved"), [("warn", True), ("skip", False), ("stop", False)])
def test_step_without_negatives_is_logged(tmp_path, policy, approved):
    watch = monitor(tmp_path, no_negatives=policy)
    assert watch.approves(1, figures(0.5, 0.9), ["a"])
    assert watch.approves(2, figures(0.0, 1.0), ["a"]) == approved
    (event,) = read_events(tmp_path)
    assert (event.step, event.kind, event.action) == (2, "no_negatives", policy)
    assert "share their texts" in event.message


def test_consecutive_steps_without_negatives_are_logged_once(tmp_path):
    watch = monitor(tmp_path)
    for step, share in enumerate([1.0, 1.0, 1.0, 0.5, 1.0], start=1):
        watch.approves(step, figures(0.0, share), ["a"])
    assert [e.step for e in read_events(tmp_path)] == [1, 5]


def test_steps_without_negatives_do_not_change_the_usual_loss(tmp_path):
    watch = monitor(tmp_path, [1.0] * WINDOW, spike_factor=2, no_negatives="skip")
    for step in range(WINDOW):
        watch.approves(step, figures(0.0, 1.0), [])
    assert watch.approves(98, figures(1.5), [])
    assert watch.approves(99, figures(2.5), [])
    assert f"2.5 times the median of the last {WINDOW} " in read_events(tmp_path)[-1].message


def test_no_spike_if_the_usual_loss_is_zero(tmp_path):
    assert monitor(tmp_path, [0.0] * WINDOW, spike_factor=2).approves(51, figures(1.0), [])
    assert read_events(tmp_path) == []


def test_stop_action_does_not_change_the_identity():
    identities = [
        settings_of(**a).identity() for a in ({}, {"spike": "stop"}, {"nonfinite": "skip", "no_negatives": "stop"})
    ]
    assert identities[0] == identities[1] == identities[2]
    assert settings_of(spike="skip").identity() != identities[0]


# ------------------------------------------------------------------------------------------------------- real runs

RUNS = [(0, None), (2, None), (3, None), (3, 64)]
"""ZeRO stage and tokens per pass of the runs that skip a spike."""
SPIKE = FEWEST + 1
STEPS = FEWEST + 3
"""Steps of the runs with a spike, whose records are the same but for one."""
TEXT = "how is aspirin dosed"
ALIKE = Record("-", *[TEXT] * 7)


def one_odd():
    one = replace(record(1), document_positive="For nurses, in plain words; how is aspirin dosed")
    records = [replace(one, id=f"same{n}") for n in range(2 * STEPS)]
    step = [row for share in list(Sampler(2 * STEPS, 2, 2, 1, 42).rows())[SPIKE - 1] for row in share]
    odd = replace(record(7), document_positive="what does a passage about bread say", query_positive="bread")
    records[step[0]] = replace(odd, id="odd")
    return records


def train(model, rank, directory, records, **changes):
    """Train as a worker; return why the run stopped, or None at its end."""
    from infembed_ray.training.loop import train_worker

    chosen = {"records_per_step": 2, "epochs": 1, "zero_stage": 0, "max_grad_norm": 1e30, "checkpoint_every": STEPS}
    settings = TrainSettings(records="-", model=model, output="-", **(chosen | changes))
    directory.mkdir(exist_ok=True)
    try:
        train_worker(settings, records, directory, torch.device("cpu"))
    except InputError as error:
        return str(error)
    return None


def worker(rank, model, directory):
    """Train all runs of this module; return why each of them stopped, None at its end."""
    destroy = share_process_group()
    how = {"learning_rate": 1e25, "checkpoint_every": 1}
    several = [record(n) for n in range(12)]
    ended = {"diverged": train(model, rank, directory / "diverged", several, **how)}
    if rank == 0:
        shutil.copytree(directory / "diverged", directory / "continued")
    torch.distributed.barrier()
    skipping = Anomalies(nonfinite="skip")
    ended["continued"] = train(model, rank, directory / "continued", several, **how, anomalies=skipping)
    ended["skipping"] = train(model, rank, directory / "skipping", several, **how, anomalies=skipping)
    how = {"learning_rate": 3e-3}
    ended["warned"] = train(model, rank, directory / "warned", one_odd(), **how)
    skipping = Anomalies(spike="skip", spike_factor=1.5)
    for stage, passes in RUNS:
        how |= {"zero_stage": stage, "grad_cache_tokens": passes, "anomalies": skipping}
        how |= {"checkpoint_every": 1, "keep_last": STEPS - SPIKE + 2}
        ended[f"skipped-{stage}-{passes}"] = train(
            model, rank, directory / f"skipped-{stage}-{passes}", one_odd(), **how
        )
    ended["alike"] = train(model, rank, directory / "alike", [ALIKE] * 6)
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


DIVERGED = (
    "step {}: the model gives embeddings that are not finite, so its weights have diverged: stopped, nothing is published; "
    "lower learning_rate=1e+25, which starts the run from the beginning"
)


@pytest.mark.integration
def test_diverging_run_stops(runs):
    directory, ended = runs
    stopped = r"^step 2: .* \(records r\d+, r\d+\): stopped, the last checkpoint is kept; .*nonfinite=skip; .*1e\+25$"
    assert re.match(stopped, ended["diverged"])
    assert [line["step"] for line in read_metrics(directory / "diverged")] == [1]


@pytest.mark.integration
def test_a_run_that_skips_to_its_end_publishes_no_model_that_has_diverged(runs):
    directory, ended = runs
    assert ended["skipping"] == DIVERGED.format(6)
    events = [(event.step, event.action) for event in read_events(directory / "skipping")]
    assert events == [*((step, "skip") for step in range(2, 7)), (6, "stop")]
    first, *others = read_metrics(directory / "skipping")
    assert [line["step"] for line in others] == [2, 3, 4, 5, 6]
    assert first["loss"] > 0
    assert {(line["loss"], line["grad_norm"]) for line in others} == {(None, None)}
    (file,) = (directory / "skipping" / "tensorboard").iterdir()
    assert [step for step, tag, _, _ in scalars(file) if tag == "learning_rate"] == [1, 2, 3, 4, 5, 6]
    assert not list((directory / "skipping").glob("*.safetensors"))


@pytest.mark.integration
def test_a_checkpoint_that_has_diverged_says_what_to_do(runs):
    directory, ended = runs
    assert ended["continued"] == DIVERGED.format(1)
    assert not list((directory / "continued").glob("*.safetensors"))


def saved(directory, step):
    """Read all tensors of the checkpoint of a step: weights and optimizer state."""
    (state,) = directory.glob(f"states/step-{step:08d}-*")

    def tensors(at, value):
        if isinstance(value, torch.Tensor):
            yield at, value
        elif isinstance(value, (dict, list, tuple)):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                yield from tensors(f"{at}/{key}", inner)

    files = sorted(state.glob("*.pt"))
    assert files
    return {n: t for f in files for n, t in tensors(f.name, torch.load(f, map_location="cpu", weights_only=False))}


@pytest.mark.parametrize(("stage", "passes"), RUNS)
@pytest.mark.integration
def test_skipped_spike_changes_no_tensor_in_any_zero_stage(runs, stage, passes):
    directory, _ = runs
    skipped = directory / f"skipped-{stage}-{passes}"
    (event,) = read_events(skipped)
    assert (event.step, event.kind, event.action) == (SPIKE, "spike", "skip")
    assert "odd" in event.message
    metrics = read_metrics(skipped)
    assert [line["step"] for line in metrics if line["grad_norm"] is None] == [SPIKE]
    warned = [line["loss"] for line in read_metrics(directory / "warned")]
    losses = [line["loss"] for line in metrics]
    assert losses[:SPIKE] == pytest.approx(warned[:SPIKE], rel=1e-3)
    assert losses[SPIKE + 1 :] != pytest.approx(warned[SPIKE + 1 :], rel=1e-2)
    before, after = (saved(skipped, step) for step in (SPIKE - 1, SPIKE))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(before[name], tensor) for name, tensor in saved(skipped, SPIKE + 1).items())


@pytest.mark.integration
def test_identical_records_are_logged_as_without_negatives(runs):
    directory, ended = runs
    assert ended["alike"] is None
    assert [(e.step, e.kind, e.action) for e in read_events(directory / "alike")] == [(1, "no_negatives", "warn")]
    metrics = read_metrics(directory / "alike")
    assert [(line["loss"], line["without_negatives"]) for line in metrics] == [(0.0, 1.0)] * 3
