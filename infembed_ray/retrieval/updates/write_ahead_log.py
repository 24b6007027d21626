"""Write-ahead log of the changes to an index while it serves: many writers and readers, no lock and no server.

A lineage (an index and all versions compacted from it) has one directory of segments, numbered from 1 without gaps. A writer
gives a segment the next free number. The file system or the object store gives a number to one writer; the others take the
next (`segments`). So changes have a total order and a visible segment is whole. A reader checks whether the next number exists.

A segment is an Arrow stream of changes (`changes_schema`) and its SHA-256 (32 bytes). A damaged or missing segment is never
skipped and its number never reused: reading stops before it, replicas keep serving what they have, and no process opens or
compacts the index until it is restored. `append` does not check for damage, so it loses nothing; the API refuses changes
meanwhile.

Segments are never deleted: an older version reads the changes that a newer one has folded in, so a roll-back gives the same
content. An operator may delete those before the `folded` of the oldest version kept, but not that one.

A directory must be on a shared file system with hard links: a local disk, NFS (mounted with `actimeo=1`, or readers see new
segments late), Lustre or CephFS. A killed writer can leave a `.*.partial` file there, which is ignored. An object store must
have conditional puts, as S3, GCS and Azure do.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from infembed_ray.config.base import nearest
from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.places import Place
from infembed_ray.retrieval import passages
from infembed_ray.retrieval.filters import Value, typed
from infembed_ray.retrieval.updates.segments import LocalSegments, Segments, StoredSegments, segment_name

SEGMENT_BYTES = 16 << 20
"""Bytes of texts and vectors per segment, which a reader holds at once."""
OP, VECTOR = "_op", "_vector"
"""Columns of a segment besides those of passages; metadata columns cannot have these names."""
_LISTED_PER_CALL = 1000
"""Segments listed per call of `last` on average, to see those behind a gap."""
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class ChangeError(ValueError):
    """A change does not fit the index; the message names the document, the field and the remedy."""


class LogFault(InputError):
    """The log cannot be read or written; the message names the file and the reason."""


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
    """The write-ahead log of one lineage. The first append creates the directory.

    Args:
        directory: of the segments; in an object store, a folder.
        metadata: metadata columns of the index and their types.
        dimension: of the vectors.
    """

    def __init__(self, directory: Place, metadata: Mapping[str, FieldType], dimension: int) -> None:
        self.directory = directory
        self.metadata = metadata
        self.dimension = dimension
        self.schema = changes_schema(metadata)
        self._last_seen = 0
        self._calls = self._listed = 0
        self._segments: Segments = (
            LocalSegments(directory) if isinstance(directory, Path) else StoredSegments(directory)
        )

    def append(self, changes: Sequence[Change]) -> int:
        """Append changes in their order; on return they are on disk.

        Returns:
            The sequence of the last segment; a reader that applied it has applied all changes.

        Raises:
            ChangeError: a change does not fit the index; none is kept.
            LogFault: the directory cannot be written; some of the changes may be kept.
        """
        rows = [self._row(change) for change in changes]
        if not rows:
            return self.last()
        sequence = 0
        part: list[dict[str, Any]] = []
        size = 0
        for row in rows:
            weight = len(row["text"] or "") + (0 if row[VECTOR] is None else row[VECTOR].nbytes)
            if part and size + weight > SEGMENT_BYTES:
                sequence = self._publish(part)
                part, size = [], 0
            part.append(row)
            size += weight
        return max(sequence, self._publish(part))

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
                raise LogFault(
                    f"changes={self.directory}: {segment_name(number)} is missing; restore it, "
                    "the changes after it cannot be applied without it"
                )

    def read(self, after: int) -> Iterator[tuple[int, pa.Table]]:
        """Read the segments after a sequence, in order.

        Yields:
            Sequence, and a table of `schema`.

        Raises:
            LogFault: the next segment is damaged.
        """
        sequence = after + 1
        while (content := self._content(sequence)) is not None:
            yield sequence, self._table(sequence, content)
            sequence += 1

    def digest(self, after: int, until: int) -> str:
        """SHA-256 (first 16 hex digits) of the segments after one sequence, up to another."""
        whole = hashlib.sha256()
        for sequence in range(after + 1, until + 1):
            if (content := self._content(sequence)) is None:
                raise self._fault(sequence, "is missing")
            whole.update(content[-_CHECKSUM_BYTES:])
        return whole.hexdigest()[:16]

    def _row(self, change: Change) -> dict[str, Any]:
        _require_text(change.id, change.id, "id")
        if not change.id:
            raise ChangeError("id='': empty; give every document an id")
        if isinstance(change, Delete):
            return {OP: "delete", "id": change.id, "text": None, VECTOR: None}
        _require_text(change.id, change.text, "text")
        vector = np.asarray(change.vector, dtype=np.float32)
        if vector.shape != (self.dimension,) or not np.isfinite(vector).all():
            raise ChangeError(
                f"document {reprlib.repr(change.id)}: its vector must be {self.dimension} finite numbers, got shape {vector.shape}"
            )
        row = {OP: "put", "id": change.id, "text": change.text, VECTOR: vector}
        return row | typed_metadata(change.id, change.metadata, self.metadata)

    def _publish(self, rows: Sequence[Mapping[str, Any]]) -> int:
        columns = [pa.array([row.get(column.name) for row in rows], column.type) for column in self.schema]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.schema) as writer:
            writer.write_table(pa.table(columns, schema=self.schema))
        body = sink.getvalue().to_pybytes()
        try:
            return self._segments.add(body + hashlib.sha256(body).digest(), self.last() + 1)
        except OSError as error:
            raise LogFault(
                f"changes={self.directory}: cannot be written ({_reason(error)}); "
                "give the writer a writable directory with space, and make the change again: it may or may not be kept"
            ) from error

    def _content(self, sequence: int) -> bytes | None:
        try:
            return self._segments.read(sequence)
        except OSError as error:
            raise self._fault(sequence, f"cannot be read ({_reason(error)})") from error

    def _table(self, sequence: int, content: bytes) -> pa.Table:
        body, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if hashlib.sha256(body).digest() != checksum:
            raise self._fault(sequence, "is corrupted (its checksum is not that of its content)")
        table = pa.ipc.open_stream(body).read_all()
        if table.schema != self.schema:
            raise self._fault(sequence, "has other columns than the index")
        return table

    def _fault(self, sequence: int, reason: str) -> LogFault:
        return LogFault(
            f"changes={self.directory}: {segment_name(sequence)} {reason}; restore it, "
            "it and the changes after it are not applied until then"
        )

    def _numbers(self) -> set[int]:
        try:
            return self._segments.numbers()
        except OSError as error:
            raise LogFault(
                f"changes={self.directory}: cannot be read ({_reason(error)}); give a directory that can"
            ) from error


def _reason(error: OSError) -> str:
    """The reason of a file system's error, or of an object store's, which has a message only."""
    return error.strerror or " ".join(str(error).split())[:240]


def changes_schema(metadata: Mapping[str, FieldType]) -> pa.Schema:
    """Columns of a segment: `_op` (put, or delete with all but `id` null), those of passages, `_vector`."""
    return pa.schema([(OP, pa.string()), *passages.schema(metadata), (VECTOR, pa.list_(pa.float32()))])


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
