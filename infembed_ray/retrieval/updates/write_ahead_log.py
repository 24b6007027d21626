"""Write-ahead log of the changes to an index while it serves: many writers and readers, no lock and no server.

A lineage (an index and all versions compacted from it) has one directory of segments, numbered from 1 without gaps. A writer
gives a segment the next free number. The file system or the object store gives a number to one writer; the others take the
next (`segments`). So changes have a total order and a visible segment is whole. A reader checks whether the next number exists.

A segment holds the changes of one append: a header, then a section for each shard that they touch, an Arrow stream of changes
(`changes_schema`). The header lists the sections with their SHA-256, and ends with its own. A shard reads the header of every
segment, and no section but its own.

A damaged or missing segment is never skipped and its number never reused: reading stops before it, replicas keep serving what
they have, and no process opens or compacts the index until it is restored. `append` does not check for damage, so it loses
nothing; the API refuses changes meanwhile.

An older version reads the changes that a newer one has folded in, so a roll-back gives the same content. `prune` deletes the
segments before a sequence that all versions have folded in, but not that one: the log would otherwise look empty.

A directory must be on a shared file system with hard links: a local disk, NFS (mounted with `actimeo=1`, or readers see new
segments late), Lustre or CephFS. A killed writer can leave a `.*.partial` file there, which is ignored. An object store must
have conditional puts, as S3, GCS and Azure do.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from infembed_ray.config.base import nearest
from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import Fault, InputError
from infembed_ray.retrieval import passages
from infembed_ray.retrieval.filters import Value, typed
from infembed_ray.retrieval.shards import shard_of
from infembed_ray.retrieval.updates.segments import LocalSegments, Segments, StoredSegments, segment_name
from infembed_ray.storage.places import Place

OP, VECTOR = "_op", "_vector"
"""Columns of a segment besides those of passages; metadata columns cannot have these names."""
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

    @classmethod
    def at(cls, directory: Place, fault: str, remedy: str) -> LogFault:
        """Return the fault of a log in a directory."""
        return cls(Fault("changes", directory, fault, remedy))

    @property
    def without_directory(self) -> str:
        """The text for clients of the API."""
        return "; ".join(str(replace(fault, setting="", value=None)) for fault in self.faults)


@dataclass(frozen=True)
class Put:
    """Insert a document, or replace the one with its id.

    Attributes:
        vector: (d,) float32 unit vector.
        metadata: values as in JSON; a missing column is null.
    """

    id: str
    text: str
    vector: np.ndarray
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Delete:
    """Delete a document (a tombstone); there need not be one."""

    id: str


Change = Put | Delete


class ChangeLog:
    """The write-ahead log of one lineage. The first append creates the directory."""

    def __init__(self, directory: Place, metadata: Mapping[str, FieldType], dimension: int, shards: int = 1) -> None:
        self.directory = directory
        self.metadata = metadata
        self.dimension = dimension
        self.shards = shards
        self.schema = changes_schema(metadata)
        self._last_seen = 0
        self._calls = self._listed = 0
        self._segments: Segments = (
            LocalSegments(directory) if isinstance(directory, Path) else StoredSegments(directory)
        )

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
            row = self._row(change)
            by_shard.setdefault(shard_of(change.id, self.shards), []).append(row)
        if not by_shard:
            return self.last()
        content = _segment({shard: self._section(rows) for shard, rows in sorted(by_shard.items())}, self.shards)
        try:
            return self._segments.add(content, self.last() + 1)
        except OSError as error:
            raise LogFault.at(
                self.directory,
                f"cannot be written ({_reason(error)})",
                "give the writer a writable directory with space, and make the change again: it may or may not be kept",
            ) from error

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
        """Whether a segment exists; one file-system call."""
        try:
            return self._segments.exists(sequence)
        except OSError as error:
            raise self._fault(sequence, f"cannot be read ({_reason(error)})") from error

    def check(self, after: int) -> None:
        """Check that no segment after a sequence is missing; a gap would otherwise look like the end of the log.

        Raises:
            LogFault: a segment is missing.
        """
        numbers = self._numbers()
        expected = range(max(after, 1), max([*numbers, after]) + 1)
        for number in expected:
            if number not in numbers and not self.has(number):  # a listing can miss a segment that is being linked
                raise LogFault.at(
                    self.directory,
                    f"{segment_name(number)} is missing",
                    "restore it, the changes after it cannot be applied without it",
                )

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
        while (table := self._changes(sequence, shard)) is not None:
            yield sequence, table
            sequence += 1

    def digest(self, after: int, until: int) -> str:
        """SHA-256 (first 16 hex digits) of the segments after one sequence, up to another."""
        whole = hashlib.sha256()
        for sequence in range(after + 1, until + 1):
            head = self._bytes(sequence, 0, _FIRST_READ)
            if head is None:
                raise self._fault(sequence, "is missing")
            whole.update(self._header(sequence, head)[-_CHECKSUM_BYTES:])
        return whole.hexdigest()[:16]

    def prune(self, before: int) -> int:
        """Delete the segments before a sequence that every version has folded in; returns how many.

        Raises:
            LogFault: one cannot be deleted.
        """
        old = sorted(number for number in self._numbers() if number < before)
        for number in old:  # ascending: what an interruption leaves has no gap
            try:
                self._segments.delete(number)
            except OSError as error:
                raise self._fault(number, f"cannot be deleted ({_reason(error)})") from error
        return len(old)

    def _row(self, change: Change) -> dict[str, Any]:
        require_fitting(change, self.dimension)
        if isinstance(change, Delete):
            return {OP: "delete", "id": change.id, "text": None, VECTOR: None}
        row = {OP: "put", "id": change.id, "text": change.text, VECTOR: np.asarray(change.vector, np.float32)}
        return row | typed_metadata(change.id, change.metadata, self.metadata)

    def _section(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        columns = [pa.array([row.get(column.name) for row in rows], column.type) for column in self.schema]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.schema) as writer:
            writer.write_table(pa.table(columns, schema=self.schema))
        return sink.getvalue().to_pybytes()

    def _bytes(self, sequence: int, start: int, length: int | None) -> bytes | None:
        try:
            return self._segments.read(sequence, start, length)
        except OSError as error:
            raise self._fault(sequence, f"cannot be read ({_reason(error)})") from error

    def _changes(self, sequence: int, shard: int | None) -> pa.Table | None:
        """The changes of a segment to one shard or to all; None if there is no such segment."""
        head = self._bytes(sequence, 0, _FIRST_READ)
        if head is None:
            return None
        header = self._header(sequence, head)
        (facts,) = np.frombuffer(header, _HEADER, 1)
        own = facts["shards"] == self.shards  # otherwise another program wrote it
        tables = [self.schema.empty_table()]
        for section in np.frombuffer(header[:-_CHECKSUM_BYTES], _SECTION, offset=_HEADER.itemsize):
            if shard is None or not own or section["shard"] == shard:
                start, length = int(section["start"]), int(section["length"])
                whole = start + length <= len(head)
                content = head[start : start + length] if whole else self._bytes(sequence, start, length) or b""
                tables.append(self._table(sequence, content, section["checksum"].tobytes()))
        changes = pa.concat_tables(tables)
        return changes if own else self._of_shard(changes, shard)

    def _header(self, sequence: int, head: bytes) -> bytes:
        """The header of a segment that begins with `head`, checked."""
        if not head.startswith(_MAGIC):
            raise self._fault(sequence, _CORRUPTED)
        sections = int(np.frombuffer(head.ljust(_HEADER.itemsize), _HEADER, 1)["sections"][0])
        size = _HEADER.itemsize + sections * _SECTION.itemsize + _CHECKSUM_BYTES
        header = (head if size <= len(head) else self._bytes(sequence, 0, None) or b"")[:size]
        if hashlib.sha256(header[:-_CHECKSUM_BYTES]).digest() != header[-_CHECKSUM_BYTES:]:
            raise self._fault(sequence, _CORRUPTED)
        return header

    def _table(self, sequence: int, content: bytes, checksum: bytes) -> pa.Table:
        if hashlib.sha256(content).digest() != checksum:
            raise self._fault(sequence, _CORRUPTED)
        table = pa.ipc.open_stream(content).read_all()
        if table.schema != self.schema:
            raise self._fault(sequence, "has other columns than the index")
        return table

    def _of_shard(self, changes: pa.Table, shard: int | None) -> pa.Table:
        if shard is None:
            return changes
        return changes.filter([shard_of(id, self.shards) == shard for id in changes.column("id").to_pylist()])

    def _fault(self, sequence: int, reason: str) -> LogFault:
        return LogFault.at(
            self.directory,
            f"{segment_name(sequence)} {reason}",
            "restore it, it and the changes after it are not applied until then",
        )

    def _numbers(self) -> set[int]:
        try:
            return self._segments.numbers()
        except OSError as error:
            raise LogFault.at(
                self.directory, f"cannot be read ({_reason(error)})", "give a directory that can"
            ) from error


def _segment(sections: Mapping[int, bytes], shards: int) -> bytes:
    """A segment: its header with the place and checksum of each section, and the sections."""
    size = _HEADER.itemsize + len(sections) * _SECTION.itemsize + _CHECKSUM_BYTES
    starts = size + np.cumsum([0, *map(len, sections.values())])
    rows = [
        (shard, start, len(content), hashlib.sha256(content).digest())
        for start, (shard, content) in zip(starts, sections.items(), strict=False)
    ]
    header = np.array((_MAGIC, shards, len(sections)), _HEADER).tobytes() + np.array(rows, _SECTION).tobytes()
    return b"".join([header, hashlib.sha256(header).digest(), *sections.values()])


def _reason(error: OSError) -> str:
    """The reason of a file system's error, or of an object store's, which has a message only."""
    return error.strerror or " ".join(str(error).split())[:240]


def changes_schema(metadata: Mapping[str, FieldType]) -> pa.Schema:
    """Columns of a segment: `_op` (put, or delete with all but `id` null), those of passages, `_vector`."""
    return pa.schema([(OP, pa.string()), *passages.schema(metadata), (VECTOR, pa.list_(pa.float32()))])


def require_fitting(change: Change, dimension: int) -> None:
    """Raise ChangeError unless id and text are text, and the vector has `dimension` finite numbers."""
    _require_text(change.id, change.id, "id")
    if not change.id:
        raise ChangeError("id='': empty; give every document an id")
    if isinstance(change, Put):
        _require_text(change.id, change.text, "text")
        vector = np.asarray(change.vector, dtype=np.float32)
        if vector.shape != (dimension,) or not np.isfinite(vector).all():
            raise ChangeError(
                f"document {reprlib.repr(change.id)}: its vector must be {dimension} finite numbers, got shape {vector.shape}"
            )


def typed_metadata(id: str, metadata: Mapping[str, Any], schema: Mapping[str, FieldType]) -> dict[str, Value | None]:
    """Convert a document's metadata to the column types of an index; missing columns are null.

    Raises:
        ChangeError: an unknown column, or a value of another type.
    """
    taken: dict[str, Value | None] = dict.fromkeys(schema)
    for name, value in metadata.items():
        where = f"document {reprlib.repr(id)}: metadata {reprlib.repr(name)}"
        if name not in schema:
            known = nearest(str(name), schema) if schema else "this index has no metadata columns"
            raise ChangeError(f"{where} is no column of the index; {known}")
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
