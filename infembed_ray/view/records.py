"""Pages of a synthesis output: kept and rejected rows and dead letters, with search and filters.

Memory holds the filter columns of all rows as integer codes, 4 bytes a value. Texts stay in the Parquet files: a search
scans them once and its result is kept, and a page reads only the row groups of its rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from infembed_ray.errors import InputError, in_one_line
from infembed_ray.records.tables import COMPLEMENTS_FILE, DEAD_LETTER_FILE, KEPT_FILE, REJECTED_FILE
from infembed_ray.storage.places import Place, open_binary
from infembed_ray.view.parquet import open_dataset, scan

FILES = {"kept": KEPT_FILE, "rejected": REJECTED_FILE, "dead letter": DEAD_LETTER_FILE}
"""Kind of a row -> its file. An output of an older version may lack the last two."""
FILTERS = ("kind", "step", "reason", "source", "topic", "split", "language")
ROWS = 20
"""Rows of a page."""
CHOICES = 100
"""Values that a filter lists, the most frequent first. A chosen value is listed too."""
_SEARCHES = 16
"""Searches whose results are kept: one byte a row each."""


class RecordsQuery(BaseModel):
    """Which page of which rows. A filter that is None takes all rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    q: str = Field("", max_length=200)
    """Words that a row must contain, in any of its texts, ids or reasons; case does not matter."""
    page: int = Field(1, ge=1, le=1_000_000)
    kind: str | None = None
    step: str | None = None
    reason: str | None = None
    """Of a rejected row; of a dead letter, its error."""
    source: str | None = None
    topic: str | None = None
    split: str | None = None
    language: str | None = None


@dataclass(frozen=True)
class _File:
    kind: str
    path: Place
    metadata: pq.FileMetaData
    first: int
    """Number of its first row in the output."""

    @property
    def groups(self) -> np.ndarray:
        """First row of every row group in the file, and the number of rows."""
        counts = (self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups))
        return np.cumsum([0, *counts])

    def filter_column(self, name: str) -> pa.ChunkedArray:
        """Return a filter column; nulls if the file lacks it."""
        rows, schema = self.metadata.num_rows, self.metadata.schema.to_arrow_schema()
        column = "error" if name == "reason" and "error" in schema.names else name
        if name == "kind":
            return pa.chunked_array([pa.repeat(self.kind, rows)])
        if column not in schema.names:
            return pa.chunked_array([pa.nulls(rows, pa.string())])
        with self.open() as parquet:
            return parquet.read([column])[column].cast(pa.string())

    @contextmanager
    def open(self) -> Iterator[pq.ParquetFile]:
        """Open the file."""
        with open_binary(self.path) as source:
            yield pq.ParquetFile(source, metadata=self.metadata)


@dataclass(frozen=True)
class _Filter:
    values: list[str]
    codes: np.ndarray
    """(rows) Index into `values`; -1 for null."""

    @property
    def varies(self) -> bool:
        """Whether the rows differ in it; null is a value of its own."""
        return bool(self.codes.size) and bool((self.codes != self.codes[0]).any())

    def matches(self, value: str) -> np.ndarray:
        return self.codes == (self.values.index(value) if value in self.values else len(self.values))

    def count(self, rows: np.ndarray, chosen: str | None) -> list[dict[str, Any]]:
        """Count the values in some rows, the most frequent first; the chosen value also if it is rarer than those."""
        codes = self.codes[rows]
        counts = np.bincount(codes[codes >= 0], minlength=len(self.values))
        listed = np.argsort(-counts, kind="stable")[:CHOICES].tolist()
        if chosen in self.values and (place := self.values.index(chosen)) not in listed:
            listed.append(place)
        return [{"value": self.values[i], "count": int(counts[i])} for i in listed if counts[i]]


