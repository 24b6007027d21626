"""Journals in object stores.

A process appends to a segment in its node's scratch directory; a thread uploads what was appended as immutable objects
`SEGMENT.OFFSET.jsonl`. The next run uploads what a killed process left. Readers copy objects to their node and index them.
"""

import contextlib
import hashlib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pyarrow import ArrowException

from infembed_ray.llm.client import DRAIN_S
from infembed_ray.llm.journal import Journal, has_writer, lock_ended, may_hold, segments
from infembed_ray.llm.ledger import LEASE_S
from infembed_ray.progress import say
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder, convert_errors, scratch
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import resolve_input

COPIES = "objects"
"""Directory of copies of the journal's objects, beside the segments that this node's processes write."""

UPLOAD_BYTES = 32 << 20
"""Bytes of answers that are uploaded before their time."""
_DOWNLOADS = 8
_POLL_S = 0.2
_LONGEST_PAUSE_S = 10.0
_OBJECT = re.compile(r"(?P<segment>.+)\.(?P<offset>\d{15})\.jsonl")
_StoreError = (OSError, ArrowException)


def open_journal(
    place: Place,
    replay: Sequence[str] = (),
    partition: str | None = None,
    upload_s: float = 60.0,
    warn: Callable[[str], object] = say,
) -> Journal:
    """Open a journal for a process, and finished ones (`replay`) that are only read; InputError if a store fails.

    Args:
        partition: see `Journal`.
        upload_s: seconds between two uploads, if the journal is in an object store; `warn` gets a line if one fails.
    """
    finished = [resolve_input(each, "replay").absolute() for each in replay]
    if isinstance(place, Path):
        return Journal(place, finished, partition)
    return StoredJournal(place, finished, partition, upload_s, warn)


class StoredJournal(Journal):
    """A process's view of a journal in an object store; see `open_journal`. A thread uploads what the process appends."""

    def __init__(
        self,
        folder: Folder,
        replay: Sequence[Path],
        partition: str | None,
        upload_s: float,
        warn: Callable[[str], object],
    ) -> None:
        self._folder, self._upload_s, self._warn = folder, upload_s, warn
        self._uploads: threading.Thread | None = None
        self._stopped = threading.Event()
        directory = copy_objects(folder, partition)
        super().__init__(directory, [*replay, directory / COPIES], partition)

    def open(self) -> BinaryIO:
        """See `Journal.open`; from then on, answers are uploaded."""
        segment = super().open()
        if self._uploads is None:
            path = self._files[self._segment_number].path
            self._uploads = threading.Thread(target=self._upload_appended, args=(path,), name="uploads", daemon=True)
            self._uploads.start()
        return segment

    def close(self) -> None:
        """Close the segment and upload the rest of it; InputError if the object store failed. The segment stays for the next run on this node."""
        uploads = self._uploads
        self.stop_uploads()
        super().close()
        if uploads is not None:
            upload_leftovers(self._folder)

    def stop_uploads(self) -> None:
        """End the thread; what is not uploaded yet stays in the segment."""
        if self._uploads is not None:
            self._stopped.set()
            self._uploads.join()
            self._uploads = None
            self._stopped.clear()

    def _upload_appended(self, path: Path) -> None:
        end, uploaded = 0, time.monotonic()
        with path.open("rb") as segment:
            while not self._stopped.wait(_POLL_S):
                due = time.monotonic() - uploaded >= self._upload_s
                waiting = os.fstat(segment.fileno()).st_size - end
                if (due or waiting >= UPLOAD_BYTES) and (lines := _lines(segment, end)):
                    end, uploaded = self._upload(lines, path, end), time.monotonic()

    def _upload(self, lines: bytes, path: Path, start: int) -> int:
        """Upload lines, however often it takes; return the position after them.

        The same lines each time: a failed request may have written the object, and readers have copied it.
        """
        for attempt in itertools.count():
            try:
                return _upload(lines, path, start, self._folder)
            except _StoreError as error:
                if not attempt:
                    reason = " ".join(str(error).split())[:240]
                    fault = "uploads fail and are repeated, the node keeps the answers"
                    self._warn(f"journal={self._folder}: {fault}: {reason}")
                if self._stopped.wait(min(self._upload_s, _LONGEST_PAUSE_S)):
                    break
        return start


