"""Block checksums of the files of an index: blocks are read, verified and copied in parallel and out of order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from infembed_ray.errors import InputError
from infembed_ray.storage import durable

BLOCK = 16 << 20
"""Bytes of a block, which is also one ranged read of an object."""
THREADS = 8
"""Blocks read at once. They are also hashed at once: hashlib releases the interpreter's lock."""
_DIGITS = 16
REMEDY = "restore it or build the index again"

T = TypeVar("T")


@dataclass(frozen=True)
class FileChecksums:
    """Checksums of a file.

    Attributes:
        blocks: first 16 hex digits of the SHA-256 of each block, joined.
    """

    size: int
    blocks: str

    @classmethod
    def measure(cls, path: Path) -> FileChecksums:
        """Read a file and compute its checksums."""
        with pa.OSFile(str(path)) as file:
            return cls(file.size(), "".join(_map_blocks(file.size(), lambda start: _digest(_read(file, start)))))

    def require_size(self, size: int, place: str) -> None:
        """Raise InputError unless the file at `place` has this size."""
        if size != self.size:
            raise InputError(f"{place} is corrupted ({size} bytes instead of {self.size}); {REMEDY}")

    def verify(self, file: pa.NativeFile, place: str) -> None:
        """Read an open file and compare its size and checksums.

        Raises:
            InputError: they differ; the message names `place`.
        """
        self.require_size(file.size(), place)
        _map_blocks(self.size, lambda start: self._require(_read(file, start), start, place))

    def copy(self, source: pa.NativeFile, path: Path, place: str) -> None:
        """Copy an open file to `path` and verify it while its bytes pass through; `path` appears whole or not at all.

        An interrupted copy leaves `NAME.partial`; blocks of it with the right checksum are not read again.

        Raises:
            InputError: the file is damaged; the message names `place`.
            OSError: the disk is full.
        """
        self.require_size(source.size(), place)
        partial = path.with_name(f"{path.name}.partial")
        resumed = partial.is_file()
        with partial.open("r+b" if resumed else "w+b") as copy:
            copy.truncate(self.size)

            def copy_block(start: int) -> None:
                if not (resumed and _digest(os.pread(copy.fileno(), BLOCK, start)) == self._wanted(start)):
                    block = _read(source, start)
                    self._require(block, start, place)
                    _write(copy.fileno(), block, start)

            _map_blocks(self.size, copy_block)
            durable.sync(copy)
        partial.replace(path)

    def _require(self, block: bytes, start: int, place: str) -> None:
        if _digest(block) != self._wanted(start):
            raise InputError(
                f"{place} is corrupted (the checksum of the block at byte {start} differs from the manifest); {REMEDY}"
            )

    def _wanted(self, start: int) -> str:
        return self.blocks[start // BLOCK * _DIGITS :][:_DIGITS]


def _map_blocks(size: int, function: Callable[[int], T]) -> list[T]:
    """Call a function with the first byte of each block of a file; return the results in the order of the blocks."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, range(0, size, BLOCK)))


def _read(file: pa.NativeFile, start: int) -> bytes:
    block: bytes = file.read_at(BLOCK, start)
    return block


def _write(file: int, block: bytes, start: int) -> None:
    """Write all bytes of a block: `os.pwrite` may write fewer, for example when the disk is almost full."""
    left = memoryview(block)
    while left:
        left = left[os.pwrite(file, left, start + len(block) - len(left)) :]


def _digest(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()[:_DIGITS]
