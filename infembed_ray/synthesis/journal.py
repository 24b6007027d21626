"""The response journal: every completion is on disk before it is used, and is looked up before a request is sent.

A journal is a directory of JSONL segments, one per writing process, so any number of processes may share it; or one
`.jsonl` file, to read from only. A line is one completion. In memory is where each line lies, never what it says.

What a crash can lose: a line is written as soon as its completion arrives, and synced to the disk before anybody uses
it. Killing the process loses only answers it had not read yet; losing the machine, also those of the last sync
(milliseconds), none of which was used. A line cut short by a crash is left out with a warning.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

from infembed_ray.synthesis.chat import Completion, Request, RunFailure


@dataclass
class _File:
    path: Path
    indexed: int = 0
    """Bytes from its beginning that are in the index."""


class Journal:
    """A journal as one process sees it.

    Args:
        directory: read, and written to: the first append adds a segment of this process. Need not exist before.
        replay: finished journals, directories or files, that are only read.
    """

    def __init__(self, directory: Path, replay: Sequence[Path] = ()) -> None:
        self._directory = directory
        self._sources = [*replay, directory]
        self._files: list[_File] = []
        self._numbers: dict[Path, int] = {}
        self._index: dict[bytes, tuple[int, int, int]] = {}  # key -> file number, offset, bytes
        self._segment: BinaryIO | None = None
        self._segment_number = -1
        self._written = 0  # bytes of the segment
        self._synced = 0  # those of them that are on the disk
        self._syncing: asyncio.Task[None] | None = None
        self.refresh()
        for file in self._files:
            if file.indexed < file.path.stat().st_size:
                warnings.warn(f"journal {file.path}: its last line is cut short, left out", stacklevel=2)

    def __len__(self) -> int:
        """Number of completions."""
        return len(self._index)

    def refresh(self) -> None:
        """Index what other processes have appended since."""
        for source in self._sources:
            for path in [source] if source.is_file() else sorted(source.glob("*.jsonl")):
                number = self._number(path)
                if number != self._segment_number:
                    self._scan(number)

    def get(self, key: str) -> Completion | None:
        """The completion of a request (`Request.key`), read from disk and marked as replayed; None if not here."""
        where = self._index.get(bytes.fromhex(key))
        if where is None:
            return None
        number, offset, length = where
        with self._files[number].path.open("rb") as stream:
            stream.seek(offset)
            entry = decode(stream.read(length))
        return entry[1] if entry else None

    async def append(self, request: Request, completion: Completion) -> None:
        """Write one completion; returns when it is on the disk. One sync serves all appends waiting at that moment.

        Raises:
            RunFailure: it cannot be written (a full disk).
        """
        line = encode(request, completion)
        try:
            segment = self._segment or self._open_segment()
            segment.write(line)
            segment.flush()
            offset, end = self._written, self._written + len(line)
            self._written = end
            while self._synced < end:
                if self._syncing is None:
                    self._syncing = asyncio.create_task(self._sync(segment))
                await asyncio.shield(self._syncing)
        except OSError as error:
            raise RunFailure(f"journal={self._directory}: cannot be written ({error.strerror})") from error
        self._index[bytes.fromhex(request.key)] = (self._segment_number, offset, len(line))

    def close(self) -> None:
        """Close the segment. What was appended is on the disk already."""
        if self._segment is not None:
            self._segment.close()

    def _number(self, path: Path) -> int:
        if path not in self._numbers:
            self._numbers[path] = len(self._files)
            self._files.append(_File(path))
        return self._numbers[path]

    def _scan(self, number: int) -> None:
        file = self._files[number]
        damaged = 0
        with file.path.open("rb") as stream:
            stream.seek(file.indexed)
            for line in stream:
                if not line.endswith(b"\n"):
                    break  # torn by a crash, or being written right now: a later refresh looks again
                entry = decode(line)
                if entry is None:
                    damaged += 1
                else:
                    self._index.setdefault(bytes.fromhex(entry[0]), (number, file.indexed, len(line)))
                file.indexed += len(line)
        if damaged:
            warnings.warn(f"journal {file.path}: {damaged} damaged lines, left out", stacklevel=3)

    def _open_segment(self) -> BinaryIO:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
        self._segment = path.open("xb")
        self._segment_number = self._number(path)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)  # else a crash of the machine may lose the new file's name
        finally:
            os.close(directory)
        return self._segment

    async def _sync(self, segment: BinaryIO) -> None:
        try:
            written = self._written
            await asyncio.to_thread(os.fsync, segment.fileno())
            self._synced = written
        finally:
            self._syncing = None


def encode(request: Request, completion: Completion, created: datetime | None = None) -> bytes:
    """The journal's line of a completion that arrived at `created` (default: now).

    Only the key decides what it answers; prompt, step and row are there for people.
    """
    entry = {
        "key": request.key,
        "model": request.model,
        "prompt": request.prompt,
        "step": request.step,
        "row": request.row,
        "text": completion.text,
        "refusal": completion.refusal,
        "finish_reason": completion.finish_reason,
        "snapshot": completion.model,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "created": (created or datetime.now(timezone.utc)).isoformat(timespec="milliseconds"),
    }
    return json.dumps(entry, ensure_ascii=False).encode() + b"\n"


def decode(line: bytes) -> tuple[str, Completion] | None:
    """Key and completion of a journal's line; None if the line is damaged."""
    try:
        entry = json.loads(line)
        bytes.fromhex(entry["key"])
        return entry["key"], Completion(
            text=entry["text"],
            refusal=entry["refusal"],
            finish_reason=entry["finish_reason"],
            model=entry["snapshot"],
            prompt_tokens=entry["prompt_tokens"],
            completion_tokens=entry["completion_tokens"],
            replayed=True,
        )
    except (ValueError, KeyError, TypeError):
        return None
