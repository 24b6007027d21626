"""The durable log of the changes made to an index while it serves: many writers, many readers, no lock, no server.

A lineage (an index and all versions compacted from it) has one directory of segments, numbered from 1 without gaps. A
segment is written beside, synced, and then linked to the next free number: the file system lets one writer have it, the
others take the next, so the order is total, and what is there is whole. A reader asks only whether the next number is there.
A writer that is killed may leave a `.*.partial`, which nobody reads.

A segment is an Arrow stream of changes in their order (`changes_schema`), followed by its SHA-256 (32 bytes). One that
is damaged or missing is never skipped, nor its number given again: reading stops before it with the reason, a replica that serves
goes on with what it has, and nobody opens or compacts the index until it is restored. `append` does not look for damage: what
it appends is kept. The API refuses changes meanwhile.

Segments are never deleted here: an older version reads what a newer one has folded in, which is what makes rolling back
give the same content. By hand, those before the `folded` of the oldest version that is kept may go; that one must stay.

The directory must be on a file system that all writers and readers share and that has hard links: a local disk, NFS (mount
it with `actimeo=1`, or new segments show late), Lustre, CephFS; not an object store.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import reprlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from infembed_ray.config import FieldType, nearest
from infembed_ray.errors import InputError
from infembed_ray.retrieval import passages
from infembed_ray.retrieval.filters import Value, typed

SEGMENT_BYTES = 16 << 20
"""Of texts and vectors, after which an append begins another segment: what a reader holds at once."""
OP, VECTOR = "_op", "_vector"
"""Columns of a segment beside those of passages; no metadata column is called so."""
_NAMES_A_CALL = 1000
"""Of segments that are listed, on average, to see those behind a gap."""
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_NAME = re.compile(r"(\d{12})\.arrow")


class ChangeError(ValueError):
    """A change that the index cannot take: one line that names the document, the field and the remedy."""


class LogFault(InputError):
    """The log cannot be read or written: one line that names the file and the reason."""


@dataclass(frozen=True)
class Put:
    """A document that is new, or takes the place of the one with its id."""

    id: str
    text: str
    vector: np.ndarray
    """(d,) float32 unit vector."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """As in JSON; a column that is missing is null."""


@dataclass(frozen=True)
class Delete:
    """A document that is to be gone; there need not be one."""

    id: str


Change = Put | Delete


class ChangeLog:
    """The log of one lineage. Opening it makes nothing; the first append makes the directory.

    Args:
        directory: of the segments.
        metadata: the index' metadata columns and their types.
        dimension: of its vectors.
    """

    def __init__(self, directory: Path, metadata: Mapping[str, FieldType], dimension: int) -> None:
        self.directory = directory
        self.metadata = metadata
        self.dimension = dimension
        self.schema = changes_schema(metadata)
        self._known = 0
        """The last segment that was seen."""
        self._asked = self._listed = 0
        self._named = False
        """Is the directory's own name on disk?"""

    def append(self, changes: Sequence[Change]) -> int:
        """Keep changes for good, in their order; on return they are on disk.

        Returns:
            The sequence of the last of them: who has applied it has applied all.

        Raises:
            ChangeError: a change does not fit the index; nothing was kept.
            LogFault: the directory cannot be written. The changes, or a part of them, may be kept all the same.
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
        """The sequence of the last change; 0 if there is none."""
        self._asked += 1
        if self._asked * _NAMES_A_CALL >= self._listed:
            numbers = self._numbers()
            self._asked, self._listed = 0, len(numbers)
            self._known = max(self._known, max(numbers, default=0))
        while self.has(self._known + 1):
            self._known += 1
        return self._known

    def has(self, sequence: int) -> bool:
        """Is there a segment of this number? One look at the file system."""
        return self._file(sequence).exists()

    def check(self, after: int) -> None:
        """Is everything there that was changed after this sequence?

        Raises:
            LogFault: segments are missing, which otherwise would read as a log that is shorter.
        """
        numbers = self._numbers()
        expected = range(max(after, 1), max([*numbers, after]) + 1)
        for number in expected:
            if number not in numbers and not self.has(number):  # a listing may miss what is being made
                raise LogFault(
                    f"changes={self.directory}: {self._file(number).name} is missing; restore it, "
                    "the changes after it cannot be applied without it"
                )

    def read(self, after: int) -> Iterator[tuple[int, pa.Table]]:
        """The segments after a sequence, in order, as far as there are.

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
        """SHA-256 (first 16 hex digits) of what was changed after one sequence and up to another."""
        whole = hashlib.sha256()
        for sequence in range(after + 1, until + 1):
            try:
                with self._file(sequence).open("rb") as stream:
                    stream.seek(-_CHECKSUM_BYTES, os.SEEK_END)
                    whole.update(stream.read())
            except OSError as error:
                raise self._fault(sequence, f"cannot be read ({error.strerror})") from error
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
                f"document {_short(change.id)}: its vector must be {self.dimension} finite numbers, got shape {vector.shape}"
            )
        row = {OP: "put", "id": change.id, "text": change.text, VECTOR: vector}
        return row | typed_metadata(change.id, change.metadata, self.metadata)

    def _publish(self, rows: Sequence[Mapping[str, Any]]) -> int:
        columns = [pa.array([row.get(column.name) for row in rows], column.type) for column in self.schema]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.schema) as writer:
            writer.write_table(pa.table(columns, schema=self.schema))
        body = sink.getvalue().to_pybytes()
        partial = self.directory / f".{secrets.token_hex(8)}.partial"
        try:
            if not self._named:
                self.directory.mkdir(parents=True, exist_ok=True)
                for level in self.directory.parents[:2]:  # of this lineage and of all, which another may just have made
                    _sync(level)
                self._named = True
            with partial.open("xb") as stream:
                stream.write(body)
                stream.write(hashlib.sha256(body).digest())
                stream.flush()
                os.fsync(stream.fileno())
            sequence = self._link(partial)
            _sync(self.directory)
        except OSError as error:
            raise LogFault(
                f"changes={self.directory}: cannot be written ({error.strerror}); "
                "give the writer a writable directory with space, and make the change again: it may or may not be kept"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        return sequence

    def _link(self, partial: Path) -> int:
        """Give a whole segment the next free number."""
        sequence = self.last() + 1
        while True:
            try:
                os.link(partial, self._file(sequence))
                return sequence
            except FileExistsError:
                # NFS repeats a request whose answer was lost, and then says that the file is there: it is ours.
                if os.path.samefile(partial, self._file(sequence)):
                    return sequence
                sequence += 1

    def _content(self, sequence: int) -> bytes | None:
        try:
            return self._file(sequence).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._fault(sequence, f"cannot be read ({error.strerror})") from error

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
            f"changes={self.directory}: {self._file(sequence).name} {reason}; restore it, "
            "it and the changes after it are not applied until then"
        )

    def _file(self, sequence: int) -> Path:
        return self.directory / f"{sequence:012d}.arrow"

    def _numbers(self) -> set[int]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise LogFault(
                f"changes={self.directory}: cannot be read ({error.strerror}); give a directory that can"
            ) from error
        return {int(found[1]) for found in map(_NAME.fullmatch, names) if found}


