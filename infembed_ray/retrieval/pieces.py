"""Divide a corpus into pieces that tasks read side by side, and read a piece as tables of passages.

Parquet and JSONL are read and checked by columns. Rows that columns cannot decide (another type than the setting's, a bad row)
go one by one through `corpus.passage`, which alone defines what a passage may be and names the row. CSV, Arrow and arrays of
JSON are always read row by row, one task a file.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

from infembed_ray import records
from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.places import Place, errors_at, listing, open_binary
from infembed_ray.retrieval.corpus import names_in, passage
from infembed_ray.retrieval.passages import COLUMN_TYPES, TEXT, schema

PARTS = 64
"""Most parts of a corpus, which tasks read side by side."""
PART_BYTES = 64 << 20
"""Bytes of a part, unless the corpus is larger than `PARTS` of them."""
_FILE_BYTES = 1 << 20
"""Least bytes that count for a file: a task reads them from an object store in the time that opening a file takes."""
_BLOCK = 4 << 20
_ROWS_AT_ONCE = 4096
_VISIBLE = "[!-~]"
"""Characters that are no whitespace for certain. Python decides for texts without one."""
_EXACT = 2.0**53
"""From here on, a JSON integer may not be the float64 that it was read as."""
_SOURCES: Mapping[FieldType, tuple[Callable[[pa.DataType], bool], ...]] = {
    "string": (),
    "integer": (pa.types.is_integer,),
    "number": (pa.types.is_integer, pa.types.is_floating),
    "boolean": (pa.types.is_boolean,),
    "date": (pa.types.is_date, lambda kind: pa.types.is_timestamp(kind) and kind.tz is None),
}
"""Arrow types, besides strings, whose values `as_typed` takes for a column type."""


@dataclass(frozen=True)
class Piece:
    """Part of a data file: lines of a JSONL file that begin at bytes `start` to `stop`, or row groups of a Parquet file.

    `stop` is None at the end of the file. Other files have one piece.
    """

    file: Place
    start: int = 0
    stop: int | None = None

    def rows_before(self) -> int:
        """Count the rows of the file before this piece; in a JSONL file, the lines."""
        with open_binary(self.file) as source:
            if self.file.suffix == ".parquet":
                groups = pq.read_metadata(source)
                return sum(groups.row_group(number).num_rows for number in range(self.start))
            lines, text = 0, b"\n"
            for place in range(0, self.start, _BLOCK):
                text = source.read(min(_BLOCK, self.start - place))
                lines += text.count(b"\n")
            return lines + (not text.endswith(b"\n"))


def parts_of(corpus: Place) -> list[dict[int, Piece]]:
    """Divide a corpus into at most `PARTS` parts of similar size; returns number -> piece for each. Numbers follow the files."""
    sizes = {corpus / name: size for name, size in listing(corpus).items()}
    files = records.data_files(corpus, "corpus")
    total = sum(max(sizes[file], _FILE_BYTES) for file in files)
    each = max(PART_BYTES, -(-total // PARTS))
    pieces = dict(enumerate(piece for file in files for piece in _divided(file, -(-sizes[file] // each), sizes[file])))
    parts = min(len(pieces), -(-total // each))
    return [{number: pieces[number] for number in range(part, len(pieces), parts)} for part in range(parts)]


def _divided(file: Place, count: int, size: int) -> Iterator[Piece]:
    end = 0
    if file.suffix == ".jsonl":
        end = size
    elif file.suffix == ".parquet" and count > 1:
        with _reading(file), open_binary(file) as source:
            end = pq.read_metadata(source).num_row_groups
    starts = np.unique(np.linspace(0, end, count + 1).astype(int))[:-1].tolist() or [0]
    for start, stop in itertools.zip_longest(starts, starts[1:]):
        yield Piece(file, start, stop)


@contextlib.contextmanager
def _reading(file: Place) -> Iterator[None]:
    """Name a file that cannot be read in the block, and its damage."""
    with errors_at(file, "corpus"):
        try:
            yield
        except pa.ArrowException:
            deque(records.raw_rows(file, "corpus"), maxlen=0)  # raises InputError
            raise


# ----------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class _Block:
    """Rows of a piece, after `before` others.

    Attributes:
        table: by columns; None if they are read one by one.
        values: number of rows before -> each row with its number. Of a JSONL file, empty lines have a number, too.
    """

    before: int
    table: pa.Table | None
    values: Callable[[int], Iterable[tuple[int, Mapping[str, Any]]]]


def tables(
    piece: Piece, columns: Mapping[str, str], metadata: Mapping[str, FieldType], seen: set[str]
) -> Iterator[pa.Table]:
    """Yield the passages of a piece, some at a time, with their row in the piece as column `_row`.

    Args:
        columns: column name of the index -> column name in the corpus.
        metadata: columns besides id and text, with their types.
        seen: takes the names of the columns of all rows.

    Raises:
        BadRow: an id or a text is empty, or a value has another type.
        InputError: the file cannot be read, or a column is missing.
    """
    first = next(records.raw_rows(piece.file, "corpus"), None)
    if first is None:
        return
    seen.update(first)
    names = names_in(first, piece.file, columns, metadata)

    def by_row(block: _Block, before: int) -> pa.Table:
        made: list[list[Any]] = []
        for number, values in block.values(before):
            seen.update(values)
            made.append([*passage(values, names, metadata, piece.file, number), number])
        return pa.Table.from_pylist([dict(zip(typed.names, row, strict=True)) for row in made], typed)

    typed = schema(metadata).append(pa.field("_row", pa.int64()))
    with _reading(piece.file):
        for block in _blocks(piece, names, metadata, type(first[names["id"]]), seen):
            table = None if block.table is None else _by_column(block.table, names, metadata)
            if table is not None:
                numbers = np.arange(block.before + 1, block.before + 1 + len(table))
                yield table.append_column("_row", pa.array(numbers))
                continue
            try:
                yield by_row(block, block.before)
            except InputError:
                by_row(block, block.before + piece.rows_before())  # the same error, with the row of the file
                raise


def _blocks(
    piece: Piece, names: Mapping[str, str], metadata: Mapping[str, FieldType], id_type: type, seen: set[str]
) -> Iterator[_Block]:
    if piece.file.suffix == ".jsonl":
        yield from _lines(piece, names, metadata, id_type, seen)
    elif piece.file.suffix == ".parquet":
        yield from _row_groups(piece, names)
    else:
        values, before = records.raw_rows(piece.file, "corpus"), 0
        while some := list(itertools.islice(values, _ROWS_AT_ONCE)):
            yield _Block(before, None, partial(_numbered, some))
            before += len(some)


def _each_row(batch: pa.RecordBatch, before: int) -> Iterable[tuple[int, Mapping[str, Any]]]:
    return _numbered(batch.to_pylist(), before)


def _numbered(values: Iterable[Mapping[str, Any]], before: int) -> Iterable[tuple[int, Mapping[str, Any]]]:
    return enumerate(values, start=before + 1)


def _row_groups(piece: Piece, names: Mapping[str, str]) -> Iterator[_Block]:
    """Blocks of a Parquet file."""
    before = 0
    with open_binary(piece.file) as source, pq.ParquetFile(source, buffer_size=_BLOCK, pre_buffer=False) as file:
        groups = range(piece.start, file.num_row_groups if piece.stop is None else piece.stop)
        wanted = [name for name in dict.fromkeys(names.values()) if name in file.schema_arrow.names]
        for batch in file.iter_batches(_ROWS_AT_ONCE, groups, wanted):
            yield _Block(before, pa.Table.from_batches([batch]), partial(_each_row, batch))
            before += len(batch)


def _lines(
    piece: Piece, names: Mapping[str, str], metadata: Mapping[str, FieldType], id_type: type, seen: set[str]
) -> Iterator[_Block]:
    """Blocks of a JSONL file, in which a row is a line."""
    kinds: dict[FieldType, pa.DataType] = {**COLUMN_TYPES, "date": TEXT}
    types = {names[name]: kinds[kind] for name, kind in metadata.items()}
    types |= {names["id"]: pa.int64() if id_type is int else TEXT, names["text"]: TEXT}
    options = pj.ParseOptions(explicit_schema=pa.schema(types), unexpected_field_behavior="ignore")
    before, stop = 0, math.inf if piece.stop is None else piece.stop
    with open_binary(piece.file) as source:
        stream = io.BufferedReader(source, _BLOCK)
        if piece.start:
            stream.seek(piece.start - 1)
            stream.readline()  # the end of a line that begins before the piece
        place = stream.tell()
        while place < stop and (lines := stream.readlines(int(min(_BLOCK, stop - place)))):
            text = b"".join(lines)
            yield _Block(before, _parsed(text, len(lines), options, seen), partial(_each_line, piece.file, lines))
            before, place = before + len(lines), place + len(text)


def _each_line(file: Place, lines: Sequence[bytes], before: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, start=before + 1):
        for values in records.raw_rows(file, "corpus", [line], number - 1):
            yield number, values


def _parsed(text: bytes, rows: int, options: pj.ParseOptions, seen: set[str]) -> pa.Table | None:
    """Parse lines of JSON; None if that needs a look at each row."""
    try:
        table = pj.read_json(
            pa.BufferReader(text), pj.ReadOptions(use_threads=False, block_size=len(text) + 1), options
        )
    except (pa.ArrowException, ValueError):
        return None
    for name in table.column_names:
        if table.column(name).null_count < rows:
            seen.add(name)
        elif name not in seen and name.encode() in text:
            return None  # the column may be there, with nulls only
    return table if len(table) == rows else None


def _by_column(table: pa.Table, names: Mapping[str, str], metadata: Mapping[str, FieldType]) -> pa.Table | None:
    """Convert the columns of a file to passages; None if that needs a look at each row."""
    try:
        table.validate(full=True)
        columns = [_texts(table.column(names[name])) for name in ("id", "text")]
        for name, kind in metadata.items():
            present = names[name] in table.column_names
            columns.append(
                _typed(table.column(names[name]), kind) if present else pa.nulls(len(table), COLUMN_TYPES[kind])
            )
        return pa.table(columns, schema(metadata))
    except (pa.ArrowException, ValueError):
        return None


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    column = _plain(column)
    if column.null_count or not (_is_text(column.type) or pa.types.is_integer(column.type)):
        raise ValueError
    column = column.cast(TEXT)
    unsure = column.filter(pc.invert(pc.match_substring_regex(column, _VISIBLE)))
    if not all(text.strip() for text in unsure.to_pylist()):
        raise ValueError
    return column


def _typed(column: pa.ChunkedArray, kind: FieldType) -> pa.ChunkedArray:
    """Convert a column without loss: the result converted back is the column."""
    column = _plain(column)
    if pa.types.is_null(column.type):
        return column.cast(COLUMN_TYPES[kind])
    if not _is_text(column.type) and not any(takes(column.type) for takes in _SOURCES[kind]):
        raise ValueError
    typed = column.cast(COLUMN_TYPES[kind])
    doubtful = kind == "number" and pc.all(pc.less(pc.abs(typed), _EXACT)).as_py() is False
    if doubtful or not typed.cast(column.type).equals(column):
        raise ValueError
    return typed
