"""The passages of a shard: id, text and typed metadata in a memory-mapped Arrow file, sorted by id.

A passage is found by bisection over the ids. All rows are one record batch, so fetching a few rows does not touch the others.
"""

import bisect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.config.retrieval import FieldType
from infembed_ray.records.tables import text_of
from infembed_ray.retrieval.filters import Value, typed
from infembed_ray.storage import durable

TEXT = pa.large_string()  # pa.string() holds 2 GiB at most
COLUMN_TYPES: Mapping[FieldType, pa.DataType] = {
    "string": TEXT,
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "datetime": pa.timestamp("us", "UTC"),
    "strings": pa.list_(TEXT),
}
CHUNKS = "_chunks"
"""Last column of passages that are cut into chunks: their `Bounds`."""


def schema(metadata: Mapping[str, FieldType], chunked: bool = False) -> pa.Schema:
    """Arrow schema of passages with these metadata columns, which alone can be null."""
    columns = [("id", TEXT), ("text", TEXT), *((name, COLUMN_TYPES[kind]) for name, kind in metadata.items())]
    return pa.schema([*columns, *[(CHUNKS, pa.list_(pa.uint32()))] * chunked])


@dataclass(frozen=True)
class VectorRows:
    """Which vectors belong to which of n passages.

    Attributes:
        size: number of vectors.
        starts: (n + 1,) the first vector of each passage, one for each of its chunks; None: vector i is that of passage i.
    """

    size: int
    starts: np.ndarray | None = None

    @classmethod
    def of(cls, passages: pa.Table) -> "VectorRows":
        """The vectors of some passages."""
        if CHUNKS not in passages.schema.names:
            return cls(len(passages))
        bounds = pc.list_value_length(passages.column(CHUNKS)).to_numpy()
        starts = np.concatenate([[0], np.cumsum(bounds, dtype=np.int64) // 2])
        return cls(int(starts[-1]), starts)

    @property
    def firsts(self) -> np.ndarray | slice:
        """The first vector of each passage."""
        return slice(None) if self.starts is None else self.starts[:-1]

    def of_passages(self, passages: Sequence[int] | np.ndarray) -> np.ndarray:
        """The vectors of some passages, in their order."""
        if self.starts is None:
            return np.asarray(passages)
        return np.concatenate([np.empty(0, np.int64), *(np.arange(*self.starts[row : row + 2]) for row in passages)])

    def spread(self, values: np.ndarray) -> np.ndarray:
        """The values of all passages, for each of their vectors."""
        return values if self.starts is None else np.repeat(values, np.diff(self.starts))

    def largest(self, scores: np.ndarray) -> np.ndarray:
        """The largest score of each passage, (queries, n), of (queries, size) scores."""
        return scores if self.starts is None or not self.size else np.maximum.reduceat(scores, self.starts[:-1], axis=1)


def as_typed(value: Any, kind: FieldType) -> Value | None:
    """Convert a corpus value to its column type without loss. Strings are parsed; NaN and an empty string are null.

    pandas writes whole numbers as 2020.0 and dates as timestamps: these are read as what they were. ValueError as `typed`.
    """
    if value is None or value != value or (value == "" and kind != "string"):
        return None
    if getattr(value, "nanosecond", 0):
        raise ValueError("must be a time in whole microseconds")
    try:
        converted = _READ[kind](value)
    except (ValueError, KeyError, ArithmeticError):
        converted = value  # `typed` refuses it
    return typed(converted, kind)


_NUMBER = re.compile(r"[-+.eE0-9]+")
"""Stricter than int() and float(), which accept other digits and underscores."""
_EXACT = 1 << 53
"""Whole floats up to here are exact."""


def _number(value: Any) -> Any:
    return Decimal(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _integer(value: Any) -> Any:
    number = _number(value)
    if not isinstance(number, (float, Decimal)):
        return value
    if isinstance(number, float):
        return int(number) if abs(number) <= _EXACT and number.is_integer() else value
    return int(number) if abs(number) < 1 << 64 and number == int(number) else value


def _float(value: Any) -> Any:
    number = _number(value)
    exact = isinstance(number, Decimal) and (isinstance(value, str) or Decimal(repr(float(number))) == number)
    return float(number) if exact else value


def _day(value: Any) -> Any:
    if isinstance(value, str) and len(value) > len("2024-05-31"):
        value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        return value.date().isoformat() if value.time() == time() else value
    return value.isoformat() if isinstance(value, date) else value


def _strings(value: Any) -> Any:
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else [value]
    return [text_of(item, "") for item in value] if isinstance(value, list) else value


_READ: Mapping[FieldType, Callable[[Any], Any]] = {
    "string": lambda value: value.isoformat() if isinstance(value, date) else text_of(value, ""),
    "integer": _integer,
    "number": _float,
    "boolean": lambda value: {"true": True, "false": False}[value.lower()] if isinstance(value, str) else value,
    "date": _day,
    "datetime": lambda value: value.isoformat() if isinstance(value, date) else value,
    "strings": _strings,
}


def open_passages(file: Path) -> pa.Table:
    """Memory-map a file of `write_passages`."""
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def position(passages: pa.Table, id: str) -> int:
    """The row at which an id is, or would be."""
    ids = passages.column("id")
    wanted = id.encode(errors="surrogatepass")
    return bisect.bisect_left(range(len(ids)), wanted, key=lambda row: ids[row].as_buffer().to_pybytes())


def row_of(passages: pa.Table, id: str) -> int | None:
    """The row of a passage; None if there is none."""
    row, ids = position(passages, id), passages.column("id")
    return row if row < len(ids) and ids[row].as_py() == id else None


def take(passages: pa.Table, rows: np.ndarray) -> pa.Table:
    """Take rows of a table with many chunks as one chunk; `Table.take` would copy all chunks."""
    if not len(rows):
        return passages.schema.empty_table()
    chunks = passages.to_batches()
    starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
    of_chunk = np.searchsorted(starts, rows, side="right") - 1
    by_chunk = np.argsort(of_chunk, kind="stable")
    used, firsts = np.unique(of_chunk[by_chunk], return_index=True)
    of_used = zip(used, np.split(by_chunk, firsts[1:]), strict=True)
    parts = [chunks[chunk].take(pa.array(rows[some] - starts[chunk])) for chunk, some in of_used]
    place = np.empty(len(rows), np.int64)
    place[by_chunk] = np.arange(len(rows))
    return pa.Table.from_batches(parts, passages.schema).combine_chunks().take(pa.array(place))


def write_passages(file: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> int:
    """Write passages as one record batch, atomically. They are held in memory.

    Args:
        tables: passages by id ascending, some at a time.

    Returns:
        Number of their vectors.

    Raises:
        ValueError: ids do not ascend, or one is duplicate.
        OSError: the disk is full.
    """
    whole = [table.select(schema.names).cast(schema) for table in tables]
    table = pa.concat_tables([schema.empty_table(), *whole]).combine_chunks()
    ids = table.column("id").combine_chunks()
    wrong = pc.index(pc.less_equal(ids[1:], ids[:-1]), True).as_py()
    if wrong >= 0:
        raise ValueError(f"ids must be unique and ascend: {str(ids[wrong + 1])!r} comes after {str(ids[wrong])!r}")
    with durable.replacing(file) as stream, pa.ipc.new_file(stream, schema) as writer:
        writer.write_table(table)
    return VectorRows.of(table).size
