"""The resumable states of a run: saved whole or not at all, checked when loaded, dropped when newer ones stand.

A state is a directory `step-<steps done>-<attempt>`: a run that dies while it saves leaves files that never mix with
those of the attempt after it. `complete.json`, written last, holds the size and checksum of every file of every worker,
and what a run must have in common with this one to go on from it exactly (`Course`).

What a state need not hold: generators of random numbers, which the loop seeds anew for each step and worker, and the
learning rate, which is a function of the step. The data order is a function of the seed and the step too; its
fingerprint is there to prove it.

States can be kept in an object store too. Each worker uploads what it wrote in the background, while the training goes
on; the marker follows when all files are there. The next save waits for it, once its own files are on disk: at most one
state is on its way. A run brings back the newest state if that is there and not here, and the run's own files with it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import threading
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyarrow import ArrowException

from infembed_ray.config import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.object_store import Folder, is_uri
from infembed_ray.progress import say
from infembed_ray.storage import STATES, output_files, write_json
from infembed_ray.training.checksums import Sum, difference
from infembed_ray.training.collectives import from_all, from_first, world
from infembed_ray.training.events import Event, append
from infembed_ray.training.objectives import Objective
from infembed_ray.training.sampler import Sampler

if TYPE_CHECKING:  # a driver that only looks whether a run can go on needs no DeepSpeed
    from infembed_ray.training.engine import Engine

MARKER = "complete.json"
_RESHARDED = "resharded-"
_POLL_S = 0.5


@dataclass(frozen=True)
class Progress:
    """How far a state is.

    Attributes:
        step: steps done.
        consumed: records seen so far; those of the second epoch count again.
        score: of the validation at this step, higher is better; None where there was none.
        best: highest score so far.
        stale: evaluations since then.
    """

    step: int = 0
    consumed: int = 0
    score: float | None = None
    best: float | None = None
    stale: int = 0


@dataclass(frozen=True)
class Course:
    """What a run must have in common with the one that saved a state, to go on from it exactly.

    Attributes:
        workers: that shared the steps.
        batches: of the whole run.
        order: fingerprint of the records of every batch, in order.
        settings: fingerprint of those that decide the result, but for the workers.
    """

    workers: int
    batches: int
    order: str
    settings: str

    @classmethod
    def of(cls, settings: TrainSettings, sampler: Sampler) -> Course:
        """The course of a run."""
        order = hashlib.sha256()
        for shares in sampler.rows():
            order.update(json.dumps(list(chain.from_iterable(shares))).encode())
        identity = {name: value for name, value in settings.identity().items() if name != "workers"}
        decides = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
        return cls(settings.workers, sampler.steps, order.hexdigest()[:16], decides.hexdigest()[:16])

    def hindrance(self, saved: Course, settings: TrainSettings) -> str | None:
        """Why a run of this course cannot go on from a state of that one; None if it can."""
        if self.settings != saved.settings:
            return "its states are of a run with other settings; give another output"
        tie = tied_to_workers(settings)
        if self.workers != saved.workers and (tie or (self.batches, self.order) != (saved.batches, saved.order)):
            why = f"{tie} makes" if tie else "so few records a step make"
            return (
                f"workers={self.workers} cannot go on exactly where {saved.workers} were, because {why} the result "
                f"depend on them; set workers={saved.workers}"
            )
        if (self.batches, self.order) != (saved.batches, saved.order):
            return "its states are of a run that took the records in another order; give another output"
        return None


def tied_to_workers(settings: TrainSettings) -> str | None:
    """The setting by which a run's result depends on how many workers share a step; None where it does not."""
    variables = Objective.of(settings).variables
    if settings.instruction_negatives is None and "I" in variables:
        return "instruction_negatives=null"
    if settings.iq_negatives == "ik" and "IQ" in variables:
        return "iq_negatives=ik"
    return None


@dataclass(frozen=True)
class State:
    """A state that was saved.

    Attributes:
        tag: name of its directory.
        progress, course: of the run when it was saved.
        files: name -> what it must hold.
    """

    tag: str
    progress: Progress
    course: Course
    files: dict[str, Sum]

    @classmethod
    def read(cls, tag: str, marker: str | None) -> State | None:
        """From the text of its marker; None where that is missing or unreadable: it is not whole."""
        try:
            saved = json.loads(marker or "")
            files = {name: Sum(**value) for name, value in saved["files"].items()}
            return cls(tag, Progress(**saved["progress"]), Course(**saved["course"]), files)
        except (ValueError, TypeError, KeyError):
            return None

    @property
    def marker(self) -> dict[str, Any]:
        """What its marker holds."""
        files = {name: file._asdict() for name, file in sorted(self.files.items())}
        return {"progress": asdict(self.progress), "course": asdict(self.course), "files": files}


