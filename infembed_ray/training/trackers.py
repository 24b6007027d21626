"""The log of a run, shown by TensorBoard, Weights & Biases or MLflow as well.

    tensorboard    event files in OUTPUT/tensorboard
    wandb          as WANDB_PROJECT and the other variables of wandb say; without WANDB_API_KEY offline, in OUTPUT/wandb,
                   for `wandb sync`
    mlflow         the server that MLFLOW_TRACKING_URI names, else files in OUTPUT/mlflow

All get the names and figures of `metrics.jsonl`, and each step once: who already holds a step, from before the run was
interrupted, is not told again, and who lacks one is.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from infembed_ray.config import TrainSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.training.events import Event, EventLog

TRACKED = "trackers.json"
"""Of a run: its ids at the trackers."""
_PACKAGES = {
    "tensorboard": ("tensorboardX", "tensorboardX"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
_PROJECT = "infembed"


def check(settings: TrainSettings) -> None:
    """InputError if a package of a tracker is not installed here."""
    for tracker in settings.trackers:
        module, package = _PACKAGES[tracker]
        if find_spec(module) is None:
            raise InputError(f"trackers={tracker}: {package} is not installed; pip install {package}, or leave it out")


class Tracker(Protocol):
    """One of them.

    Attributes:
        step: the newest that it holds.
    """

    step: int

    def log(self, step: int, time: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a step that ended at `time`, in seconds since 1970."""
        ...

    def close(self) -> None:
        """No more steps follow."""
        ...


class Trackers:
    """All of a run's. One worker has them. One that fails is left out from then on: the run is worth more.

    Args:
        settings: of the run.
        directory: of the run.
        lines: of its log, the steps before.
        events: where it is told that a tracker fails.
    """

    def __init__(
        self, settings: TrainSettings, directory: Path, lines: Sequence[Mapping[str, Any]], events: EventLog
    ) -> None:
        self._events = events
        self._trackers: dict[str, Tracker] = {}
        for name in settings.trackers:
            with self._left_out_if_it_fails(name, len(lines)):
                self._trackers[name] = _KINDS[name](settings, directory)
        for line in lines:
            self.log(line)

    def log(self, line: Mapping[str, Any]) -> None:
        """Tell those of a line of the log that do not hold its step."""
        step, time = line["step"], line["time"]
        figures = {name: value for name, value in line.items() if name not in ("step", "time") and value is not None}
        for name, tracker in list(self._trackers.items()):
            if step > tracker.step:
                with self._left_out_if_it_fails(name, step):
                    tracker.log(step, time, figures)
                    tracker.step = step

    def close(self) -> None:
        """No more steps follow."""
        for name, tracker in list(self._trackers.items()):
            with self._left_out_if_it_fails(name, tracker.step):
                tracker.close()

    @contextmanager
    def _left_out_if_it_fails(self, name: str, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            message = f"step {step}: {name} is told no more, the run goes on without it ({in_one_line(error)})"
            self._events.write(Event(step, "tracker", "warn", message))


class TensorBoard:
    """Event files, written anew from the log when a run is resumed: they hold what the log holds."""

    def __init__(self, settings: TrainSettings, directory: Path) -> None:
        from tensorboardX import SummaryWriter

        self.step = 0
        files = directory / "tensorboard"
        shutil.rmtree(files, ignore_errors=True)
        self._writer = SummaryWriter(str(files), flush_secs=10)

    def log(self, step: int, time: int, figures: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B. It takes steps in order only and cannot be asked for them offline, so the newest is noted here."""

    def __init__(self, settings: TrainSettings, directory: Path) -> None:
        import wandb

        self._directory = directory
        noted = _noted(directory, "wandb") or {"id": secrets.token_hex(8), "step": 0}
        self._id, self.step = noted["id"], noted["step"]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=self._id,
            resume="allow",
            dir=str(directory),
            mode=None if {"WANDB_MODE", "WANDB_API_KEY"} & os.environ.keys() else "offline",
            config=settings.identity(),
            settings=wandb.Settings(console="off"),
        )

    def log(self, step: int, time: int, figures: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log(dict(figures), step=step, commit=True)
        _note(self._directory, "wandb", {"id": self._id, "step": step})

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()


class MLflow:
    """A run of MLflow, of the experiment MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, settings: TrainSettings, directory: Path) -> None:
        from mlflow import MlflowClient

        # Its local files are in maintenance mode and must be asked for; a database is a heavier dependency.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (directory / "mlflow").as_uri())
        if noted := _noted(directory, "mlflow"):
            self._id = noted["id"]
            self._client.update_run(self._id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            found = experiment.experiment_id if experiment else self._client.create_experiment(name)
            self._id = self._client.create_run(found).info.run_id
            _note(directory, "mlflow", {"id": self._id})
            for key, value in settings.identity().items():
                self._client.log_param(self._id, key, value)
        steps = [metric.step for metric in self._client.get_metric_history(self._id, "learning_rate")]
        self.step = max(steps, default=0)

    def log(self, step: int, time: int, figures: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        from mlflow.entities import Metric

        self._client.log_batch(self._id, [Metric(name, value, 1000 * time, step) for name, value in figures.items()])

    def close(self) -> None:
        """See `Tracker.close`."""
        self._client.set_terminated(self._id)


_KINDS: Mapping[str, Callable[[TrainSettings, Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def _noted(directory: Path, tracker: str) -> dict[str, Any] | None:
    path = directory / TRACKED
    return json.loads(path.read_text(encoding="utf-8")).get(tracker) if path.exists() else None


def _note(directory: Path, tracker: str, what: Mapping[str, Any]) -> None:
    path = directory / TRACKED
    others = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({**others, tracker: what}), encoding="utf-8")
    partial.replace(path)
