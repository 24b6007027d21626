"""What happened during a run beside its figures: one JSON line an event, next to the metrics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from infembed_ray.training import json_lines

EVENTS = "events.jsonl"

Kind = Literal["resumed", "nonfinite", "spike", "no_negatives", "state", "tracker"]
Action = Literal["note", "warn", "skip", "stop"]
_OF_THE_RUN = ("resumed", "state")  # not of a step that may be done again


@dataclass(frozen=True)
class Event:
    """Something to tell of a step.

    Attributes:
        step: at which, counted from 1; of `resumed`, the steps that were done.
        kind: what it was; `state`: something about saved states.
        action: what followed; `skip`: no update was made, `stop`: the run ended there.
        message: one line for a person.
    """

    step: int
    kind: Kind
    action: Action
    message: str


class EventLog:
    """Writes the events; those of steps that a resumed run does again are cut first, and the resuming is one itself.

    Args:
        directory: of the run.
        start: steps already done in the state the run resumes from.
        writes: does this worker write? One does, all decide alike.
    """

    def __init__(self, directory: Path, start: int, writes: bool = True) -> None:
        self._path = directory / EVENTS
        self._writes = writes
        if writes:
            again = self._path.exists()
            kept = [event for event in read_events(directory) if event.kind in _OF_THE_RUN or event.step <= start]
            json_lines.rewrite(self._path, map(asdict, kept))
            if again:
                how = f"step {start}: resumed from its state" if start else "step 0: begun anew, there was no state yet"
                self.write(Event(start, "resumed", "note", how))

    def write(self, event: Event) -> None:
        """Append one; on disk at once, because the driver tells of it."""
        if self._writes:
            append(self._path.parent, event)


def append(directory: Path, event: Event) -> None:
    """Write one event of the run in `directory`."""
    json_lines.append(directory / EVENTS, asdict(event))


def read_events(directory: Path) -> list[Event]:
    """All whole lines so far."""
    return [Event(**line) for line in json_lines.read(directory / EVENTS)[0]]
