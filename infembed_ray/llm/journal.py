"""The response journal: a write-ahead log of completions, written before use and read before a request is sent.

A journal is a directory of JSONL segments, one per writing process, which holds a lock (flock) on it. A line is one
completion with its checksum, synced before it is used; one cut short by a crash is skipped. Memory holds places only.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import math
import os
import re
import socket
import uuid
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from infembed_ray.errors import InputError
from infembed_ray.llm.chat import Complete, Completion, Request, RunFailure, Unjournaled
from infembed_ray.storage import durable

_JSON = json.JSONEncoder(ensure_ascii=False, check_circular=False)
SYNC_EVERY_S = 0.025
"""Least seconds between two syncs: a sync costs about as much CPU as a request, however many lines share it."""

_OFFSET = 1 << 44  # more than the bytes of a segment
_WRITTEN = re.compile(rb'(?P<said>\{"key": "(?P<key>[0-9a-f]{64})", .*), "crc32": "(?P<crc32>[0-9a-f]{8})"\}\n')
_PARTITION = re.compile(r"-\d+-[0-9a-f]{8}-(\d+of(\d+))\.(?:\d{15}\.)?jsonl$")  # as `new_segment` names them


@dataclass
class _File:
    path: Path
    indexed: int = 0
    """Bytes from its start that are in the index."""


class Journal:
    """One process's view of a journal.

    Args:
        directory: read, and written to: the first append adds this process's segment. It need not exist.
        replay: finished journals (directories or files) that are only read.
        partition: of the rows of this process, for example `3of8`: segments of the other 7 are not read. None reads all.
    """

    def __init__(self, directory: Path, replay: Sequence[Path] = (), partition: str | None = None) -> None:
        self._directory = directory
        self._partition = partition
        self._sources = [*replay, directory]
        self._files: list[_File] = []
        self._numbers: dict[Path, int] = {}
        self._index: dict[int, int] = {}
        """`short` of a key -> number of its file * _OFFSET + its offset there: two integers, since there are millions."""
        self._segment: BinaryIO | None = None
        self._segment_number = -1
        self._written = 0  # bytes of the segment
        self._synced = 0  # bytes of the segment that are on disk
        self._syncing: asyncio.Task[None] | None = None
        self._next_sync = -math.inf  # earliest time of the next sync, by the loop's clock
        self.refresh()
        for file in self._files:
            with contextlib.suppress(FileNotFoundError):
                if file.indexed < file.path.stat().st_size:
                    warnings.warn(f"journal {file.path}: skipped its last line, which is cut short", stacklevel=2)

    def __len__(self) -> int:
        """Return the number of completions."""
        return len(self._index)

    def refresh(self) -> None:
        """Index what other processes have appended since the last call."""
        for path in segments(self._sources, self._partition):
            number = self._number(path)
            if number != self._segment_number:
                self._scan(number)

    def get(self, *keys: str) -> Completion | None:
        """Return the completion of the first of these keys that is in the journal, marked as replayed; None if none is.

        Raises:
            RunFailure: the journal cannot be read (a failing disk, too many open files).
        """
        return next(filter(None, map(self._get, keys)), None)

    def _get(self, key: str) -> Completion | None:
        place = self._index.get(short(key))
        if place is None:
            return None
        number, offset = divmod(place, _OFFSET)
        try:
            with self._files[number].path.open("rb") as stream:
                stream.seek(offset)
                entry = decode(stream.readline())
        except (OSError, RuntimeError) as error:
            raise self._failure("read", error) from error
        return entry[1] if entry and entry[0] == key else None

    async def append(self, request: Request, completion: Completion) -> None:
        """Write one completion; return when it is on disk. Concurrent appends share a sync.

        Raises:
            RunFailure: the journal cannot be written (a full disk, no thread for the sync).
        """
        line = encode(request, completion)
        try:
            segment = self.open()
            segment.write(line)
            segment.flush()
            offset, end = self._written, self._written + len(line)
            self._written = end
            while self._synced < end:
                if self._syncing is None:
                    self._syncing = asyncio.create_task(self._sync(segment))
                await asyncio.shield(self._syncing)
        except (OSError, RuntimeError) as error:
            raise self._failure("written", error) from error
        self._add(request.journal_key(completion), self._segment_number, offset)

    def _add(self, key: str, file: int, offset: int) -> None:
        """Index an entry; of equal keys, the first counts."""
        self._index.setdefault(short(key), file * _OFFSET + offset)

    def open(self) -> BinaryIO:
        """Return this process's segment; from then on other processes see that it writes to the journal."""
        if self._segment is None:
            self._segment, path = new_segment(self._directory, self._partition)
            self._segment_number = self._number(path)
        return self._segment

    def close(self) -> None:
        """Close the segment, whose lines are on disk already."""
        if self._segment is not None:
            self._segment.close()
            self._segment, self._segment_number = None, -1

    def _failure(self, use: str, error: OSError | RuntimeError) -> RunFailure:
        return RunFailure(f"journal={self._directory}: cannot be {use} ({getattr(error, 'strerror', None) or error})")

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
                    break  # cut short by a crash, or being written: a later refresh looks again
                key = _key_of(line)
                if key is None:
                    damaged += 1
                else:
                    self._add(key, number, file.indexed)
                file.indexed += len(line)
        if damaged:
            warnings.warn(f"journal {file.path}: skipped {damaged} damaged lines", stacklevel=3)

    async def _sync(self, segment: BinaryIO) -> None:
        try:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(self._next_sync - loop.time())
            self._next_sync = loop.time() + SYNC_EVERY_S
            written = self._written
            await loop.run_in_executor(None, os.fsync, segment.fileno())
            if not os.fstat(segment.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "its segment was removed while in use")
            self._synced = written
        finally:
            self._syncing = None


