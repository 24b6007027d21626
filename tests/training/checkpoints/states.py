"""What tests of checkpoints share: settings of small runs, an engine in place of DeepSpeed, and what a run left."""

import hashlib
from concurrent.futures import Future

from infembed_ray.config.training import TrainSettings
from infembed_ray.training.checkpoints.checkpoint import Checksum
from infembed_ray.training.checkpoints.writer import Written
from infembed_ray.training.observability.logs import read_events

RECORDS = 8


def settings_of(model, **changes):
    common = {"records": "-", "output": "-", "objective": "multi{P,I,IQ}", "instruction_negatives": 3}
    common |= {"records_per_step": 4, "epochs": 2, "learning_rate": 1e-3, "checkpoint_every": 1, "weight_decay": 0.1}
    return TrainSettings(model=model, **(common | changes))


def complete(directory):
    """Return the complete checkpoints, oldest first."""
    return sorted(path.parent for path in directory.glob("states/step-*/complete.json"))


def steps(directory):
    return [int(state.name.split("-")[1]) for state in complete(directory)]


def warnings(directory):
    return [event.message for event in read_events(directory) if event.kind == "state"]


def done(written):
    """Return what an engine returns for a checkpoint that is written already."""
    future = Future()
    future.set_result(written)
    return future


class Writer:
    """Stand-in for an engine where the contents of a checkpoint do not matter; it has written when `save` returns."""

    sharded = True

    def save(self, directory, tag):
        (directory / tag).mkdir(parents=True)
        (directory / tag / "file").write_text(tag)
        return done(Written({"file": Checksum(len(tag), hashlib.sha256(tag.encode()).hexdigest())}))

    def load(self, directory, tag, resharded=False):
        self.loaded = tag
