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
from infembed_ray.storage.object_store import SCRATCH, convert_errors, room, scratch
from infembed_ray.storage.places import Place, delete, errors_at, listing, open_binary, read_json, write_json

INDEX_FILE = "index.faiss"
PASSAGES_FILE = "passages.arrow"
VECTORS_FILE = "vectors.npy"
TERMS_FILE, POSTINGS_FILE = "terms.arrow", "postings.npy"
"""Lexical index of a shard; only in indexes built with `lexical`."""
_RECORD = re.compile(r"shard-\d+\.json")
_ATTEMPT = re.compile(r"shard-\d+(-[0-9a-f]+)?")
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
            digests = _map_blocks(file.size(), lambda start: _digest(file.read_at(BLOCK, start)))
            return cls(file.size(), "".join(digests))

    def require_size(self, file: pa.NativeFile, place: str) -> None:
        """Raise InputError unless the open file has this size; the message names `place`."""
        if (size := file.size()) != self.size:
            raise InputError(f"{place} is corrupted ({size} bytes instead of {self.size}); {REMEDY}")

    def verify(self, file: pa.NativeFile, place: str, then: Callable[[bytes, int], None] | None = None) -> None:
        """Read an open file and compare its size and checksums.

        Args:
            then: takes each block that is right, and its first byte in the file; called by several threads.

        Raises:
            InputError: they differ; the message names `place`.
        """

        def verify_block(start: int) -> None:
            block = file.read_at(BLOCK, start)
            if _digest(block) != self.blocks[start // BLOCK * _DIGITS :][:_DIGITS]:
                fault = f"the checksum of the block at byte {start} differs from the manifest"
                raise InputError(f"{place} is corrupted ({fault}); {REMEDY}")
            if then is not None:
                then(block, start)

        self.require_size(file, place)
        _map_blocks(self.size, verify_block)

    def copy(self, source: pa.NativeFile, path: Path, place: str) -> None:
        """As `verify`, and copy the file to `path` meanwhile, which appears whole or not at all."""
        with durable.replacing(path) as copy:
            self.verify(source, place, lambda block, start: _write(copy.fileno(), block, start))


@dataclass(frozen=True)
class ShardFacts:
    """A shard in the manifest of an index.

    Attributes:
        name: directory of the shard inside the index.
        search: calibrated search parameters: efSearch (graphs), nprobe (inverted lists), rerank (candidates per hit of lossy
            types).
        recall_at_10: against exact search (`faiss_index.calibrate`); 1 for Flat.
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


def local_directory(root: Place, facts: ShardFacts) -> Path:
    """Return the directory of this machine with a shard's files.

    From an object store they are copied to the scratch directory, by one process while the others wait.

    Raises:
        InputError: a file is missing or has another size; a block of a copy has a wrong checksum; or the disk is full.
    """
    if isinstance(root, Path):
        for name, checksums in facts.checksums.items():
            with _opened(root, facts, name) as (file, place):
                checksums.require_size(file, place)
        return root / facts.name
    key, cache = json.dumps(asdict(facts)["checksums"], sort_keys=True), scratch()
    directory = cache / "shards" / hashlib.sha256(key.encode()).hexdigest()[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with durable.exclusive_lock(directory / "lock", wait=True):
            missing = [name for name in facts.checksums if not (directory / name).is_file()]
            if missing:
                say(f"index: copying {facts.name} ({facts.bytes} bytes) from {root} to {directory}")
            for name in missing:
                with _opened(root, facts, name) as (source, place):
                    facts.checksums[name].copy(source, directory / name, place)
    except OSError as error:
        fault = f"cannot hold {facts.name} ({error.strerror or error}), which has {facts.bytes} bytes"
        remedy = "free space there, for example by deleting copies of older versions, or give another directory"
        raise InputError.of(SCRATCH, cache, fault, remedy) from error
    return directory


def verify(root: Place, facts: ShardFacts) -> None:
    """Compare the checksums of a shard's files with the manifest, in bounded memory; InputError if one is missing or differs."""
    for name, checksums in facts.checksums.items():
        with _opened(root, facts, name) as (file, place):
            checksums.verify(file, place)


def verify_local(root: Place, facts: ShardFacts) -> None:
    """As `verify`, of the files that this machine reads: those of `local_directory`. A damaged copy is made again."""
    directory = local_directory(root, facts)
    try:
        verify(directory.parent, replace(facts, name=directory.name))
    except InputError:
        if isinstance(root, Path):
            raise
        for name in facts.checksums:
            (directory / name).unlink()
        local_directory(root, facts)


@contextlib.contextmanager
def _opened(root: Place, facts: ShardFacts, name: str) -> Iterator[tuple[pa.NativeFile, str]]:
    """Open a file of a shard; give it and its name for error messages."""
    place = f"index={root}: {facts.name}/{name}"
    try:
        with open_binary(root / facts.name / name) as source:
            yield source, place
    except FileNotFoundError as error:
        raise InputError(f"{place} is missing; {REMEDY}") from error
    except (OSError, pa.ArrowException) as error:
        if isinstance(root, Path) or getattr(error, "errno", None) is not None:  # of this machine's disk
            raise
        with convert_errors(root.base, "index"):
            raise


def write_once(root: Place, name: str, write: Callable[[Path], ShardFacts]) -> ShardFacts:
    """Write a shard of the index in `root`, unless an interrupted run finished it and its files are whole.

    In an object store every attempt has a directory of its own: one that was given up may still write, and must not overwrite
    the files of another one.

    Args:
        write: writes the files into a directory of this machine and returns their facts.
    """
    record = root / f"{name}.json"
    if values := read_json(record):
        facts = ShardFacts.from_json(values)
        with contextlib.suppress(InputError):  # the machine stopped before the files were on disk
            if isinstance(root, Path):
                verify(root, facts)
            return facts
    if isinstance(root, Path):
        (root / name).mkdir(exist_ok=True)
        facts = write(root / name)
    else:
        with room("shard") as directory:
            attempt = directory / f"{name}-{secrets.token_hex(4)}"
            attempt.mkdir()
            facts = write(attempt)
            for file in facts.checksums:
                root.upload(attempt / file, f"{facts.name}/{file}")
    write_json(record, asdict(facts))
    return facts


def clear_attempts(root: Place, shards: Sequence[ShardFacts]) -> None:
    """Delete the records of `write_once` from a published index, and the files of attempts that its `shards` do not name."""
    names = {facts.name for facts in shards}
    with errors_at(root, "output"):
        for file in listing(root):
            top, _, below = file.partition("/")
            if _RECORD.fullmatch(file) or (below and _ATTEMPT.fullmatch(top) and top not in names):
                delete(root / file)


def _map_blocks(size: int, function: Callable[[int], T]) -> list[T]:
    """Call a function with the first byte of each block of a file; return the results in the order of the blocks."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, range(0, size, BLOCK)))


def _write(file: int, block: bytes, start: int) -> None:
    """Write all bytes of a block: `os.pwrite` may write fewer, for example when the disk is almost full."""
    left = memoryview(block)
    while left:
        left = left[os.pwrite(file, left, start + len(block) - len(left)) :]


def _digest(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()[:_DIGITS]
