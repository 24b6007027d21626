"""The write-ahead log of an index's changes: numbered segments in a directory with hard links, or in an object store.

A link or a conditional put gives a number to one writer. A visible segment is whole, durable and never changes: a header with
checksums, then a section for each shard that its changes touch. A damaged or missing segment is never skipped and its number never
reused: reading stops before it. `prune` keeps the last segment that all versions have folded in: it marks the log's begin.
"""

import contextlib
import hashlib
import os
import re
import reprlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from obstore.exceptions import BaseError

from infembed_ray.config.base import nearest
from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.retrieval import passages
from infembed_ray.retrieval.chunks import Bounds
from infembed_ray.retrieval.filters import Value, typed
from infembed_ray.retrieval.shards import shard_of
from infembed_ray.storage import durable
from infembed_ray.storage.places import Place, delete, listing

OP, VECTOR = "_op", "_vector"
"""Columns of a segment besides those of passages; metadata columns cannot have these names."""
_NAME = re.compile(r"(\d{12})\.arrow")
_LISTED_PER_CALL = 1000
"""Segments listed per call of `last` on average, to see those behind a gap."""
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_MAGIC = b"infemb2\n"
_HEADER = np.dtype([("magic", "S8"), ("shards", "<u4"), ("sections", "<u4")])
_SECTION = np.dtype([("shard", "<u4"), ("start", "<u8"), ("length", "<u8"), ("checksum", f"V{_CHECKSUM_BYTES}")])
_CORRUPTED = "is corrupted (its checksum is not that of its content)"
_FIRST_READ = 1 << 14
"""Bytes of the first read of a segment: its header, and all of a small segment."""


class ChangeError(ValueError):
    """A change does not fit the index; the message names the document, the field and the remedy."""


class LogFault(InputError):
    """The log cannot be read or written; the message names the file and the reason."""

    @property
    def without_directory(self) -> str:
        """The text for clients of the API."""
        return "; ".join(str(replace(fault, setting="", value=None)) for fault in self.faults)


@dataclass(frozen=True)
class Put:
    """Insert a document, or replace the one with its id.

    Attributes:
        vector: (d,) float32 unit vector, or (chunks, d) vectors.
        metadata: values as in JSON; a missing column is null.
        chunks: of the text, in an index with chunks.
    """

    id: str
    text: str
    vector: np.ndarray
    metadata: Mapping[str, Any] = field(default_factory=dict)
    chunks: Bounds | None = None


@dataclass(frozen=True)
class Delete:
    """Delete a document (a tombstone); there need not be one."""

    id: str


Change = Put | Delete


