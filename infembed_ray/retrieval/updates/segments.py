"""Where the segments of a write-ahead log lie: numbered files of a directory, or numbered objects of a store.

Both give a number to one writer only: a directory by a hard link, which fails if the name exists, a store by a conditional
put. A visible segment is whole and durable, and it never changes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from obstore.exceptions import BaseError
from pyarrow import ArrowException

from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder

_NAME = re.compile(r"(\d{12})\.arrow")


def segment_name(sequence: int) -> str:
    """File name of a segment."""
    return f"{sequence:012d}.arrow"


class Segments(ABC):
    """Numbered segments. All methods raise OSError if the directory or the store fails."""

    def numbers(self) -> set[int]:
        """List the numbers in use."""
        return {int(found[1]) for found in map(_NAME.fullmatch, self._names()) if found}

    def exists(self, sequence: int) -> bool:
        """Return whether there is a segment with this number; one call of the file system or the store."""
        return self.read(sequence, 0, 1) is not None

    @abstractmethod
    def read(self, sequence: int, start: int, length: int | None) -> bytes | None:
        """Return up to `length` bytes (None: all) of a segment from `start` on; None if there is no such segment."""

    @abstractmethod
    def add(self, content: bytes, sequence: int) -> int:
        """Store a segment durably under the first free number from `sequence` on; return the number."""

    @abstractmethod
    def delete(self, sequence: int) -> None:
        """Delete a segment, which need not exist."""

    @abstractmethod
    def _names(self) -> Iterable[str]: ...


class LocalSegments(Segments):
    """Segments in a directory, which the first `add` creates."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory_synced = False

    def _names(self) -> Iterable[str]:
        try:
            return os.listdir(self._directory)
        except FileNotFoundError:
            return ()

    def read(self, sequence: int, start: int, length: int | None) -> bytes | None:
        try:
            with (self._directory / segment_name(sequence)).open("rb") as file:
                file.seek(start)
                return file.read() if length is None else file.read(length)
        except FileNotFoundError:
            return None

    def delete(self, sequence: int) -> None:
        (self._directory / segment_name(sequence)).unlink(missing_ok=True)

    def add(self, content: bytes, sequence: int) -> int:
        partial = self._directory / f".{secrets.token_hex(8)}.partial"
        try:
            if not self._directory_synced:
                self._directory.mkdir(parents=True, exist_ok=True)
                for level in self._directory.parents[:2]:  # another writer may just have created them
                    durable.sync_directory(level)
                self._directory_synced = True
            with partial.open("xb") as stream:
                stream.write(content)
                durable.sync(stream)
            sequence = self._link(partial, sequence)
            durable.sync_directory(self._directory)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        return sequence

    def _link(self, partial: Path, sequence: int) -> int:
        while True:
            file = self._directory / segment_name(sequence)
            try:
                os.link(partial, file)
                return sequence
            except FileExistsError:
                # NFS repeats a request whose reply was lost, then reports our own link as existing.
                if os.path.samefile(partial, file):
                    return sequence
                sequence += 1


class StoredSegments(Segments):
    """Segments in a folder of an object store."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def _names(self) -> Iterable[str]:
        with _os_errors():
            return list(self._folder.entries())

    def read(self, sequence: int, start: int, length: int | None) -> bytes | None:
        with _os_errors():
            return self._folder.read_range(segment_name(sequence), start, length)

    def add(self, content: bytes, sequence: int) -> int:
        """As `Segments.add`. Equal segments of two writers may become one: making the same changes twice has no effect."""
        with _os_errors():
            while self._folder.create(segment_name(sequence), content) is None:
                sequence += 1
        return sequence

    def delete(self, sequence: int) -> None:
        with _os_errors(), contextlib.suppress(FileNotFoundError):
            self._folder.delete(segment_name(sequence))


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Convert other errors of a store's client to OSError."""
    try:
        yield
    except (ArrowException, BaseError) as error:
        raise OSError(" ".join(str(error).split())[:240]) from error
