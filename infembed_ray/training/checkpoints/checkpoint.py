"""A training checkpoint: how far it is, which run can resume from it, and what its files must hold.

A checkpoint is a directory `step-<steps done>-<attempt>`; a run that dies while it saves leaves files that never mix with
those of the next attempt. The marker `complete.json`, written last, holds the other contents of `Checkpoint`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from infembed_ray.config.training import TrainSettings
from infembed_ray.training.losses import Objective
from infembed_ray.training.sampler import Sampler

MARKER = "complete.json"
"""Written last and deleted first, so that a half-written or half-deleted checkpoint is incomplete."""
_BLOCK = 1 << 20


class Checksum(NamedTuple):
    """Expected contents of a file: its size in bytes and its SHA-256 (hexadecimal)."""

    size: int
    sha256: str

    def mismatch(self, path: Path) -> str | None:
        """Return how a file differs from this, or None."""
        if not path.is_file():
            return "is missing"
        if (size := path.stat().st_size) != self.size:
            return f"has {size} bytes instead of {self.size}"
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
        return None if digest.hexdigest() == self.sha256 else "has another checksum than when it was written"


@dataclass(frozen=True)
class Progress:
    """How far a run is: steps done, and records seen, those of the second epoch again.

    `score` is the validation score at this step, `best` the highest so far, and `stale` counts the evaluations since then.
    `exclusion_weight` is that of `InstructionEncoder`, as the last evaluation chose it.
    """

    step: int = 0
    consumed: int = 0
    score: float | None = None
    best: float | None = None
    stale: int = 0
    exclusion_weight: float = 0.0


@dataclass(frozen=True)
class Course:
    """What a run must share with the run that saved a checkpoint, to resume from it exactly.

    `batches` is the number of steps; `order` and `settings` are fingerprints of the records of every step, and of the
    settings that decide the result, without the number of workers.
    """

    workers: int
    batches: int
    order: str
    settings: str

    @classmethod
    def from_settings(cls, settings: TrainSettings, sampler: Sampler) -> Course:
        """Return the course of a run."""
        order = hashlib.sha256()
        for shares in sampler.rows():
            order.update(json.dumps(list(chain.from_iterable(shares))).encode())
        identity = {name: value for name, value in settings.identity().items() if name != "workers"}
        decides = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
        return cls(settings.workers, sampler.steps, order.hexdigest()[:16], decides.hexdigest()[:16])

    def conflict(self, saved: Course, settings: TrainSettings) -> str | None:
        """Return why a run of this course cannot resume from a checkpoint of `saved`, or None."""
        if self.settings != saved.settings:
            return "its checkpoints are from a run with other settings; set another output"
        same_order = (self.batches, self.order) == (saved.batches, saved.order)
        tie = tied_to_workers(settings)
        if self.workers != saved.workers and (tie or not same_order):
            why = f"{tie} makes" if tie else "so few records per step make"
            fault = f"workers={self.workers} cannot resume exactly from checkpoints of {saved.workers} workers"
            return f"{fault}, because {why} the result depend on their number; set workers={saved.workers}"
        other_order = "its checkpoints are from a run with another order of records; set another output"
        return None if same_order else other_order


def tied_to_workers(settings: TrainSettings) -> str | None:
    """Return the setting that makes a run's result depend on the number of workers, or None."""
    variables = Objective.from_settings(settings).variables
    if settings.instruction_negatives is None and "I" in variables:
        return "instruction_negatives=null"
    if settings.iq_negatives == "ik" and "IQ" in variables:
        return "iq_negatives=ik"
    return None


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        tag: Name of its directory.
        progress, course: Of the run when it was saved.
        files: File name -> expected contents, of all workers.
    """

    tag: str
    progress: Progress
    course: Course
    files: dict[str, Checksum]

    @classmethod
    def parse(cls, tag: str, marker: str | None) -> Checkpoint | None:
        """Read the text of a marker; None if it is missing or unreadable, so that the checkpoint is incomplete."""
        try:
            saved = json.loads(marker or "")
            files = {name: Checksum(**value) for name, value in saved["files"].items()}
            return cls(tag, Progress(**saved["progress"]), Course(**saved["course"]), files)
        except (ValueError, TypeError, KeyError):
            return None

    @property
    def marker(self) -> dict[str, Any]:
        """Contents of its marker."""
        files = {name: file._asdict() for name, file in sorted(self.files.items())}
        return {"progress": asdict(self.progress), "course": asdict(self.course), "files": files}


def step_of(tag: str) -> int:
    """Return the steps done in the checkpoint of that tag."""
    return int(tag.split("-")[1])
