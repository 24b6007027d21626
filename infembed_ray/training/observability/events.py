"""Event log of a training run: one JSON line per event, beside the metrics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from infembed_ray.training.observability import json_lines

EVENTS = "events.jsonl"

Kind = Literal["resumed", "nonfinite", "spike", "no_negatives", "state", "tracker"]
Action = Literal["note", "warn", "skip", "stop"]
_OF_THE_RUN = ("resumed", "state")
"""Kinds that concern the run rather than a step, and so stay when a resumed run repeats a step."""


@dataclass(frozen=True)
class Event:
    """An event of a training run.

    Attributes:
        step: Number of the step, from 1; for `resumed`, the steps done.
        kind: Kind of event; `state` concerns a checkpoint.
        action: What followed; `skip`: the update was skipped, `stop`: the run stopped.
        message: One line for the user.
    """

    step: int
    kind: Kind
    action: Action
    message: str


class EventLog:
    """Writes the events of a run. A resumed run first removes those of the steps that it repeats, and logs that it resumed.

    Args:
        directory: Output of the run.
        start: Steps done in the checkpoint from which the run resumes.
        writes: Whether this worker writes; only one does.
    """

    def __init__(self, directory: Path, start: int, writes: bool = True) -> None:
        self._path = directory / EVENTS
        self._writes = writes
        if writes:
            resumed = self._path.exists()
            kept = [event for event in read_events(directory) if event.kind in _OF_THE_RUN or event.step <= start]
            json_lines.rewrite(self._path, map(asdict, kept))
            if resumed:
                how = (
                    f"step {start}: resumed from its checkpoint" if start else "step 0: restarted, without a checkpoint"
                )
                self.write(Event(start, "resumed", "note", how))

    def write(self, event: Event) -> None:
        """Append an event; it is on disk when this returns, because the driver shows it."""
        if self._writes:
            append_event(self._path.parent, event)


def append_event(directory: Path, event: Event) -> None:
    """Append an event to the log of the run in `directory`."""
    json_lines.append(directory / EVENTS, asdict(event))


def read_events(directory: Path) -> list[Event]:
    """Read all complete lines of the log."""
    return [Event(**line) for line in json_lines.read(directory / EVENTS)[0]]
