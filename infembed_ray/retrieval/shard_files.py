"""The files of a shard: their facts in the manifest, their checksums by block, and this machine's copy of them.

Blocks are read, verified and copied in parallel and out of order.
A shard in an object store is copied to a directory that is named by its checksums, once for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from infembed_ray.config.retrieval import Precision
from infembed_ray.errors import InputError
from infembed_ray.progress import say
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import SCRATCH, Folder, convert_errors, room, scratch
from infembed_ray.storage.places import Place, delete, open_binary, read_json, write_json

INDEX_FILE = "index.faiss"
PASSAGES_FILE = "passages.arrow"
VECTORS_FILE = "vectors.npy"
TERMS_FILE, POSTINGS_FILE = "terms.arrow", "postings.npy"
"""Lexical index of a shard; only in indexes built with `lexical`."""
_RECORD = re.compile(r"shard-\d+\.json")
_ATTEMPT = re.compile(r"shard-\d+(-[0-9a-f]+)?/")
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

        Raises:
            InputError: the file is damaged; the message names `place`.
            OSError: the disk is full.
        """
        self.require_size(source.size(), place)
        with durable.replacing(path) as copy:

            def copy_block(start: int) -> None:
                block = _read(source, start)
                self._require(block, start, place)
                _write(copy.fileno(), block, start)

            _map_blocks(self.size, copy_block)

    def _require(self, block: bytes, start: int, place: str) -> None:
        if _digest(block) != self.blocks[start // BLOCK * _DIGITS :][:_DIGITS]:
            raise InputError(
                f"{place} is corrupted (the checksum of the block at byte {start} differs from the manifest); {REMEDY}"
            )


@dataclass(frozen=True)
class ShardFacts:
    """A shard in the manifest of an index.

    Attributes:
        name: directory of the shard inside the index.
        search: calibrated search parameters: efSearch (graphs), nprobe (inverted lists), rerank (candidates per hit of lossy
            types).
        recall_at_10: against exact search (`searcher.calibrate`); 1 for Flat.
        checksums: file name -> its checksums.
    """

    name: str
    passages: int
    factory: str
    search: Mapping[str, int]
    recall_at_10: float
    bytes: int
    checksums: Mapping[str, FileChecksums]
    vectors: Precision = "float32"

    @property
    def lexical(self) -> bool:
        """Whether the shard has a lexical index."""
        return TERMS_FILE in self.checksums

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ShardFacts:
        """Inverse of `asdict`."""
        checksums = {n: FileChecksums(**v) for n, v in values["checksums"].items()}
        return cls(**{**values, "checksums": checksums})


def local_directory(root: Place, facts: ShardFacts, cache: Path | None = None) -> Path:
    """Return the directory of this machine with a shard's files; copy them there from an object store.

    Args:
        cache: directory for copies; None: the scratch directory of this machine.

    Raises:
        InputError: a file is missing or has another size; a block of a copy has a wrong checksum; or the disk is full.
    """
    if isinstance(root, Folder):
        return _cached(root, facts, cache or scratch())
    for name, checksums in facts.checksums.items():
        with _opened(root, facts, name) as (file, place):
            checksums.require_size(file.size(), place)
    return root / facts.name


def verify(root: Place, facts: ShardFacts) -> None:
    """Read all files of a shard and compare their checksums with the manifest, in bounded memory.

    Raises:
        InputError: a file is missing or corrupted.
    """
    for name, checksums in facts.checksums.items():
        with _opened(root, facts, name) as (file, place):
            checksums.verify(file, place)


def verify_local(root: Place, facts: ShardFacts) -> None:
    """Verify the files of a shard that this machine reads: those of `local_directory`.

    Raises:
        InputError: a file, or this machine's copy of it, is missing or corrupted.
    """
    if isinstance(root, Path):
        verify(root, facts)
        return
    directory = local_directory(root, facts)
    try:
        verify(directory.parent, replace(facts, name=directory.name))
    except InputError as damage:
        raise InputError(
            f"index={root}: this machine's copy of {facts.name} is damaged ({damage}); delete {directory} and run again"
        ) from damage


def _cached(folder: Folder, facts: ShardFacts, cache: Path) -> Path:
    """Return this machine's copy of a shard. One process makes it; the others wait."""
    key = json.dumps(asdict(facts)["checksums"], sort_keys=True)
    directory = cache / "shards" / hashlib.sha256(key.encode()).hexdigest()[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with durable.exclusive_lock(directory / "lock", wait=True):
            missing = [name for name in facts.checksums if not (directory / name).is_file()]
            if missing:
                say(f"index: copying {facts.name} ({facts.bytes} bytes) from {folder} to {directory}")
            for name in missing:
                with _opened(folder, facts, name) as (source, place):
                    facts.checksums[name].copy(source, directory / name, place)
    except OSError as error:
        raise InputError(
            f"{SCRATCH}={cache}: cannot hold {facts.name} ({error.strerror or error}), which has {facts.bytes} bytes; "
            "free space there, for example by deleting copies of older versions, or give another directory"
        ) from error
    return directory


@contextlib.contextmanager
def _opened(root: Place, facts: ShardFacts, name: str) -> Iterator[tuple[pa.NativeFile, str]]:
    """Open a file of a shard; give it and its name for error messages."""
    place = f"index={root}: {facts.name}/{name}"
    with _store_errors(root):
        try:
            source = open_binary(root / facts.name / name)
        except FileNotFoundError as error:
            raise InputError(f"{place} is missing; {REMEDY}") from error
        with source:
            yield source, place


@contextlib.contextmanager
def _store_errors(root: Place) -> Iterator[None]:
    """Convert errors of a store's client to InputErrors. Errors of this machine's disk have an errno and pass."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        if isinstance(root, Path) or getattr(error, "errno", None) is not None:
            raise
        with convert_errors(root.base, "index"):
            raise


@contextlib.contextmanager
def shard_directory(root: Place, name: str) -> Iterator[Path]:
    """Give the directory of this machine in which to write a shard of the index in `root`.

    For an index in an object store it lies in the scratch directory, until the block ends. Its name is of this attempt only: an
    attempt that was given up may still write, and must not overwrite the files of another one.
    """
    if isinstance(root, Path):
        (root / name).mkdir(exist_ok=True)
        yield root / name
    else:
        with room("shard") as directory:
            attempt = directory / f"{name}-{secrets.token_hex(4)}"
            attempt.mkdir()
            yield attempt


def mark_finished(root: Place, name: str, directory: Path, facts: ShardFacts) -> ShardFacts:
    """Record that a shard is finished, so that an interrupted build resumes after it; upload it to an object store."""
    if isinstance(root, Folder):
        for file in facts.checksums:
            root.upload(directory / file, f"{facts.name}/{file}")
    write_json(root / f"{name}.json", asdict(facts))
    return facts


def finished_shard(root: Place, name: str) -> ShardFacts | None:
    """The facts of a shard that an earlier run finished; None if it did not, or if a file is damaged."""
    if (record := read_json(root / f"{name}.json")) is None:
        return None
    facts = ShardFacts.from_json(record)
    with contextlib.suppress(InputError):  # the machine stopped before the files were on disk
        if isinstance(root, Path):
            verify(root, facts)
        return facts
    return None


def clear_finished(root: Place) -> None:
    """Remove the records of `mark_finished` from an index whose shards are all finished."""
    names = root.entries() if isinstance(root, Folder) else [file.name for file in root.iterdir()]
    for name in filter(_RECORD.fullmatch, names):
        delete(root / name)


def drop_other_attempts(root: Folder | None, shards: Sequence[ShardFacts]) -> None:
    """Delete the files of attempts at shards that a published index does not name.

    Args:
        root: of the index in an object store; None: the index is in a directory and has no such files.
    """
    if root is None:
        return
    names = {facts.name for facts in shards}
    with convert_errors(root.base, "output"):
        for file in root.entries():
            if _ATTEMPT.match(file) and file.split("/")[0] not in names:
                root.delete(file)


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
