"""Dataset: the records of a run in a memory-mapped Arrow file, which every worker opens by its path.

A node without that path copies the file from an object store, once for all its workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, overload

import pyarrow as pa

from infembed_ray.records import tuples
from infembed_ray.records.tables import Record
from infembed_ray.records.tuples import Example, TrainingRecord
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import Place, address, listing
from infembed_ray.storage.steps import fingerprint, resolve_input

RECORDS = "records.arrow"
_ROWS = 1024
"""Rows per record batch of the file; the last batch may have fewer."""
_COLUMNS = {kind: [f.name for f in fields(kind)] for kind in (Record, Example)}
_SCHEMA = pa.unify_schemas([pa.schema([(name, pa.string()) for name in _COLUMNS[Record]]), tuples.SCHEMA])
"""Columns of both kinds of records; a row has those of its own kind, and the others are null."""


class Dataset(Sequence[TrainingRecord]):
    """Records of a file that `write` wrote; the file is opened on the first read, and a pickle holds only its place."""

    def __init__(self, path: Place) -> None:
        self.path = path

    def uploaded(self, folder: Folder) -> Dataset:
        """Upload the file to a run's folder, unless an earlier attempt did: nodes keep a copy of each object's version."""
        assert isinstance(self.path, Path)
        target = folder / self.path.name
        if listing(target).get("") != self.path.stat().st_size:
            folder.upload(self.path, self.path.name)
        return Dataset(target)

    @cached_property
    def _batches(self) -> list[pa.RecordBatch]:
        with pa.memory_map(str(resolve_input(address(self.path), "records"))) as source:
            reader = pa.ipc.open_file(source)
            return [reader.get_batch(n) for n in range(reader.num_record_batches)]

    @classmethod
    def write(cls, path: Path, records: Iterable[TrainingRecord]) -> Dataset:
        """Write records to a file atomically, in bounded memory, and open it."""
        rest = iter(records)
        with durable.replacing(path) as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
            while some := list(islice(rest, _ROWS)):
                rows = [vars(record) for record in some]
                columns = {name: [row.get(name) for row in rows] for name in _SCHEMA.names}
                writer.write_batch(pa.RecordBatch.from_pydict(columns, schema=_SCHEMA))
        return cls(path)

    def __reduce__(self) -> tuple[type[Dataset], tuple[Place]]:
        return type(self), (self.path,)

    def __len__(self) -> int:
        return _ROWS * (len(self._batches) - 1) + self._batches[-1].num_rows if self._batches else 0

    @overload
    def __getitem__(self, index: int) -> TrainingRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[TrainingRecord]: ...

    def __getitem__(self, index: int | slice) -> TrainingRecord | list[TrainingRecord]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        batch, row = divmod(range(len(self))[index], _ROWS)
        return _record({name: self._batches[batch].column(name)[row].as_py() for name in _SCHEMA.names})

    def __iter__(self) -> Iterator[TrainingRecord]:
        for batch in self._batches:
            yield from map(_record, batch.to_pylist())

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the contents (16 hex digits), whatever the format of the input."""
        return fingerprint(self.path)


def _record(row: Mapping[str, Any]) -> TrainingRecord:
    """Make the record or example that was written as a row."""
    kind = Example if row["query"] is not None else Record
    values: dict[str, Any] = {name: row[name] for name in _COLUMNS[kind]}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return kind(**values)
