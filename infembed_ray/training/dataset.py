"""The records of a run as a memory-mapped Arrow file, which every worker opens by its path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa

from infembed_ray.records import Record, columns_of
from infembed_ray.storage import fingerprint

RECORDS = "records.arrow"
_ROWS = 1024
"""Of every batch of the file but the last."""
_TOKENS = "tokens"
_COLUMNS = [f.name for f in fields(Record)]


class Dataset(Sequence[Record]):
    """Records of a file that `write` made, opened when first read. Only what is read comes into memory; a pickle is the path.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _batches(self) -> list[pa.RecordBatch]:
        with pa.memory_map(str(self.path)) as source:
            reader = pa.ipc.open_file(source)
            return [reader.get_batch(n) for n in range(reader.num_record_batches)]

    @classmethod
    def write(
        cls, path: Path, records: Iterable[Record], count: Callable[[Sequence[Record]], Sequence[int]] | None = None
    ) -> Dataset:
        """Write a file, in bounded memory, and open it. It is either there in whole or not at all.

        Args:
            path: of the file.
            records: in the order in which they are to be numbered.
            count: gives the tokens of each of some records, which are written beside them.
        """
        schema = pa.schema([(name, pa.string()) for name in _COLUMNS])
        if count is not None:
            schema = schema.append(pa.field(_TOKENS, pa.int32()))
        partial = path.with_name(f"{path.name}.partial")
        rest = iter(records)
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            while some := list(islice(rest, _ROWS)):
                rows = [columns_of(record) for record in some]
                columns = {name: [row[name] for row in rows] for name in _COLUMNS}
                if count is not None:
                    columns[_TOKENS] = list(count(some))
                writer.write_batch(pa.RecordBatch.from_pydict(columns, schema=schema))
        partial.replace(path)
        return cls(path)

    def __reduce__(self) -> tuple[type[Dataset], tuple[Path]]:
        return type(self), (self.path,)

    def __len__(self) -> int:
        return _ROWS * (len(self._batches) - 1) + self._batches[-1].num_rows if self._batches else 0

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        batch, row = divmod(range(len(self))[index], _ROWS)
        return Record(**{name: self._batches[batch].column(name)[row].as_py() for name in _COLUMNS})

    def __iter__(self) -> Iterator[Record]:
        for batch in self._batches:
            for row in batch.select(_COLUMNS).to_pylist():
                yield Record(**row)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the contents, the same in whatever format the records came."""
        return fingerprint(self.path)

    @cached_property
    def tokens(self) -> np.ndarray | None:
        """(len) tokens of each record, as they were counted; None if they were not."""
        if not self._batches or _TOKENS not in self._batches[0].schema.names:
            return None
        return np.concatenate([batch.column(_TOKENS).to_numpy() for batch in self._batches])
