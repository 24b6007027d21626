"""Experiment trackers: the log of a run in TensorBoard, Weights & Biases or MLflow.

    tensorboard    event files in OUTPUT/tensorboard
    wandb          WANDB_PROJECT and the other variables of wandb apply; without WANDB_API_KEY offline, in OUTPUT/wandb,
                   for `wandb sync`
    mlflow         the server that MLFLOW_TRACKING_URI names, or files in OUTPUT/mlflow

Each gets the names and figures of `metrics.jsonl`, and each step once: after a resume, only the steps that it lacks.
The user's callbacks get the same figures, of new steps only.
"""

from __future__ import annotations

import json
import os
import pkgutil
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.training.observability.events import Event, EventLog

TRACKED = "trackers.json"
"""File in the output of a run with its ids at the trackers."""
_PACKAGES = {
    "tensorboard": ("tensorboardX", "tensorboardX"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
"""Tracker -> module, and package that installs it."""
_PROJECT = "infembed"


def check(settings: TrainSettings) -> None:
    """Check that the packages of the trackers are installed and that the callbacks exist.

    Raises:
        InputError: one is not, or does not.
    """
    for name in settings.callbacks:
        try:
            found = pkgutil.resolve_name(name)
        except Exception as error:  # importing a module runs its code
            raise InputError(
                f"callbacks={name}: {in_one_line(error)}; give module:name of a module that every node can import"
            ) from error
        if not callable(found):
            raise InputError(f"callbacks={name}: is a {type(found).__name__}; name a function or a class")
    for tracker in settings.trackers:
        module, package = _PACKAGES[tracker]
        if find_spec(module) is None:
            raise InputError(f"trackers={tracker}: {package} is not installed; pip install {package}, or leave it out")


class Trackers:
    """All trackers of a run; worker 0 has them. A tracker that fails is disabled, and training continues.

    Args:
        settings, directory: Settings and output of the run.
        lines: Lines of its log so far.
        events: Where the failure of a tracker is logged.
    """

    def __init__(
        self, settings: TrainSettings, directory: Path, lines: Sequence[Mapping[str, Any]], events: EventLog
    ) -> None:
        self._events = events
        self._trackers: dict[str, Tracker] = {}
        for name in settings.trackers:
            with self._disabled_on_failure(name, len(lines)):
                self._trackers[name] = _KINDS[name](settings, directory)
        for callback in settings.callbacks:
            with self._disabled_on_failure(callback, len(lines)):
                self._trackers[callback] = Callback(callback, lines[-1]["step"] if lines else 0)
        for line in lines:
            self.log(line)

    def log(self, line: Mapping[str, Any]) -> None:
        """Add a line of the log to the trackers that do not have its step."""
        step, time = line["step"], line["time"]
        figures = {name: value for name, value in line.items() if name not in ("step", "time") and value is not None}
        for name, tracker in list(self._trackers.items()):
            if step > tracker.step:
                with self._disabled_on_failure(name, step):
                    tracker.log(step, time, figures)
                    tracker.step = step

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self._trackers.items()):
            with self._disabled_on_failure(name, tracker.step):
                tracker.close()

    @contextmanager
    def _disabled_on_failure(self, name: str, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            message = f"step {step}: tracker {name} failed and is disabled; training continues ({in_one_line(error)})"
            self._events.write(Event(step, "tracker", "warn", message))


class Tracker:
    """Base class of the trackers.

    Attributes:
        step: Newest step that the tracker has.
    """

    step = 0

    def log(self, step: int, time: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a step that ended at `time`, in seconds since 1970."""
        raise NotImplementedError

    def close(self) -> None:
        """End the run at the tracker."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """TensorBoard event files, written anew from the log when a run resumes."""

    def __init__(self, settings: TrainSettings, directory: Path) -> None:
        from tensorboardX import SummaryWriter

        files = directory / "tensorboard"
        shutil.rmtree(files, ignore_errors=True)
        self._writer = SummaryWriter(str(files), flush_secs=10)

    def log(self, step: int, time: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of W&B. It accepts steps in order only and cannot be queried offline, so the newest step is kept in a file."""

    def __init__(self, settings: TrainSettings, directory: Path) -> None:
        import wandb

        self._directory = directory
        saved = _load(directory, "wandb") or {"id": secrets.token_hex(8), "step": 0}
        self._id, self.step = saved["id"], saved["step"]
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
        self._run.log(dict(figures), step=step, commit=True)
        _save(self._directory, "wandb", {"id": self._id, "step": step})

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of MLflow in the experiment MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, settings: TrainSettings, directory: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read by the import
        from mlflow import MlflowClient

        # MLflow's file store must be enabled; its alternative, a database, is a heavier dependency.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (directory / "mlflow").as_uri())
        if saved := _load(directory, "mlflow"):
            self._id = saved["id"]
            self._client.update_run(self._id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            found = experiment.experiment_id if experiment else self._client.create_experiment(name)
            self._id = self._client.create_run(found).info.run_id
            _save(directory, "mlflow", {"id": self._id})
            for key, value in settings.identity().items():
                self._client.log_param(self._id, key, value)
        steps = [metric.step for metric in self._client.get_metric_history(self._id, "learning_rate")]
        self.step = max(steps, default=0)

    def log(self, step: int, time: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(self._id, [Metric(name, value, 1000 * time, step) for name, value in figures.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Callback(Tracker):
    """A user's function, called with the step and its figures.

    A class is instantiated first, its instance is called for each step, and `close()` at the end if it has that method.

    Args:
        name: `module:name`.
        step: newest step of the run so far.
    """

    def __init__(self, name: str, step: int) -> None:
        found = pkgutil.resolve_name(name)
        self._call = found() if isinstance(found, type) else found
        self.step = step

    def log(self, step: int, time: int, figures: Mapping[str, float]) -> None:
        self._call(step, dict(figures))

    def close(self) -> None:
        getattr(self._call, "close", lambda: None)()


_KINDS: Mapping[str, Callable[[TrainSettings, Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def _load(directory: Path, tracker: str) -> dict[str, Any] | None:
    path = directory / TRACKED
    return json.loads(path.read_text(encoding="utf-8")).get(tracker) if path.exists() else None


def _save(directory: Path, tracker: str, value: Mapping[str, Any]) -> None:
    path = directory / TRACKED
    others = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    # Not synced to disk, because a tracker may save in every step.
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({**others, tracker: value}), encoding="utf-8")
    partial.replace(path)