class ChangeLog:
    """The write-ahead log of one lineage. The first append creates the directory."""

    def __init__(
        self, directory: Place, metadata: Mapping[str, FieldType], dimension: int, shards: int = 1, cut: bool = False
    ) -> None:
        self.directory = directory
        self.metadata = metadata
        self.dimension = dimension
        self.shards = shards
        # `_op` (put, or delete with all but `id` null), the columns of passages, `_vector` (of all chunks)
        columns = passages.schema(metadata, cut)
        self.schema = pa.schema([(OP, pa.string()), *columns, (VECTOR, pa.list_(pa.float32()))])
        self._last_seen = self._calls = self._listed = 0
        self._directory_synced = False

    def append(self, changes: Sequence[Change]) -> int:
        """Append changes in their order as one segment; on return they are on disk. A reader applies all of them or none.

        Returns:
            Their sequence; a reader that applied it has applied all changes until now.

        Raises:
            ChangeError: a change does not fit the index; none is kept.
            LogFault: the directory cannot be written; the changes may be kept.
        """
        by_shard: dict[int, list[dict[str, Any]]] = {}
        for change in changes:
            row = self._row(change)  # first: it refuses an id that has no hash
            by_shard.setdefault(shard_of(change.id, self.shards), []).append(row)
        if not by_shard:
            return self.last()
        content, sequence = self._segment(by_shard), self.last() + 1
        remedy = "give the writer a writable directory with space, and make the change again: it may or may not be kept"
        with self._faults("cannot be written", remedy):
            if isinstance(self.directory, Path):
                return self._link(self.directory, content, sequence)
            # Equal segments of two writers may become one: making the same changes twice has no effect.
            while self.directory.put(segment_name(sequence), content) is None:
                sequence += 1
            return sequence

    def _link(self, directory: Path, content: bytes, sequence: int) -> int:
        """Store a segment durably in a directory under the first free number from `sequence` on; return the number."""
        partial = directory / f".{secrets.token_hex(8)}.partial"
        try:
            if not self._directory_synced:
                directory.mkdir(parents=True, exist_ok=True)
                for level in directory.parents[:2]:  # another writer may just have created them
                    durable.sync_directory(level)
                self._directory_synced = True
            with partial.open("xb") as stream:
                stream.write(content)
                durable.sync(stream)
            while True:
                file = directory / segment_name(sequence)
                try:
                    os.link(partial, file)
                    break
                except FileExistsError:
                    # NFS repeats a request whose reply was lost, then reports our own link as existing.
                    if os.path.samefile(partial, file):
                        break
                    sequence += 1
            durable.sync_directory(directory)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        return sequence

    def last(self) -> int:
        """The sequence of the last segment; 0 if there is none."""
        self._calls += 1
        if self._calls * _LISTED_PER_CALL >= self._listed:
            numbers = self._numbers()
            self._calls, self._listed = 0, len(numbers)
            self._last_seen = max(self._last_seen, max(numbers, default=0))
        while self.has(self._last_seen + 1):
            self._last_seen += 1
        return self._last_seen

    def has(self, sequence: int) -> bool:
        """Whether a segment exists; one call of the file system or the store."""
        return self._bytes(sequence, 0, 1) is not None

    def check(self, after: int) -> None:
        """LogFault if a segment after a sequence is missing; a gap would otherwise look like the end of the log."""
        numbers = self._numbers()
        for number in range(max(after, 1), max([*numbers, after]) + 1):
            if number not in numbers and not self.has(number):  # a listing can miss a segment that is being linked
                raise self._fault(number, "is missing")

    def read(self, after: int, shard: int | None = None) -> Iterator[tuple[int, pa.Table]]:
        """Read the segments after a sequence, in order.

        Args:
            shard: whose changes to read; None: those of all shards.

        Yields:
            Sequence, and a table of `schema`.

        Raises:
            LogFault: the next segment is damaged, as far as it was read.
        """
        sequence = after + 1
        while (head := self._bytes(sequence, 0, _FIRST_READ)) is not None:
            header = self._header(sequence, head)
            tables = [self.schema.empty_table()]
            for section in np.frombuffer(header[:-_CHECKSUM_BYTES], _SECTION, offset=_HEADER.itemsize):
                if shard is None or section["shard"] == shard:
                    start, length = int(section["start"]), int(section["length"])
                    whole = start + length <= len(head)
                    content = head[start : start + length] if whole else self._bytes(sequence, start, length) or b""
                    if hashlib.sha256(content).digest() != section["checksum"].tobytes():
                        raise self._fault(sequence, _CORRUPTED)
                    tables.append(pa.ipc.open_stream(content).read_all())
                    if tables[-1].schema != self.schema:
                        raise self._fault(sequence, "has other columns than the index")
            yield sequence, pa.concat_tables(tables)
            sequence += 1

    def digest(self, after: int, until: int) -> str:
        """SHA-256 (first 16 hex digits) of the segments after one sequence, up to another."""
        whole = hashlib.sha256()
        for sequence in range(after + 1, until + 1):
            if (head := self._bytes(sequence, 0, _FIRST_READ)) is None:
                raise self._fault(sequence, "is missing")
            whole.update(self._header(sequence, head)[-_CHECKSUM_BYTES:])
        return whole.hexdigest()[:16]

    def prune(self, before: int) -> int:
        """Delete the segments before a sequence that every version has folded in; returns how many, LogFault if it cannot."""
        old = sorted(number for number in self._numbers() if number < before)
        with self._faults("cannot be pruned", "give a directory that can be written"):
            for number in old:  # ascending: what an interruption leaves has no gap
                delete(self.directory / segment_name(number))
        return len(old)

    def _row(self, change: Change) -> dict[str, Any]:
        require_fitting(change, self.dimension)
        if isinstance(change, Delete):
            return {OP: "delete", "id": change.id, "text": None, VECTOR: None}
        if (change.chunks is None) != (passages.CHUNKS not in self.schema.names):
            raise ChangeError(f"document {reprlib.repr(change.id)}: cut it into chunks if the index has them, else not")
        vectors = np.asarray(change.vector, np.float32).ravel()
        row = {OP: "put", "id": change.id, "text": change.text, passages.CHUNKS: change.chunks, VECTOR: vectors}
        return row | typed_metadata(change.id, change.metadata, self.metadata)

    def _segment(self, by_shard: Mapping[int, Sequence[Mapping[str, Any]]]) -> bytes:
        """A segment: its header with the place and checksum of each section, and the sections."""
        sections = []
        for rows in (by_shard[shard] for shard in sorted(by_shard)):
            columns = [pa.array([row.get(column.name) for row in rows], column.type) for column in self.schema]
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, self.schema) as writer:
                writer.write_table(pa.table(columns, schema=self.schema))
            sections.append(sink.getvalue().to_pybytes())
        size = _HEADER.itemsize + len(sections) * _SECTION.itemsize + _CHECKSUM_BYTES
        starts = size + np.cumsum([0, *map(len, sections)])
        placed = zip(sorted(by_shard), starts, sections, strict=False)
        facts = [(shard, start, len(content), hashlib.sha256(content).digest()) for shard, start, content in placed]
        header = np.array((_MAGIC, self.shards, len(sections)), _HEADER).tobytes() + np.array(facts, _SECTION).tobytes()
        return b"".join([header, hashlib.sha256(header).digest(), *sections])

    def _bytes(self, sequence: int, start: int, length: int | None) -> bytes | None:
        """Up to `length` bytes (None: all) of a segment from `start` on; None if there is no such segment."""
        name = segment_name(sequence)
        with self._faults(f"{name} cannot be read", "give a directory that can"):
            if not isinstance(self.directory, Path):
                return self.directory.read_range(name, start, length)
            try:
                with (self.directory / name).open("rb") as file:
                    file.seek(start)
                    return file.read(length)
            except FileNotFoundError:
                return None

    def _header(self, sequence: int, head: bytes) -> bytes:
        """The header of a segment that begins with `head`, checked."""
        (facts,) = np.frombuffer(head.ljust(_HEADER.itemsize, b"\0"), _HEADER, 1)
        size = _HEADER.itemsize + int(facts["sections"]) * _SECTION.itemsize + _CHECKSUM_BYTES
        header = (head if size <= len(head) else self._bytes(sequence, 0, None) or b"")[:size]
        if facts["magic"] != _MAGIC or hashlib.sha256(header[:-_CHECKSUM_BYTES]).digest() != header[-_CHECKSUM_BYTES:]:
            raise self._fault(sequence, _CORRUPTED)
        if facts["shards"] != self.shards:
            raise self._fault(sequence, f"is of an index of {facts['shards']} shards")
        return header

    def _fault(self, sequence: int, reason: str) -> LogFault:
        remedy = "restore it, it and the changes after it are not applied until then"
        return LogFault.of("changes", self.directory, f"{segment_name(sequence)} {reason}", remedy)

    @contextlib.contextmanager
    def _faults(self, fault: str, remedy: str) -> Iterator[None]:
        """Convert errors of the file system or of the store's clients in the block to a LogFault."""
        try:
            yield
        except (OSError, pa.ArrowException, BaseError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:240]
            raise LogFault.of("changes", self.directory, f"{fault} ({reason})", remedy) from error

    def _numbers(self) -> set[int]:
        """The numbers in use."""
        with self._faults("cannot be read", "give a directory that can"):
            try:
                names = os.listdir(self.directory) if isinstance(self.directory, Path) else listing(self.directory)
            except FileNotFoundError:
                return set()
        return {int(match[1]) for match in map(_NAME.fullmatch, names) if match}


