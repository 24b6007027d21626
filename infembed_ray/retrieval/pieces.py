"""Divide a corpus into pieces that tasks read side by side, and read a piece as tables of passages.

A Parquet file is divided at its row groups, a JSONL file at its lines. Other files are one piece each.
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
import pyarrow.parquet as pq

from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.records import tables as readers
from infembed_ray.retrieval.corpus import names_in, passage
from infembed_ray.retrieval.passages import schema
from infembed_ray.storage.places import Place, errors_at, listing, open_binary

PARTS = 64
"""Most parts of a corpus, which tasks read side by side."""
PART_BYTES = 64 << 20
"""Bytes of a part, unless the corpus is larger than `PARTS` of them."""
_FILE_BYTES = 1 << 20
"""Least bytes that count for a file: a task reads them from an object store in the time that opening a file takes."""
_BLOCK = 4 << 20
_ROWS_AT_ONCE = 4096


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
    files = readers.data_files(corpus, "corpus")
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
            deque(readers.raw_rows(file, "corpus"), maxlen=0)  # raises InputError
            raise


def tables(
    piece: Piece, columns: Mapping[str, str], metadata: Mapping[str, FieldType], seen: set[str]
) -> Iterator[pa.Table]:
    """Yield the passages of a piece, some at a time, with their row in the piece as column `_row`.

    Args:
        columns: column name of the index -> column name in the corpus.
        seen: takes the names of the columns of all rows.

    Raises:
        BadRow: an id or a text is empty, or a value has another type.
        InputError: the file cannot be read, or a column is missing.
    """
    first = next(readers.raw_rows(piece.file, "corpus"), None)
    if first is None:
        return
    seen.update(first)
    names = names_in(first, piece.file, columns, metadata)
    typed = schema(metadata).append(pa.field("_row", pa.int64()))

    def table(rows: Numbered) -> pa.Table:
        made = []
        for number, values in rows:
            seen.update(values)
            row = [*passage(values, names, metadata, piece.file, number), number]
            made.append(dict(zip(typed.names, row, strict=True)))
        return pa.Table.from_pylist(made, typed)

    with _reading(piece.file):
        for rows_after in _lines(piece) if piece.file.suffix == ".jsonl" else _rows(piece, names):
            try:
                yield table(rows_after(0))
            except InputError:
                table(rows_after(piece.rows_before()))  # the same error, with the row of the file
                raise


Numbered = Iterable[tuple[int, Mapping[str, Any]]]
"""Rows with their numbers."""


def _rows(piece: Piece, names: Mapping[str, str]) -> Iterator[Callable[[int], Numbered]]:
    """Yield some rows at a time, each as a function of the number of rows before the piece."""
    rows = _row_groups(piece, names) if piece.file.suffix == ".parquet" else readers.raw_rows(piece.file, "corpus")
    count = 0
    while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        yield partial(_numbered, some, count)
        count += len(some)


def _numbered(rows: Sequence[Mapping[str, Any]], count: int, before: int) -> Numbered:
    return enumerate(rows, start=before + count + 1)


def _row_groups(piece: Piece, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    with open_binary(piece.file) as source, pq.ParquetFile(source, buffer_size=_BLOCK, pre_buffer=False) as file:
        groups = range(piece.start, file.num_row_groups if piece.stop is None else piece.stop)
        wanted = [name for name in dict.fromkeys(names.values()) if name in file.schema_arrow.names]
        for batch in file.iter_batches(_ROWS_AT_ONCE, groups, wanted):
            yield from batch.to_pylist()


def _lines(piece: Piece) -> Iterator[Callable[[int], Numbered]]:
    """As `_rows`, of a JSONL file, in which a row is a line."""
    count, stop = 0, math.inf if piece.stop is None else piece.stop
    with open_binary(piece.file) as source:
        stream = io.BufferedReader(source, _BLOCK)
        if piece.start:
            stream.seek(piece.start - 1)
            stream.readline()  # the end of a line that begins before the piece
        place = stream.tell()
        while place < stop and (lines := stream.readlines(int(min(_BLOCK, stop - place)))):
            yield partial(_parsed, piece.file, lines, count)
            count, place = count + len(lines), place + sum(map(len, lines))


def _parsed(file: Place, lines: Sequence[bytes], count: int, before: int) -> Numbered:
    numbered = enumerate(lines, start=before + count + 1)
    numbers = [number for number, line in numbered if line.decode(errors="replace").strip()]  # empty lines are no rows
    return zip(numbers, readers.raw_rows(file, "corpus", lines, before + count), strict=True)
