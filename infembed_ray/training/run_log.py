"""All that is written down of a run's steps, by one worker: figures, records, and what trackers are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infembed_ray.config import TrainSettings
from infembed_ray.training.events import EventLog
from infembed_ray.training.metrics import SAMPLES, MetricsLog, read_metrics
from infembed_ray.training.trackers import Trackers


class RunLog:
    """The logs of one run; what they say of steps that a resumed run does again is cut first.

    Args:
        settings: of the run.
        directory: of the run.
        start: steps already done in the state the run resumes from.
        events: where a tracker that fails is told of.
    """

    def __init__(self, settings: TrainSettings, directory: Path, start: int, events: EventLog) -> None:
        self._metrics = MetricsLog(directory, start)
        self._samples = MetricsLog(directory, start, SAMPLES)
        self._trackers = Trackers(settings, directory, read_metrics(directory), events)

    def write(self, step: int, records: Sequence[str], **figures: Any) -> None:
        """Append one step, made of these records."""
        self._samples.write(step=step, records=records)
        self._trackers.log(self._metrics.write(step=step, **figures))

    def close(self) -> None:
        """No more steps follow."""
        self._trackers.close()