def changes_schema(metadata: Mapping[str, FieldType]) -> pa.Schema:
    """Columns of a segment: those of passages and two more; `_op` is put or delete, where all but `id` is null."""
    return pa.schema([(OP, pa.string()), *passages.schema(metadata), (VECTOR, pa.list_(pa.float32()))])


def typed_metadata(id: str, metadata: Mapping[str, Any], schema: Mapping[str, FieldType]) -> dict[str, Value | None]:
    """A document's metadata as the columns of an index take it; what is left out is null.

    Raises:
        ChangeError: an unknown column, or a value of another type.
    """
    taken: dict[str, Value | None] = dict.fromkeys(schema)
    for name, value in metadata.items():
        where = f"document {_short(id)}: metadata {_short(name)}"
        if name not in schema:
            known = nearest(str(name), schema) if schema else "this index has no metadata columns"
            raise ChangeError(f"{where} is no column of the index; {known}")
        try:
            taken[name] = None if value is None else typed(value, schema[name])
        except ValueError as error:
            raise ChangeError(f"{where}={_short(value)} {error}") from None
    return taken


def _require_text(id: Any, value: Any, name: str) -> None:
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        raise ChangeError(f"document {_short(id)}: its {name} must be text without lone surrogates") from None


def _short(value: Any) -> str:
    return reprlib.repr(value)


def _sync(directory: Path) -> None:
    """Make names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
