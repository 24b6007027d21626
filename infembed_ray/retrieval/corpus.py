"""Read a corpus: validate its rows, partition them into shards, sort each shard by id.

The corpus is read once, in bounded memory (`SPOOL_BYTES`): `partition` appends rows to one file per shard, and
`sorted_passages` sorts a shard, which also finds duplicate ids.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray import durable, records
from infembed_ray.config.base import nearest
from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.places import Place
from infembed_ray.progress import Advance
from infembed_ray.records import Passage
from infembed_ray.retrieval.passages import as_typed, schema, take
from infembed_ray.retrieval.shards import shard_of

SPOOL_BYTES = 64 << 20
"""Bytes of rows in memory, for all shards."""
_OWN = ("id", "text")
_ROW_BYTES = 100
"""Approximate memory of a row besides its text."""
_PROGRESS_ROWS = 10_000


class BadRow(InputError):
    """A row that an index cannot hold; the message names the file, the row, the column and the remedy."""


def require_columns(columns: Mapping[str, str], metadata: Mapping[str, FieldType]) -> None:
    """Raise InputError if the settings `columns` or `metadata` name an impossible column."""
    for name in metadata:
        if name in _OWN or name.startswith("_") or not name:
            raise InputError(
                f"metadata.{name}: this name is reserved; choose another name and set columns.<that name>={name}"
            )
    for name in columns:
        known = [*_OWN, *metadata]
        if name not in known:
            raise InputError(f"columns.{name}: neither id, text nor a metadata column: {nearest(name, known)}")


def partition(
    corpus: Place,
    columns: Mapping[str, str],
    metadata: Mapping[str, FieldType],
    shards: int,
    spool: Path,
    advance: Advance = lambda *_: None,
) -> list[int]:
    """Write the rows of a corpus to one file per shard.

    Args:
        corpus: file, or directory of files.
        columns: column name of the index -> column name in the corpus.
        metadata: columns besides id and text, with their types.
        spool: directory of the files; cleared first.
        advance: called with the number of new rows.

    Returns:
        Passages of each shard.

    Raises:
        BadRow: an id or a text is empty, or a value has another type.
        InputError: a file cannot be read, or a column is missing.
    """
    seen: set[str] = set()
    files = enumerate(records.data_files(corpus, "corpus"))
    sizes = partition_files(files, columns, metadata, shards, spool, seen, advance)
    require_passages(corpus, sizes, columns, metadata, seen)
    return sizes


def partition_files(
    files: Iterable[tuple[int, Place]],
    columns: Mapping[str, str],
    metadata: Mapping[str, FieldType],
    shards: int,
    spool: Path,
    seen: set[str],
    advance: Advance = lambda *_: None,
) -> list[int]:
    """As `partition`, of some files of a corpus with their numbers; adds the names of their columns to `seen`."""
    require_columns(columns, metadata)
    shutil.rmtree(spool, ignore_errors=True)
    spool.mkdir(parents=True)
    spooled_schema = pa.schema([*schema(metadata), ("_file", pa.int32()), ("_row", pa.int64())])
    with _Spool(spool, shards, spooled_schema) as spooled:
        for number, file in files:
            place = 0
            for place, row in enumerate(rows(file, columns, metadata, seen), start=1):
                spooled.append(shard_of(row[0], shards), (*row, number, place))
                if place % _PROGRESS_ROWS == 0:
                    advance(_PROGRESS_ROWS)
            advance(place % _PROGRESS_ROWS)
        return spooled.rows


def require_passages(
    corpus: Place, sizes: Sequence[int], columns: Mapping[str, str], metadata: Mapping[str, FieldType], seen: set[str]
) -> None:
    """InputError if a corpus has no rows, or a metadata column is in none of them."""
    if not sum(sizes):
        raise InputError(f"corpus={corpus}: empty, it has no rows; give a file with at least one")
    require_metadata(corpus, columns, metadata, seen)


def require_metadata(
    corpus: Place, columns: Mapping[str, str], metadata: Mapping[str, FieldType], seen: set[str]
) -> None:
    """InputError if a metadata column is in no row; `seen` has the columns of all rows."""
    for name in metadata:
        theirs = columns.get(name, name)
        if theirs not in seen:
            raise InputError(
                f"metadata.{name}: no row of corpus={corpus} has a column {theirs}: {nearest(theirs, sorted(seen))}; "
                f"set columns.{name}=<its name>, or drop it"
            )


def spool_file(spool: Path, shard: int) -> Path:
    """The file of a shard that `partition` writes."""
    return spool / f"{shard:05d}.arrow"


class _Spool:
    """One Arrow file of rows per shard; rows in memory are flushed at `SPOOL_BYTES`."""

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
            with file.open("rb") as written:  # a resumed build relies on it after a power failure
                durable.sync(written)


def rows(
    file: Place, columns: Mapping[str, str], metadata: Mapping[str, FieldType], seen: set[str]
) -> Iterator[tuple[Any, ...]]:
    """Yield (id, text, *metadata) of each row; adds the column names of the file to `seen`."""
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
            fault, shown = str(error), repr(values.get(column))
            if not fault.startswith("is "):  # then the value itself explains the fault
                fault += f", not {shown if len(shown) <= 60 else f'{shown[:57]}...'}; correct it or drop the row"
            raise BadRow(f"corpus={file}: row {number}: column {column} {fault}") from None
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


def sorted_passages(
    spooled: Sequence[Path], files: Sequence[Place], metadata: Mapping[str, FieldType], rows_at_once: int
) -> Iterator[pa.Table]:
    """Yield the passages of a shard by id ascending, `rows_at_once` at a time. Only the ids are held in memory.

    Args:
        spooled: files of the shard that `partition_files` wrote, one for each part of the corpus.
        files: of the corpus, in the order of their numbers.

    Raises:
        BadRow: an id is duplicate.
    """
    with contextlib.ExitStack() as sources:
        parts = [pa.ipc.open_file(sources.enter_context(pa.memory_map(str(file)))).read_all() for file in spooled]
        table = pa.concat_tables(parts)
        order = pc.sort_indices(table.column("id")).to_numpy() if len(table) else np.empty(0, np.int64)
        wanted = schema(metadata).names
        yield from (part.select(wanted) for part in _by_id(table, order, files, rows_at_once))


def _by_id(table: pa.Table, order: np.ndarray, files: Sequence[Place], rows_at_once: int) -> Iterator[pa.Table]:
    last: tuple[str, int, int] | None = None
    for start in range(0, len(order), rows_at_once):
        part = take(table, order[start : start + rows_at_once].astype(np.int64))
        for place in zip(*(part.column(name).to_pylist() for name in ("id", "_file", "_row")), strict=True):
            if last is not None and place[0] == last[0]:
                _, file, row = max(last, place)
                raise BadRow(f"corpus={files[file]}: row {row}: id {place[0]} is a duplicate; ids must be unique")
            last = place
        yield part