def directory_of(folder: Folder) -> Path:
    """Return this node's directory for a journal in an object store."""
    return scratch() / "journals" / hashlib.sha256(folder.uri.encode()).hexdigest()[:16]


def copy_objects(folder: Folder, partition: str | None = None) -> Path:
    """Copy the objects that may hold a partition's entries to this node, and return the node's directory.

    Copies of objects that are gone are removed. InputError if the object store failed.
    """
    directory = directory_of(folder)
    copies = directory / COPIES
    copies.mkdir(parents=True, exist_ok=True)
    lock = durable.exclusive_lock(copies / ".lock", wait=True)  # another process of this node may copy, too
    with convert_errors(str(folder), "journal"), lock:
        stored = {n: entry.size for n, entry in folder.entries().items() if n.endswith(".jsonl") and "/" not in n}
        here = {path.name: path for path in copies.glob("*.jsonl")}
        whole = {name for name, path in here.items() if path.stat().st_size == stored.get(name)}
        missing = [name for name in stored.keys() - whole if may_hold(name, partition)]
        with ThreadPoolExecutor(_DOWNLOADS) as threads:
            list(threads.map(partial(_download, folder, copies), missing, (stored[name] for name in missing)))
        for name in here.keys() - stored.keys():
            here[name].unlink()
    return directory


def _download(folder: Folder, copies: Path, name: str, size: int) -> None:
    file = copies / name
    folder.download(name, file)
    if file.stat().st_size != size:
        file.unlink()
        raise OSError(f"{name} was cut short on its way; run again")


def sources(place: Place) -> list[Path]:
    """Return the directories of this node with all segments of a journal, after copying those in an object store.

    Raises:
        InputError: the object store failed.
    """
    if isinstance(place, Path):
        return [place]
    directory = copy_objects(place)
    return [directory / COPIES, directory]


def upload_leftovers(folder: Folder) -> None:
    """Upload the segments that ended processes of this node left, and remove them; InputError if the store failed: they stay."""
    with convert_errors(str(folder), "journal"), contextlib.ExitStack() as locks:
        ended = {path: lock_ended(path, locks) for path in segments([directory_of(folder)])}
        left = {path: segment for path, segment in ended.items() if segment is not None}
        if not left:
            return
        # Listed only now, since a writer uploads until it ends.
        ends: dict[str, int] = {}
        for name, entry in folder.entries().items():
            if uploaded := _OBJECT.fullmatch(name):
                ends[uploaded["segment"]] = max(ends.get(uploaded["segment"], 0), int(uploaded["offset"]) + entry.size)
        for path, segment in left.items():
            end = ends.get(path.stem, 0)
            while lines := _lines(segment, end):
                end = _upload(lines, path, end, folder)
            path.unlink()


def wait_for_writers(directory: Path, partition: str | None = None) -> None:
    """Wait for actors of a killed driver, which journal their answers in flight (see `client.DriverWatch`)."""
    deadline = time.monotonic() + DRAIN_S + LEASE_S
    while any(map(has_writer, segments([directory], partition))):
        if time.monotonic() > deadline:
            say(f"synthesize: another run also writes to journal={directory}; both may send the same requests")
            return
        time.sleep(0.1)


def settle(folder: Folder, partition: str | None = None) -> None:
    """Wait for this node's writers of a partition to end, and upload the segments of ended writers; InputError if the object store failed."""
    wait_for_writers(directory_of(folder), partition)
    upload_leftovers(folder)


def _lines(segment: BinaryIO, start: int) -> bytes:
    """Return a segment's complete lines from a position. The last one may be cut short by a crash, or being written."""
    segment.seek(start)
    lines = segment.read(UPLOAD_BYTES) + segment.readline()
    return lines[: lines.rfind(b"\n") + 1]


def _upload(lines: bytes, segment: Path, start: int, folder: Folder) -> int:
    """Upload the lines at a position of a segment; return the position after them."""
    with folder.open_output(f"{segment.stem}.{start:015d}.jsonl") as stream:
        stream.write(lines)
    return start + len(lines)
