"""Logs of a training run: one JSON line per step (metrics) and per event, readable while they grow.

A failed write does not end the run: an exception would end one worker while the others wait for it.
"""

import errno
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from infembed_ray.progress import say
from infembed_ray.storage import durable

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"

Kind = Literal["resumed", "nonfinite", "no_negatives", "state", "tracker"]
_OF_THE_RUN = ("resumed", "state")
"""Kinds that concern the run rather than a step, and so stay when a resumed run repeats a step."""


@dataclass(frozen=True)
class Event:
    """An event of a training run.

    Attributes:
        step: Number of the step, from 1; for `resumed`, the steps done.
        kind: Kind of event; `state` concerns a checkpoint.
        action: `stop`: the run stopped; else it continued.
        message: One line for the user.
    """

    step: int
    kind: Kind
    action: Literal["note", "warn", "stop"]
    message: str


def begin(directory: Path, start: int) -> None:
    """Begin the logs of a run, or remove the lines of the steps that a resumed run repeats and log that it resumed.

    Args:
        directory: Output of the run.
        start: Steps done in the checkpoint from which the run resumes.
    """
    resumed = (directory / EVENTS).exists()
    events = [event for event in read_events(directory) if event.kind in _OF_THE_RUN or event.step <= start]
    _rewrite(directory / EVENTS, map(asdict, events))
    _rewrite(directory / METRICS, (line for line in read_metrics(directory) if line["step"] <= start))
    if resumed:
        how = f"step {start}: resumed from its checkpoint" if start else "step 0: restarted, without a checkpoint"
        append_event(directory, Event(start, "resumed", "note", how))


def append_event(directory: Path, event: Event) -> None:
    """Append an event; it is on disk when this returns, because the driver shows it."""
    _append(directory / EVENTS, asdict(event))


def append_metrics(directory: Path, line: dict[str, Any]) -> None:
    """Append the figures of a step; they are on disk when this returns, because the driver shows progress from them."""
    _append(directory / METRICS, line)


def read_events(directory: Path) -> list[Event]:
    """Read all complete lines of the event log."""
    return [Event(**line) for line in read_lines(directory / EVENTS)[0]]


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Read all complete lines of the metrics; empty before the first step."""
    return read_lines(directory / METRICS)[0]


def read_lines(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Read the complete lines of a log after byte `offset`, and return them with the offset of their end.

    If the log was rewritten, so that no line ends at `offset`, all lines are read.
    """
    if not path.exists():
        return [], 0
    with path.open("rb") as stream:
        stream.seek(max(offset - 1, 0))
        if offset and stream.read(1) != b"\n":
            offset = stream.seek(0)
        text = stream.read()
    whole = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.split(b"\n") if line], offset + len(whole)


def _rewrite(path: Path, values: Iterable[Any]) -> None:
    lines = [_line(value) for value in values]
    with durable.replacing(path) as stream:
        stream.writelines(lines)


def _append(path: Path, value: Any) -> None:
    """Append a line, whole and without buffering. If the disk is full, the line is dropped and a warning logged once."""
    line = _line(value)
    try:
        with path.open("ab", buffering=0) as stream:
            end = stream.seek(0, os.SEEK_END)
            if stream.write(line) < len(line):
                stream.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        _say_once(f"train: warning: lines of {path.name} are missing, because it cannot be written ({error.strerror})")


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


_say_once = cache(say)