def segment_name(sequence: int) -> str:
    """File name of a segment."""
    return f"{sequence:012d}.arrow"


def require_fitting(change: Change, dimension: int) -> None:
    """Raise ChangeError unless id and text are text, and the vector has `dimension` finite numbers."""
    _require_text(change.id, change.id, "id")
    if not change.id:
        raise ChangeError("id='': empty; give every document an id")
    if isinstance(change, Put):
        _require_text(change.id, change.text, "text")
        vector = np.asarray(change.vector, dtype=np.float32)
        wanted = (dimension,) if change.chunks is None else (len(change.chunks) // 2, dimension)
        if vector.shape != wanted or not vector.size or not np.isfinite(vector).all():
            fault = f"its vector must be finite and of shape {wanted}, got shape {vector.shape}"
            raise ChangeError(f"document {reprlib.repr(change.id)}: {fault}")


def typed_metadata(id: str, metadata: Mapping[str, Any], schema: Mapping[str, FieldType]) -> dict[str, Value | None]:
    """Convert a document's metadata to the column types of an index; missing columns are null.

    Raises:
        ChangeError: an unknown column, or a value of another type.
    """
    taken: dict[str, Value | None] = dict.fromkeys(schema)
    for name, value in metadata.items():
        where = f"document {reprlib.repr(id)}: metadata {reprlib.repr(name)}"
        if name not in schema:
            valid = nearest(str(name), schema) if schema else "this index has no metadata columns"
            raise ChangeError(f"{where} is no column of the index; {valid}")
        try:
            taken[name] = None if value is None else typed(value, schema[name])
        except ValueError as error:
            raise ChangeError(f"{where}={reprlib.repr(value)} {error}") from None
    return taken


def _require_text(id: Any, value: Any, name: str) -> None:
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        raise ChangeError(f"document {reprlib.repr(id)}: its {name} must be text without lone surrogates") from None