class States:
    """The states of one run.

    Args:
        directory: where they lie, shared by all workers; the one above it is the run's own.
        settings: of the run.
        sampler: its data order.

    Where `settings.output` is the URI of the run's own output in an object store, the states are copied there, and with
    each of them the run's own files (its metrics).
    """

    def __init__(self, directory: Path, settings: TrainSettings, sampler: Sampler) -> None:
        self.directory = directory
        self._settings = settings
        self._sampler = sampler
        self._remote = Folder.of(settings.output, "output") if is_uri(settings.output) else None
        self._attempt = from_first(secrets.token_hex(4))
        self._known: list[State] = []  # that are good, newest first
        self._upload: _Upload | None = None

    # ------------------------------------------------------------------------------------------------------- finding

    def require_resumable(self) -> int:
        """Steps done in the newest whole state; InputError if that is of a run that this one cannot go on from exactly."""
        newest = next((state for _, state in self._found() if state is not None), None)
        if newest is None:
            return 0
        self._require_same_course(newest)
        return newest.progress.step

    def _require_same_course(self, state: State) -> None:
        if hindrance := self._course.hindrance(state.course, self._settings):
            raise InputError(f"output={self._remote or self.directory.parent}: {hindrance}")

    def result(self) -> tuple[Path, Progress]:
        """The directory of the good state that the run ends in, and how far it is; for one worker to call.

        With scores, the state of the highest, of equals the newest; else the newest. One of which a file is not as it
        was written is passed over for the next, and the run says so.

        Raises:
            InputError: none is as it was written.
        """
        for state in self._scored() + [state for state in self._known if state.progress.score is None]:
            fault = next((f for f in (self._fault(state, name) for name in state.files) if f), None)
            if fault is None:
                return self.directory / state.tag, state.progress
            self._tell(state.progress.step, f"state {state.tag} is not exported: {fault}")
        raise InputError(f"output={self.directory.parent}: no state is as it was written; check the disk and run again")

    def _scored(self) -> list[State]:
        """The good states with a score, the best first."""
        scored = [(s.progress.score, s.progress.step, s) for s in self._known if s.progress.score is not None]
        return [state for *_, state in sorted(scored, key=lambda s: s[:2], reverse=True)]

    def _found(self) -> list[tuple[str, State | None]]:
        """Tags of all states, here and in the object store, newest first, and what their markers say."""
        found = {path.name: path / MARKER for path in self.directory.glob("step-*")}
        markers = {tag: path.read_text(encoding="utf-8") if path.is_file() else None for tag, path in found.items()}
        if self._remote is not None:
            folder = self._remote / STATES
            for tag in {name.split("/")[0] for name in folder.entries()}:
                markers[tag] = markers.get(tag) or folder.read(f"{tag}/{MARKER}")
        states = [(tag, State.read(tag, marker)) for tag, marker in markers.items()]
        return sorted(states, key=lambda s: (_step(s[0]), s[1] is not None, s[0]), reverse=True)

    @cached_property
    def _course(self) -> Course:
        return Course.of(self._settings, self._sampler)

    # ------------------------------------------------------------------------------------------------------- loading

    def resume(self, engine: Engine) -> Progress:
        """Load the newest good state into the engine, every worker the same; a fresh start where there is none.

        A state that is not whole, or of which a file is not as it was written, is passed over for the one before, and
        the run says so.
        """
        first = world()[0] == 0
        if first:
            for left in self.directory.glob(f"{_RESHARDED}*"):  # by a run that was killed
                shutil.rmtree(left, ignore_errors=True)
        found = from_first(self._found() if first else [])  # a file system may show the others an older listing
        skipped: list[str] = []
        for number, (tag, state) in enumerate(found):
            fault = f"no {MARKER}, it was never finished" if state is None else self._first_fault(state)
            if state is not None and fault is None:
                self._require_same_course(state)
                self._load(engine, state)
                self._known = [older for _, older in found[number:] if older is not None]
                break
            skipped.append(f"state {tag} is not used: {fault}")
        progress = self._known[0].progress if self._known else Progress()
        if first:
            if self._remote is not None and found:
                self._pull_run_files()  # before anything is told: that goes on from the events of before
            goes_on = f"goes on from step {progress.step}" if self._known else "starts afresh"
            for line in skipped:
                self._tell(progress.step, f"{line}; the run {goes_on}")
        return progress

    def _first_fault(self, state: State) -> str | None:
        """What is wrong with a state's files, looked at by all workers, each at its part of them."""
        rank, workers = world()
        faults = (self._fault(state, name) for name in sorted(state.files)[rank::workers])
        fault: str | OSError | None
        try:
            fault = next((f for f in faults if f), None)
        except OSError as error:  # the object store does not answer: no reason to pass over a good state
            fault = error
        everyones = from_all(fault)
        for found in everyones:  # raised by all: nobody waits for the one that it met
            if isinstance(found, OSError):
                raise found
        return next((found for found in everyones if isinstance(found, str)), None)

    def _fault(self, state: State, name: str) -> str | None:
        file, expected = self.directory / state.tag / name, state.files[name]
        fault = difference(file, expected)
        if fault and self._remote is not None:
            fault = self._download(f"{state.tag}/{name}", file) or difference(file, expected)
        return fault and f"{name} {fault}"

    def _download(self, name: str, file: Path) -> str | None:
        assert self._remote is not None
        try:
            (self._remote / STATES).download(name, file)
        except FileNotFoundError:
            return "is missing in the object store"
        return None

    def _load(self, engine: Engine, state: State) -> None:
        if state.course.workers == world()[1] or not engine.sharded:
            engine.load(self.directory, state.tag)
            return
        path = self.directory / f"{_RESHARDED}{self._attempt}"
        first = world()[0] == 0
        try:
            if first:
                engine.reshard(self.directory / state.tag, path / state.tag)
            from_all(None)  # until it is there
            engine.load(path, state.tag, resharded=True)
            from_all(None)  # until all have read it
        finally:
            if first:
                shutil.rmtree(path, ignore_errors=True)

    # -------------------------------------------------------------------------------------------------------- saving

    def save(self, engine: Engine, progress: Progress) -> None:
        """Save, mark as whole, drop the states that are not to be kept; every worker must call it.

        A state that cannot be written, because a disk is full, is given up, and the run says so: the states before it
        stay, the training goes on, and the next save tries again.
        """
        if self._saved(progress):
            return
        first = world()[0] == 0
        tag = f"step-{progress.step:08d}-{self._attempt}"
        written = engine.save(self.directory, tag)
        everyones = from_all(written)
        error = next((w.error for w in everyones if w.error), None)
        files = {name: file for w in everyones for name, file in w.files.items()}
        state = State(tag, progress, self._course, files)
        if first and error is None:
            try:
                write_json(self.directory / tag / MARKER, state.marker)
            except OSError as failure:
                error = f"{failure.strerror} at {self.directory / tag / MARKER}"
        error = from_first(error)
        if error is None:
            self.settle()  # not earlier: whoever saves because a machine is about to go has no time to wait
            self._known.insert(0, state)
            self._drop_old()
            if self._remote is not None:
                kept = {state.tag for state in self._known}
                self._upload = _Upload(
                    self._remote,
                    self.directory,
                    state,
                    list(written.files),
                    kept if first else None,
                    self._settings.collective_timeout_s,
                )
        elif first:
            free = shutil.disk_usage(self.directory).free
            shutil.rmtree(self.directory / tag, ignore_errors=True)
            self._tell(
                progress.step,
                f"the state of step {progress.step} was not saved: {error}, {free} bytes free; the training goes on, "
                "the states before it stay",
            )

    def _saved(self, progress: Progress) -> bool:
        return bool(self._known) and self._known[0].progress.step == progress.step

    def _drop_old(self) -> None:
        """Keep the newest states, the just written one among them, and the best; and nothing that is broken."""
        best = max(self._settings.keep_best, int(self._settings.validation is not None))  # one of them is exported
        kept = {state.tag for state in self._known[: self._settings.keep_last] + self._scored()[:best]}
        self._known = [state for state in self._known if state.tag in kept]
        if world()[0] == 0:
            for old in self.directory.glob("step-*"):
                if old.name not in kept:
                    (old / MARKER).unlink(missing_ok=True)  # first: nothing half-deleted looks whole
                    shutil.rmtree(old, ignore_errors=True)

    def require_saved(self, progress: Progress) -> None:
        """InputError if the state of the run's end could not be saved, so that there is nothing to export."""
        if not self._saved(progress):
            raise InputError(
                f"output={self.directory.parent}: the last state could not be saved; make room and run again: it goes on "
                "from the state before"
            )

    def _tell(self, step: int, message: str) -> None:
        try:
            append(self.directory.parent, Event(step, "state", "warn", message))
        except OSError:  # the disk is full to the last byte
            say(message)

    # -------------------------------------------------------------------------------------------------- object store

    def settle(self) -> None:
        """Wait for the upload that is under way; the run says so if it failed. Every worker must call it."""
        upload, self._upload = self._upload, None
        if upload is None:
            return
        first = world()[0] == 0
        others = [fault for fault in from_all(None if first else upload.fault()) if fault]
        if first:
            if others:  # what worker 0 waits for will not come
                upload.give_up()
            fault = next(iter(others), None) or upload.fault()
            if fault:
                self._tell(
                    upload.state.progress.step,
                    f"state {upload.state.tag} did not get to {self._remote}: {fault}; it is in {self.directory}, the "
                    "training goes on",
                )

    def _pull_run_files(self) -> None:
        """Bring back the run's own files (metrics), unless they and the state it goes on from were written here."""
        assert self._remote is not None
        here = bool(self._known) and (self.directory / self._known[0].tag / MARKER).is_file()
        for name, entry in self._remote.entries().items():
            file = self.directory.parent / name
            whole = here and file.is_file() and file.stat().st_size >= entry.size
            if not name.startswith(f"{STATES}/") and not whole:
                self._remote.download(name, file)