class Records:
    """The rows of a synthesis output; InputError if a file is not readable as Parquet."""

    query = RecordsQuery

    def __init__(self, directory: Place) -> None:
        self._files: list[_File] = []
        self.rows = 0
        complements = directory / COMPLEMENTS_FILE
        try:
            for kind, name in FILES.items():
                if (directory / name).is_file():
                    with open_binary(directory / name) as source:
                        file = _File(kind, directory / name, pq.read_metadata(source), self.rows)
                    self._files.append(file)
                    self.rows += file.metadata.num_rows
            self._filters = {name: self._filter(name) for name in FILTERS}
            self._complements = open_dataset(complements) if complements.is_file() else None
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"DIR={directory}: not readable ({in_one_line(error)}); run the stage again") from error
        self._search = lru_cache(_SEARCHES)(self._scan)

    def page(self, asked: RecordsQuery) -> dict[str, Any]:
        """Return one page of rows, the number of rows that match, and what each filter can be set to."""
        masks = {
            name: self._filters[name].matches(value) for name in FILTERS if (value := getattr(asked, name)) is not None
        }
        if words := asked.q.lower().split():
            masks["q"] = self._search(tuple(dict.fromkeys(words)))
        shown = [name for name in FILTERS if name == "kind" or self._filters[name].varies]
        matching = np.flatnonzero(self._all(masks))
        numbers = matching[(asked.page - 1) * ROWS : asked.page * ROWS]
        return {
            "total": self.rows,
            "matching": len(matching),
            "pages": -(-len(matching) // ROWS),
            "filters": {
                # A filter offers what the other conditions leave, so that its value can be changed.
                name: self._filters[name].count(
                    self._all({n: mask for n, mask in masks.items() if n != name}), getattr(asked, name)
                )
                for name in shown
            },
            "rows": self._with_complements(list(self._read(numbers))),
        }

    def _all(self, masks: Mapping[str, np.ndarray]) -> np.ndarray:
        return reduce(operator.and_, masks.values(), np.ones(self.rows, dtype=bool))

    def _filter(self, name: str) -> _Filter:
        chunks = [chunk for file in self._files for chunk in file.filter_column(name).chunks]
        encoded = pa.chunked_array(chunks, pa.string()).combine_chunks().dictionary_encode()
        return _Filter(encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False))

    def _scan(self, words: tuple[str, ...]) -> np.ndarray:
        """Return (rows) whether a row contains all words."""
        found = []
        for file in self._files:
            data = open_dataset(file.path)
            columns = [pc.field(field.name) for field in data.schema if pa.types.is_string(field.type)]
            contains = (
                reduce(operator.or_, (pc.match_substring(column, word, ignore_case=True) for column in columns))
                for word in words
            )
            found_all = pc.coalesce(reduce(operator.and_, contains), False)
            found.append(scan(data, {"found": found_all})["found"].to_numpy())
        return np.concatenate(found).astype(bool)  # the type of an empty column is another one

    def _read(self, numbers: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yield rows by their ascending numbers in the output."""
        for file in self._files:
            own = numbers[(numbers >= file.first) & (numbers < file.first + file.metadata.num_rows)] - file.first
            if not own.size:
                continue
            starts = file.groups
            group_of = np.searchsorted(starts, own, side="right") - 1
            with file.open() as parquet:
                for group in np.unique(group_of):
                    rows = parquet.read_row_group(int(group)).take(own[group_of == group] - starts[group])
                    yield from ({"kind": file.kind, **row} for row in rows.to_pylist())

    def _with_complements(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add each kept record's complement instruction, or why there is none."""
        ids = [row["id"] for row in rows if row["kind"] == "kept"]
        if self._complements is None or not ids:
            return rows
        columns = ["id", "instruction_complement", "fault"]
        found = scan(self._complements, columns, pc.field("id").isin(ids)).to_pylist()
        of = {row.pop("id"): row for row in found}
        return [{**row, "complement": of.get(row["id"]) if row["kind"] == "kept" else None} for row in rows]
