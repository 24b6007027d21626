"""Experiment trackers: the metrics of a run in TensorBoard, or given to the user's functions.

    tensorboard    event files in OUTPUT/tensorboard
    module:name    a function is called with a step and its figures. A class is instantiated first, and its method
                   `close`, if it has one, is called at the end

Each gets the figures of `metrics.jsonl`, and each step once: after a resume, only the steps that it lacks.
"""

import pkgutil
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.training.observability.logs import Event


def check(settings: TrainSettings) -> None:
    """Check that the trackers' functions exist; InputError otherwise."""
    for name in settings.trackers:
        if name == "tensorboard":
            continue
        if ":" not in name:
            raise InputError.of("trackers", name, "no such tracker", "give tensorboard or module:name")
        try:
            target = pkgutil.resolve_name(name)
        except Exception as error:  # importing a module runs its code
            remedy = "give module:name of a module that every node can import"
            raise InputError.of("trackers", name, in_one_line(error), remedy) from error
        if not callable(target):
            raise InputError.of("trackers", name, f"is a {type(target).__name__}", "name a function or a class")


class Trackers:
    """All trackers of a run; worker 0 has them. A tracker that fails is disabled, and training continues.

    Args:
        settings, directory: Settings and output of the run.
        lines: Its metrics so far.
        log: Logs the failure of a tracker.
    """

    def __init__(
        self, settings: TrainSettings, directory: Path, lines: Sequence[Mapping[str, Any]], log: Callable[[Event], None]
    ) -> None:
        self._log = log
        self._trackers: dict[str, _Tracker] = {}
        done: int = lines[-1]["step"] if lines else 0
        for name in settings.trackers:
            with self._disabled_on_failure(name, done):
                self._trackers[name] = _tensorboard(directory) if name == "tensorboard" else _of_user(name, done)
        for line in lines:
            self.log(line)

    def log(self, line: Mapping[str, Any]) -> None:
        """Add a line of the metrics to the trackers that do not have its step."""
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
            self._log(Event(step, "tracker", "warn", message))


@dataclass
class _Tracker:
    """A tracker: what takes a step, its time in seconds since 1970 and its figures; what closes it; its last step."""

    log: Callable[[int, int, Mapping[str, float]], None]
    close: Callable[[], None]
    step: int


def _tensorboard(directory: Path) -> _Tracker:
    """Return TensorBoard's event files, written anew from the metrics when a run resumes."""
    from tensorboardX import SummaryWriter

    shutil.rmtree(directory / "tensorboard", ignore_errors=True)
    writer = SummaryWriter(str(directory / "tensorboard"), flush_secs=10)

    def log(step: int, time: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step, walltime=time)

    return _Tracker(log, writer.close, 0)


def _of_user(name: str, done: int) -> _Tracker:
    """Return a user's function or an instance of the user's class; it gets new steps only, those after `done`."""
    target = pkgutil.resolve_name(name)
    call = target() if isinstance(target, type) else target
    return _Tracker(lambda step, _, figures: call(step, dict(figures)), getattr(call, "close", lambda: None), done)
