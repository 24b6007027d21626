"""A corpus on its way into an index: checked row by row, dealt to shards, put in the order of its ids.

It is read once, and no more of it is held than `SPOOL_BYTES`: rows go to a file a shard as they come (`deal`), and every
file is sorted for itself (`arrange`), which also shows whether an id stands twice.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray import records
from infembed_ray.config import FieldType, nearest
from infembed_ray.errors import InputError
from infembed_ray.progress import Advance
from infembed_ray.records import Passage
from infembed_ray.retrieval.passages import as_typed, schema, take, write_passages
from infembed_ray.retrieval.shards import shard_of

SPOOL_BYTES = 64 << 20
"""Of rows in memory, of all shards together."""
_OWN = ("id", "text")
_ROW_BYTES = 100
"""About what a row takes in memory beside its text."""
_ROWS_AT_ONCE = 1 << 14
_TOLD_ROWS = 10_000


class BadRow(InputError):
    """A row that no index can hold; the message says which, and what to do."""


def require_columns(columns: Mapping[str, str], metadata: Mapping[str, FieldType]) -> None:
    """InputError if the settings `columns` and `metadata` name what cannot be."""
    for name in metadata:
        if name in _OWN or name.startswith("_") or not name:
            raise InputError(
                f"metadata.{name}: this name is taken; call it otherwise and set columns.<that name>={name}"
            )
    for name in columns:
        known = [*_OWN, *metadata]
        if name not in known:
            raise InputError(f"columns.{name}: neither id, text nor one of metadata: {nearest(name, known)}")


def deal(
    corpus: Path,
    columns: Mapping[str, str],
    metadata: Mapping[str, FieldType],
    shards: int,
    spool: Path,
    advance: Advance = lambda *_: None,
) -> list[int]:
    """Write the rows of a corpus to a file for each shard, as they come.

    Args:
        corpus: file, or directory of files.
        columns: our column name -> the name in the corpus.
        metadata: columns beside id and text.
        spool: directory for the files; what an interrupted run left there is written again.
        advance: is told of the rows read.

    Returns:
        Passages of each shard.

    Raises:
        BadRow: an id or a text is empty, or a value is not of its type; row and column are named.
        InputError: a file cannot be read, or a column is missing.
    """
    require_columns(columns, metadata)
    shutil.rmtree(spool, ignore_errors=True)
    spool.mkdir(parents=True)
    files = records.data_files(corpus, "corpus")
    with _Spool(spool, shards, _spooled(metadata)) as spooled:
        seen: set[str] = set()
        for number, file in enumerate(files):
            place = 0
            for place, row in enumerate(_rows(file, columns, metadata, seen), start=1):
                spooled.append(shard_of(row[0], shards), (*row, number, place))
                if place % _TOLD_ROWS == 0:
                    advance(_TOLD_ROWS)
            advance(place % _TOLD_ROWS)
        if not sum(spooled.rows):
            raise InputError(f"corpus={corpus}: empty, it has no rows; give a file with at least one")
        for name in metadata:
            theirs = columns.get(name, name)
            if theirs not in seen:
                raise InputError(
                    f"metadata.{name}: no row of corpus={corpus} has a column {theirs}: {nearest(theirs, sorted(seen))}; "
                    f"set columns.{name}=<its name>, or drop it"
                )
        return spooled.rows


def _spooled(metadata: Mapping[str, FieldType]) -> pa.Schema:
    """Columns of a spooled row: the passage's, and where it stood."""
    return pa.schema([*schema(metadata), ("_file", pa.int32()), ("_row", pa.int64())])


def spool_file(spool: Path, shard: int) -> Path:
    """Where `deal` writes the rows of a shard."""
    return spool / f"{shard:05d}.arrow"