def replaying(journal: Journal) -> Complete:
    """Return a `Complete` that only reads the journal and raises Unjournaled for any other request."""

    async def complete(request: Request) -> Completion:
        replayed = journal.get(*request.keys)
        if replayed is None:
            raise Unjournaled(request)
        return replayed

    return complete


def may_hold(name: str, partition: str | None) -> bool:
    """Return whether a journal's file may hold entries of a partition."""
    named = _PARTITION.search(name)
    return named is None or partition is None or named[1] == partition or named[2] != partition.partition("of")[2]


def segments(sources: Sequence[Path], partition: str | None = None) -> Iterator[Path]:
    """Yield the files of journals (directories or files) that may hold entries of a partition.

    If a key occurs in several files, the first one counts.
    """
    for source in sources:
        files = [source] if source.is_file() else sorted(source.glob("*.jsonl"))
        yield from (file for file in files if may_hold(file.name, partition))


def has_writer(segment: Path) -> bool:
    """Return whether a living process writes to this segment; False on a file system without locks."""
    try:
        with segment.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def lock_ended(path: Path, locks: contextlib.ExitStack) -> BinaryIO | None:
    """Open and lock a segment, if it has no living writer and still exists; InputError if the file system has no locks."""
    try:
        stream = locks.enter_context(path.open("r+b"))
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return None
    except OSError as error:
        missing = f"its file system has no locks ({error.strerror})"
        remedy = "copy the journal to one that has them while no run uses it"
        fault = f"{missing}, which tell the segments of living processes from others"
        raise InputError.of("journal", path.parent, fault, remedy) from error
    return stream if os.fstat(stream.fileno()).st_nlink else None


def new_segment(directory: Path, partition: str | None = None) -> tuple[BinaryIO, Path]:
    """Create an empty segment, locked until it is closed, whose name survives a crash of the machine."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    path = directory / f"{name}-{partition}.jsonl" if partition else directory / f"{name}.jsonl"
    unlocked = path.with_suffix(".new")
    segment = unlocked.open("xb")
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unlocked.rename(path)  # named as a segment only now, so a living segment is never seen without its lock
    durable.sync_directory(directory)
    return segment, path


def encode(request: Request, completion: Completion, created: datetime | None = None) -> bytes:
    """Return the journal line of a completion that arrived at `created` (default: now).

    Only the key is used for lookups; prompt, step and row are for human readers.
    """
    entry: dict[str, Any] = {
        "key": request.journal_key(completion),
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
    if completion.batched:
        entry["batched"] = True
    if completion.cached_tokens:
        entry["cached_tokens"] = completion.cached_tokens
    if completion.usd is not None:  # 0.0 is a price, too
        entry["usd"] = completion.usd
    said = _JSON.encode(entry).encode().removesuffix(b"}")
    return said + f', "crc32": "{zlib.crc32(said):08x}"}}\n'.encode()


def _key_of(line: bytes) -> str | None:
    """Return the key of a line; None if the line is damaged."""
    written = _WRITTEN.fullmatch(line)
    intact = written is not None and int(written["crc32"], 16) == zlib.crc32(written["said"])
    return written["key"].decode() if written is not None and intact else None


def decode(line: bytes) -> tuple[str, Completion] | None:
    """Return key and completion of a line; None if the line is damaged."""
    key = _key_of(line)
    if key is None:
        return None
    entry = json.loads(line)
    return key, Completion(
        text=entry["text"],
        refusal=entry["refusal"],
        finish_reason=entry["finish_reason"],
        model=entry["snapshot"],
        prompt_tokens=entry["prompt_tokens"],
        completion_tokens=entry["completion_tokens"],
        replayed=True,
        batched=entry.get("batched", False),
        cached_tokens=entry.get("cached_tokens", 0),
        usd=entry.get("usd"),
    )


def short(key: str) -> int:
    """Return the first 8 bytes of a key."""
    return int(key[:16], 16)
