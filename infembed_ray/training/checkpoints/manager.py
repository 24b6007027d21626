"""Training checkpoints of a run: saved completely or not at all, verified when loaded, deleted when newer ones exist.

The files are written, and uploaded if the output is in an object store, in the background. A checkpoint is complete once
all workers have written theirs, which they find out together at the end of a step; worker 0 then writes the marker, and one
in the store if all files are there.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pyarrow import ArrowException

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.progress import say
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder, is_uri
from infembed_ray.storage.places import read_text
from infembed_ray.storage.steps import STATES
from infembed_ray.telemetry import report
from infembed_ray.training.checkpoints.checkpoint import MARKER, Checkpoint, Course, Progress, step_of
from infembed_ray.training.collectives import from_all, from_first, world
from infembed_ray.training.node_files import RunFiles, share_of
from infembed_ray.training.observability.logs import Event, append_event
from infembed_ray.training.sampler import Sampler

if TYPE_CHECKING:  # a driver that only checks whether a run can resume does not import DeepSpeed
    from infembed_ray.training.checkpoints.writer import Written
    from infembed_ray.training.engine import Engine

KEEP_LAST = 2
"""Newest checkpoints to keep: one of them may be damaged."""
_RESHARDED = "resharded-"


class CheckpointManager:
    """The checkpoints of one run.

    Args:
        directory: Directory of the checkpoints, shared by all workers; its parent is the run's output. If that is in an
            object store, it is shared by the workers of a node, and checkpoints are copied to the store.
        settings, sampler: Settings and data order of the run.

    Attributes:
        stopped: Why the run must stop, because checkpoints cannot be written; the same on every worker.
    """

    def __init__(self, directory: Path, settings: TrainSettings, sampler: Sampler) -> None:
        self.directory = directory
        self.stopped: str | None = None
        self._settings = settings
        self._sampler = sampler
        self._remote = Folder.open(settings.output, "output") if is_uri(settings.output) else None
        self._share = world() if self._remote is None else share_of(directory)
        self._attempt = from_first(secrets.token_hex(4))
        self._valid: list[Checkpoint] = []  # newest first
        self._writing: tuple[str, Progress, Future[Written]] | None = None
        self._began = 0.0  # time of the last save
        self._failures = 0  # in a row
        self._uploads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="upload")
        self._not_stored: list[tuple[Checkpoint, Written]] = []  # uploaded again before the export
        self._run_files: RunFiles | None = None
        if self._remote is not None and world()[0] == 0:
            self._run_files = RunFiles(directory.parent, self._remote)

    @cached_property
    def _course(self) -> Course:
        return Course.from_settings(self._settings, self._sampler)

    def _listed(self) -> list[tuple[str, Checkpoint | None]]:
        """Return (tag, checkpoint) of all checkpoints, local and remote, newest first; None for an incomplete one."""
        files = {path.name: path / MARKER for path in self.directory.glob("step-*")}
        markers = {tag: path.read_text(encoding="utf-8") if path.is_file() else None for tag, path in files.items()}
        if self._remote is not None:
            folder = self._remote / STATES
            for tag in {name.split("/")[0] for name in folder.entries() if name.startswith("step-")}:
                markers[tag] = markers.get(tag) or read_text(folder / tag / MARKER)
        checkpoints = [(tag, Checkpoint.parse(tag, marker)) for tag, marker in markers.items()]
        return sorted(checkpoints, key=lambda c: (step_of(c[0]), c[1] is not None, c[0]), reverse=True)

    def require_resumable(self) -> int:
        """Return the steps done in the newest complete checkpoint; InputError if this run cannot resume exactly from it."""
        newest = next((checkpoint for _, checkpoint in self._listed() if checkpoint is not None), None)
        if newest is None:
            return 0
        self._require_same_course(newest)
        return newest.progress.step

    def _require_same_course(self, checkpoint: Checkpoint) -> None:
        if conflict := self._course.conflict(checkpoint.course, self._settings):
            raise InputError(f"output={self._remote or self.directory.parent}: {conflict}")

    def resume(self, engine: Engine) -> Progress:
        """Load the newest valid checkpoint into the engine and return its progress; every worker must call it.

        An incomplete or damaged checkpoint is skipped with a warning.
        """
        first = world()[0] == 0
        if self._share[0] == 0:
            for leftover in self.directory.glob(f"{_RESHARDED}*"):  # of a run that was killed
                shutil.rmtree(leftover, ignore_errors=True)
        listed = from_first(self._listed() if first else [])  # a file system may show other workers an older listing
        skipped: list[str] = []
        for number, (tag, checkpoint) in enumerate(listed):
            fault = f"it is incomplete (no {MARKER})" if checkpoint is None else self._first_fault(checkpoint)
            if checkpoint is not None and fault is None:
                self._require_same_course(checkpoint)
                self._load(engine, checkpoint)
                self._valid = [older for _, older in listed[number:] if older is not None]
                break
            skipped.append(f"checkpoint {tag} is not used: {fault}")
        progress = self._valid[0].progress if self._valid else Progress()
        self._report(progress)
        if first:
            if self._remote is not None and listed:
                self._download_run_files()  # before the warnings, which are appended to the events of the earlier run
            if self._run_files is not None:
                self._run_files.follow()
            next_step = f"resumes from step {progress.step}" if self._valid else "starts from the beginning"
            for line in skipped:
                self._warn(progress.step, f"{line}; the run {next_step}")
        return progress

    def _first_fault(self, checkpoint: Checkpoint) -> str | None:
        """Return what is wrong with a checkpoint's files, or None; each worker verifies its part of them."""
        rank, workers = self._share
        faults = (self._fault(checkpoint, name) for name in sorted(checkpoint.files)[rank::workers])
        fault: str | OSError | None
        try:
            fault = next((f for f in faults if f), None)
        except OSError as error:  # the object store does not answer, which is no reason to skip a valid checkpoint
            fault = error
        faults_of_all = from_all(fault)
        for one in faults_of_all:  # every worker raises it, so that none waits for another
            if isinstance(one, OSError):
                raise one
        return next((one for one in faults_of_all if isinstance(one, str)), None)

    def _fault(self, checkpoint: Checkpoint, name: str) -> str | None:
        file, expected = self.directory / checkpoint.tag / name, checkpoint.files[name]
        fault = expected.mismatch(file)
        if fault and self._remote is not None:
            try:
                (self._remote / STATES).download(f"{checkpoint.tag}/{name}", file)
            except FileNotFoundError:
                return f"{name} is missing in the object store"
            fault = expected.mismatch(file)
        return fault and f"{name} {fault}"

    def _load(self, engine: Engine, checkpoint: Checkpoint) -> None:
        if checkpoint.course.workers == world()[1] or not engine.sharded:
            engine.load(self.directory, checkpoint.tag)
            return
        path = self.directory / f"{_RESHARDED}{self._attempt}"
        first = self._share[0] == 0
        try:
            if first:
                engine.reshard(self.directory / checkpoint.tag, path / checkpoint.tag)
            from_all(None)  # wait until it is written
            engine.load(path, checkpoint.tag, resharded=True)
            from_all(None)  # wait until all workers have read it
        finally:
            if first:
                shutil.rmtree(path, ignore_errors=True)

    def _download_run_files(self) -> None:
        """Download the run's own files (metrics), unless the local ones belong to the checkpoint and are as long."""
        assert self._remote is not None
        written_here = bool(self._valid) and (self.directory / self._valid[0].tag / MARKER).is_file()
        for name, entry in self._remote.entries().items():
            file = self.directory.parent / name
            current = written_here and file.is_file() and file.stat().st_size >= entry.size
            if not name.startswith(f"{STATES}/") and not current:
                self._remote.download(name, file)

    def save(self, engine: Engine, progress: Progress, wait: bool = False) -> None:
        """Start to save a checkpoint, after the one before is complete; every worker must call it.

        The engine's state is copied before this method returns. `wait` completes the checkpoint now, not in a later
        `commit`.
        """
        self.commit(wait=True)
        if self._is_saved(progress):
            return
        tag = f"step-{progress.step:08d}-{self._attempt}"
        self._began = time.monotonic()
        writing = engine.save(self.directory, tag)
        if self._remote is not None:
            writing = self._uploads.submit(lambda written: self._uploaded(tag, written.result()), writing)
        self._writing = tag, progress, writing
        if wait:
            self.commit(wait=True)

    def commit(self, wait: bool = False) -> None:
        """Complete the checkpoint that is being written if all workers have written it; every worker must call it.

        Only now are earlier checkpoints deleted. If a checkpoint cannot be written, for example on a full disk, a warning is
        logged and training continues. The second such failure in a row stops the run: see `stopped`.
        """
        if self._writing is None:
            return
        tag, progress, writing = self._writing
        outcomes = from_all(writing.result() if wait or writing.done() else None)
        of_workers = [outcome for outcome in outcomes if outcome is not None]
        if len(of_workers) < len(outcomes):
            return
        self._writing = None
        own, error = writing.result(), next((w.error for w in of_workers if w.error), None)
        files = {name: file for w in of_workers for name, file in w.files.items()}
        checkpoint = Checkpoint(tag, progress, self._course, files)
        if world()[0] == 0 and error is None:
            try:
                durable.replace_json(self.directory / tag / MARKER, checkpoint.marker)
                durable.sync_directory(self.directory)  # the new checkpoint's own name, before older ones are deleted
            except OSError as failure:
                error = f"{failure.strerror} at {self.directory / tag / MARKER}"
        if error is not None:
            error = f"{error}, {shutil.disk_usage(self.directory).free} bytes free"
        error = from_first(error)
        if error is None:
            self._failures = 0
            self._report(checkpoint.progress, time.monotonic() - self._began)
            self._valid.insert(0, checkpoint)
            self._delete_old()
            self._complete_in_store(checkpoint, own, of_workers)
        else:
            self._failures += 1
            self._not_saved(checkpoint, error)

    def _report(self, progress: Progress, seconds: float | None = None) -> None:
        """Export how far the newest complete checkpoint is."""
        if world()[0] == 0:
            report(training_checkpoint_step_number=progress.step, training_checkpoint_seconds=seconds)

    def _not_saved(self, checkpoint: Checkpoint, error: str) -> None:
        """Delete a checkpoint that could not be written, and log a warning, or stop the run if it is the second in a row."""
        if self._share[0] == 0:
            shutil.rmtree(self.directory / checkpoint.tag, ignore_errors=True)
        step = checkpoint.progress.step
        failed = f"the checkpoint of step {step} was not saved: {error}"
        if self._failures > 1:
            remedy = "free disk space and run the same command again, which resumes from the newest complete checkpoint"
            self.stopped = f"output={self.directory.parent}: {failed}, and the one before was not either; {remedy}"
        elif world()[0] == 0:
            self._warn(step, f"{failed}; training continues with the earlier checkpoints")

    def _uploaded(self, tag: str, written: Written) -> Written:
        """Upload what this worker wrote of a checkpoint, and return it with what went wrong."""
        assert self._remote is not None
        try:
            for name in written.files:
                self._remote.upload(self.directory / tag / name, f"{STATES}/{tag}/{name}")
        except (OSError, ArrowException) as error:
            return replace(written, not_uploaded=in_one_line(error))
        return replace(written, not_uploaded=None)

    def _complete_in_store(self, checkpoint: Checkpoint, own: Written, of_workers: Sequence[Written]) -> str | None:
        """Write the marker in the object store once all files are there; log and return what went wrong, on every worker."""
        if self._remote is None:
            return None
        fault = next((w.not_uploaded for w in of_workers if w.not_uploaded), None)
        if self._run_files is not None and fault is None:
            folder = self._remote / STATES
            try:
                self._run_files.upload()
                folder.write(f"{checkpoint.tag}/{MARKER}", json.dumps(checkpoint.marker))
                self._delete_old_in(folder, checkpoint)
            except (OSError, ArrowException) as error:
                fault = in_one_line(error)
        if fault := from_first(fault):
            self._not_stored.append((checkpoint, own))
            if world()[0] == 0:
                failed = f"checkpoint {checkpoint.tag} was not uploaded to {self._remote}: {fault}"
                self._warn(checkpoint.progress.step, f"{failed}; it is in {self.directory}, and training continues")
        return fault

    def _delete_old_in(self, folder: Folder, newest: Checkpoint) -> None:
        """Delete the store's checkpoints before this one that are not kept. Later ones belong to a run that is ahead."""
        keep = {checkpoint.tag for checkpoint in self._valid}
        tags = {name: name.split("/")[0] for name in folder.entries() if name.startswith("step-")}
        old = [n for n, tag in tags.items() if tag not in keep and step_of(tag) <= newest.progress.step]
        for name in sorted(old, key=lambda name: not name.endswith(MARKER)):  # markers first: see MARKER
            folder.delete(name)

    def _is_saved(self, progress: Progress) -> bool:
        return bool(self._valid) and self._valid[0].progress.step == progress.step

    def _delete_old(self) -> None:
        """Keep the newest checkpoints and the best, and no broken one."""
        keep = {c.tag for c in self._valid[:KEEP_LAST] + self._by_score()[:1]}  # the best is exported
        self._valid = [c for c in self._valid if c.tag in keep]
        if self._share[0] == 0:
            for old in self.directory.glob("step-*"):
                if old.name not in keep:
                    (old / MARKER).unlink(missing_ok=True)  # first, so that a half-deleted checkpoint is incomplete
                    shutil.rmtree(old, ignore_errors=True)

    def _warn(self, step: int, message: str) -> None:
        try:
            append_event(self.directory.parent, Event(step, "state", "warn", message))
        except OSError:  # no byte is left on the disk
            say(message)

    def require_saved(self, progress: Progress) -> None:
        """Check that the last checkpoint of the run was saved, and repeat failed uploads; every worker must call it.

        Raises:
            InputError: it was not, so that there is nothing to export; or an upload failed again, on every worker.
        """
        if not self._is_saved(progress):
            remedy = "free disk space and run the same command again, which resumes from the checkpoint before"
            raise InputError.of("output", self.directory.parent, "the last checkpoint could not be saved", remedy)
        failed, self._not_stored = self._not_stored, []
        for checkpoint, own in failed:
            if checkpoint not in self._valid:
                continue
            own = self._uploaded(checkpoint.tag, own)
            if fault := self._complete_in_store(checkpoint, own, from_all(own)):
                lost = f"checkpoint {checkpoint.tag} was not uploaded: {fault}"
                kept = f"nothing was exported, and each node keeps its files in {self.directory}"
                remedy = f"{kept}; check the object store and run the same command again"
                raise InputError.of("output", self._remote, lost, remedy)

    def result(self) -> tuple[Path, Progress]:
        """Return directory and progress of the checkpoint to export; one worker calls it.

        That is the checkpoint with the highest score, the newest of equals; a damaged one is skipped with a warning. Without
        scores it is the last one. InputError if all of these are damaged.
        """
        for checkpoint in self._by_score() or self._valid[:1]:
            fault = next((f for f in (self._fault(checkpoint, name) for name in checkpoint.files) if f), None)
            if fault is None:
                return self.directory / checkpoint.tag, checkpoint.progress
            self._warn(checkpoint.progress.step, f"checkpoint {checkpoint.tag} is not exported: {fault}")
        place = self._remote or self.directory.parent
        raise InputError.of("output", place, "no undamaged checkpoint can be exported", "check the disk and run again")

    def stop_uploads(self) -> None:
        """Stop uploading the run's own files while they grow."""
        if self._run_files is not None:
            self._run_files.stop()

    def clean_up(self) -> None:
        """Delete the run's directory of this node, if the output is in an object store; the node's first worker does."""
        if self._remote is not None and self._share[0] == 0:
            shutil.rmtree(self.directory.parent, ignore_errors=True)

    def upload_run_files(self) -> None:
        """Upload the run's own files that have changed, if the output is in an object store."""
        if self._run_files is not None:
            self._run_files.upload()

    def _by_score(self) -> list[Checkpoint]:
        """Return the valid checkpoints with a score, best first, the newer of equals first."""
        scored = [(c.progress.score, c.progress.step, c) for c in self._valid if c.progress.score is not None]
        return [checkpoint for *_, checkpoint in sorted(scored, key=lambda s: s[:2], reverse=True)]