class _Spool:
    """A file of rows for each shard; what is in memory is written when it is too much."""

    def __init__(self, directory: Path, shards: int, schema: pa.Schema) -> None:
        self.rows = [0] * shards
        self._schema = schema
        self._files = [spool_file(directory, shard) for shard in range(shards)]
        self._writers = [pa.ipc.new_file(str(file), schema) for file in self._files]
        self._pending: list[list[tuple[Any, ...]]] = [[] for _ in range(shards)]
        self._bytes = 0

    def append(self, shard: int, row: tuple[Any, ...]) -> None:
        self._pending[shard].append(row)
        self.rows[shard] += 1
        self._bytes += sum(len(value) for value in row if isinstance(value, str)) + _ROW_BYTES
        if self._bytes > SPOOL_BYTES:
            self._flush()

    def _flush(self) -> None:
        for shard, rows in enumerate(self._pending):
            if rows:
                columns = [pa.array(v, f.type) for v, f in zip(zip(*rows, strict=True), self._schema, strict=True)]
                self._writers[shard].write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
                rows.clear()
        self._bytes = 0

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
        for writer, file in zip(self._writers, self._files, strict=True):
            writer.close()
            with file.open("rb") as written:  # who goes on with it after a power failure must find it whole
                os.fsync(written.fileno())


def _rows(
    file: Path, columns: Mapping[str, str], metadata: Mapping[str, FieldType], seen: set[str]
) -> Iterator[tuple[Any, ...]]:
    """Id, text and metadata of each row of a file; the names of its columns are added to those seen."""
    own = {name: theirs for name, theirs in columns.items() if name in _OWN}
    names: dict[str, str] = {}
    kinds = {columns.get(name, name): kind for name, kind in metadata.items()}
    for number, values in enumerate(records.raw_rows(file, "corpus"), start=1):
        names = names or records.mapping(values, Passage, file, "corpus", own)
        if not seen.issuperset(values):
            seen.update(values)
        column = ""
        try:
            row: list[Any] = []
            for ours in _OWN:
                column = names[ours]
                row.append(_text(values.get(column)))
            for column, kind in kinds.items():
                row.append(as_typed(values.get(column), kind))
        except ValueError as error:
            told = repr(values.get(column))
            shown = told if len(told) <= 60 else f"{told[:57]}..."
            raise BadRow(
                f"corpus={file}: row {number}: column {column} {_fault(values.get(column), error, shown)}"
            ) from None
        yield tuple(row)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None or value != value else str(value)  # NaN is none
    if not text.strip():
        raise ValueError("is empty; fill it or drop the row")
    if isinstance(value, (list, dict, bytes)):
        raise ValueError("must be text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text without lone surrogates") from None
    return text


def _fault(value: Any, error: ValueError, shown: str) -> str:
    """What is wrong with a value; it is shown where there is one."""
    said = str(error)
    return said if said.startswith("is ") else f"{said}, not {shown}; mend it or drop the row"


def arrange(spooled: Path, files: Sequence[Path], metadata: Mapping[str, FieldType], passages: Path) -> None:
    """Write the passages of a shard by id.

    Args:
        spooled: rows as `deal` wrote them; no more than their ids is held in memory.
        files: of the corpus, in the order `deal` read them.
        passages: the file to write.

    Raises:
        BadRow: an id stands twice.
    """
    with pa.memory_map(str(spooled)) as source:
        table = pa.ipc.open_file(source).read_all()
        order = pc.sort_indices(table.column("id")).to_numpy() if len(table) else np.empty(0, np.int64)
        wanted = schema(metadata)
        write_passages(passages, wanted, (part.select(wanted.names) for part in _by_id(table, order, files)))


def _by_id(table: pa.Table, order: np.ndarray, files: Sequence[Path]) -> Iterator[pa.Table]:
    last: tuple[str, int, int] | None = None
    for start in range(0, len(order), _ROWS_AT_ONCE):
        part = take(table, order[start : start + _ROWS_AT_ONCE].astype(np.int64))
        for place in zip(*(part.column(name).to_pylist() for name in ("id", "_file", "_row")), strict=True):
            if last is not None and place[0] == last[0]:
                _, file, row = max(last, place)
                raise BadRow(f"corpus={files[file]}: row {row}: id {place[0]} stands twice; ids must be unique")
            last = place
        yield part
