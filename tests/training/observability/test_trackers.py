"""Trackers of interrupted runs; their files are read by other code than wrote them."""

import struct
from functools import partial

import pytest

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.training.observability import trackers
from infembed_ray.training.observability.logs import append_event, read_events
from infembed_ray.training.observability.trackers import Trackers


def settings(*names):
    return TrainSettings(records="r", model="m", output="o", trackers=names)


def line(step):
    rate = 1e-3 / step
    return {"step": step, "time": 1_700_000_000 + step, "learning_rate": rate, "loss": 1 / step, "mfu": None}


LINES = [line(step) for step in range(1, 8)]
LOSSES = [(step, pytest.approx(1 / step)) for step in range(1, 8)]


def trackers_of(name, directory, lines):
    return Trackers(settings(name), directory, lines, partial(append_event, directory))


def interrupted(tmp_path, name):
    """Log five steps, resume after the third, end with the seventh, and resume once more without a step."""
    (tmp_path / "run").mkdir()
    directory = tmp_path / "run"
    first = trackers_of(name, directory, [])
    for step in LINES[:5]:
        first.log(step)
    if name != "tensorboard":
        first.close()
    second = trackers_of(name, directory, LINES[:3])
    for step in LINES[3:]:
        second.log(step)
    second.close()
    trackers_of(name, directory, LINES).close()
    assert not read_events(directory)
    return directory


def scalars(path):
    """Read (step, tag, value, time) from a TensorBoard file: TFRecords of Event messages."""
    from tensorboardX.proto.event_pb2 import Event

    data = path.read_bytes()
    place = 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        event = Event.FromString(data[place + 12 : place + 12 + length])
        place += 16 + length
        for value in event.summary.value:
            yield event.step, value.tag, value.simple_value, event.wall_time


def test_tensorboard_has_every_step_once(tmp_path):
    (file,) = (interrupted(tmp_path, "tensorboard") / "tensorboard").iterdir()
    written = list(scalars(file))
    assert [(step, value) for step, tag, value, _ in written if tag == "loss"] == LOSSES
    assert {tag for _, tag, _, _ in written} == {"loss", "learning_rate"}
    assert all(time == 1_700_000_000 + step for step, _, _, time in written)


SEEN = []


class Recorder:
    def __call__(self, step, figures):
        SEEN.append((step, figures["loss"]))

    def close(self):
        SEEN.append("closed")


def fails_at_five(step, figures):
    SEEN.append(step)
    if step == 5:
        raise RuntimeError("five")


def test_a_function_gets_each_new_step_once_and_is_closed(tmp_path):
    SEEN.clear()
    resumed = trackers_of(f"{__name__}:Recorder", tmp_path, LINES[:3])
    for step in LINES[3:]:
        resumed.log(step)
    resumed.close()
    assert [*LOSSES[3:], "closed"] == SEEN


def test_a_function_that_fails_is_disabled(tmp_path):
    SEEN.clear()
    run = trackers_of(f"{__name__}:fails_at_five", tmp_path, [])
    for step in LINES:
        run.log(step)
    run.close()
    assert SEEN == [1, 2, 3, 4, 5]
    (event,) = read_events(tmp_path)
    assert (event.step, event.kind, event.action) == (5, "tracker", "warn")


@pytest.mark.parametrize(
    "name", ["mlflow", "no_such_module:f", f"{__name__}:no_such_name", f"{__name__}:LINES", "broken_callbacks:f"]
)
def test_a_tracker_that_does_not_exist_is_rejected(name, tmp_path, monkeypatch):
    (tmp_path / "broken_callbacks.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as error:
        trackers.check(settings(name))
    (fault,) = error.value.faults
    assert (fault.setting, fault.value) == ("trackers", name)
