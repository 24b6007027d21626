"""Upload of a training checkpoint to an object store, in the background, while training continues."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from pyarrow import ArrowException

from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.steps import STATES
from infembed_ray.training.checkpoints.checkpoint import MARKER, Checkpoint, is_tag, step_of
from infembed_ray.training.collectives import from_all, from_first
from infembed_ray.training.node_files import RunFiles

_POLL_S = 0.5
_TIMEOUT_S = 1800.0
"""Seconds that worker 0 waits for the files of the others, as long as a collective of torch."""


class Upload:
    """One worker's part of the upload of a checkpoint; the upload starts at once.

    Args:
        remote: Output of the run in the object store.
        directory: Local directory of the checkpoints.
        checkpoint: Checkpoint to upload.
        own_files: Files that this worker wrote.
        run_files: On worker 0, the run's own files; None on the other workers. Worker 0 waits for the files of all
            workers, uploads the run's own files, then the marker, and deletes older checkpoints.
        keep: Tags of the checkpoints to keep in the store.
    """

    def __init__(
        self,
        remote: Folder,
        directory: Path,
        checkpoint: Checkpoint,
        own_files: list[str],
        run_files: RunFiles | None,
        keep: set[str],
    ) -> None:
        self.checkpoint = checkpoint
        self._remote = remote
        self._directory = directory
        self._own_files = own_files
        self._run_files = run_files
        self._keep = keep
        self._cancelled = threading.Event()
        self._start()

    def _start(self) -> None:
        self._cancelled.clear()
        self._fault: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)  # so that a worker can exit during an upload
        self._thread.start()

    def settle(self) -> str | None:
        """Wait for all workers' uploads; return what went wrong on any, or None; every worker must call it."""
        first = self._run_files is not None
        fault = next((fault for fault in from_all(None if first else self._own_fault()) if fault), None)
        if fault:  # the files for which worker 0 waits will not arrive
            self._cancelled.set()
        return from_first(fault or (self._own_fault() if first else None))

    def repeat(self) -> str | None:
        """Upload the checkpoint once more and settle; every worker must call it."""
        self._thread.join()  # one that was cancelled
        self._start()
        return self.settle()

    def _own_fault(self) -> str | None:
        self._thread.join()
        return self._fault

    def _run(self) -> None:
        try:
            folder = self._remote / STATES
            tag = self.checkpoint.tag
            for name in self._own_files:
                folder.upload(self._directory / tag / name, f"{tag}/{name}")
            if self._run_files is not None and self._wait_for_files(folder / tag):
                self._run_files.upload()
                folder.write(f"{tag}/{MARKER}", json.dumps(self.checkpoint.marker))
                self._delete_old(folder, self._keep)
        except (OSError, ArrowException) as error:
            self._fault = " ".join(str(error).split())[:300]

    def _wait_for_files(self, folder: Folder) -> bool:
        """Wait until the files of all workers are in the store; return False if the upload was cancelled."""
        expected = {name: file.size for name, file in self.checkpoint.files.items()}
        deadline = time.monotonic() + _TIMEOUT_S
        while {name: entry.size for name, entry in folder.entries().items() if name in expected} != expected:
            if self._cancelled.wait(_POLL_S):
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"the files of all workers were not there after {_TIMEOUT_S} s")
        return True

    def _delete_old(self, folder: Folder, keep: set[str]) -> None:
        """Delete checkpoints up to this one that are not to be kept. Later ones belong to a run that is ahead."""
        tags = {name: name.split("/")[0] for name in folder.entries() if is_tag(name)}
        old = [n for n, tag in tags.items() if tag not in keep and step_of(tag) <= self.checkpoint.progress.step]
        for name in sorted(old, key=lambda name: not name.endswith(MARKER)):  # markers first: see MARKER
            folder.delete(name)