class _Upload:
    """A state on its way to an object store, in the background.

    Args:
        remote: the run's output there.
        directory: of the states.
        state: on its way.
        mine: the files that this worker wrote.
        keep: of worker 0, the tags of the states that are to stay there: it writes the marker once all files are
            there, and deletes the others up to this one. None for the other workers.
        timeout_s: that worker 0 waits for the others' files once its own are there.
    """

    def __init__(
        self, remote: Folder, directory: Path, state: State, mine: list[str], keep: set[str] | None, timeout_s: float
    ) -> None:
        self.state = state
        self._remote = remote
        self._directory = directory
        self._mine = mine
        self._keep = keep
        self._timeout_s = timeout_s
        self._given_up = threading.Event()
        self._fault: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)  # a worker that dies does not wait for it
        self._thread.start()

    def fault(self) -> str | None:
        """Wait for the end; what went wrong."""
        self._thread.join()
        return self._fault

    def give_up(self) -> None:
        """Wait no longer for the other workers' files."""
        self._given_up.set()

    def _run(self) -> None:
        try:
            states = self._remote / STATES
            for name in self._mine:
                states.upload(self._directory / self.state.tag / name, f"{self.state.tag}/{name}")
            if self._keep is not None and self._all_there():
                for file in output_files(self._directory.parent):
                    self._remote.upload(file, file.relative_to(self._directory.parent).as_posix())
                states.write(f"{self.state.tag}/{MARKER}", json.dumps(self.state.marker))
                self._prune(states, self._keep)
        except (OSError, ArrowException) as error:
            self._fault = " ".join(str(error).split())[:300]

    def _all_there(self) -> bool:
        folder = self._remote / STATES / self.state.tag
        expected = {name: file.size for name, file in self.state.files.items()}
        deadline = time.monotonic() + self._timeout_s
        while {name: entry.size for name, entry in folder.entries().items() if name in expected} != expected:
            if self._given_up.wait(_POLL_S):
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"the files of all workers were not there after {self._timeout_s} s")
        return True

    def _prune(self, states: Folder, keep: set[str]) -> None:
        """Delete the states up to this one that are not to stay; later ones are of a run that has come further."""
        tags = {name: name.split("/")[0] for name in states.entries()}
        old = [name for name, tag in tags.items() if tag not in keep and _step(tag) <= self.state.progress.step]
        for name in sorted(old, key=lambda name: not name.endswith(MARKER)):  # nothing half-deleted looks whole
            states.delete(name)


def _step(tag: str) -> int:
    return int(tag.split("-")[1])
