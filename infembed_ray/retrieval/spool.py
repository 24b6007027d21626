"""Partition a corpus into one file of rows per shard, and sort the rows of a shard by id.

The corpus is read once, in bounded memory (`SPOOL_BYTES`). Sorting also finds duplicate ids.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.config.retrieval import FieldType
from infembed_ray.retrieval.corpus import BadRow
from infembed_ray.retrieval.passages import schema, take
from infembed_ray.retrieval.pieces import Piece, tables
from infembed_ray.retrieval.shards import shards_of
from infembed_ray.storage import durable

SPOOL_BYTES = 64 << 20
"""Bytes of rows in memory, for all shards."""


def partition(
    pieces: Mapping[int, Piece],
    columns: Mapping[str, str],
    metadata: Mapping[str, FieldType],
    shards: int,
    directory: Path,
) -> tuple[list[int], set[str]]:
    """Write the rows of pieces of a corpus to one file per shard.

    Args:
        pieces: by their numbers in the corpus.
        columns: column name of the index -> column name in the corpus.
        directory: of the files; cleared first.

    Returns:
        Passages of each shard, and the names of the columns of all rows.

    Raises:
        BadRow: an id or a text is empty, or a value has another type.
        InputError: a file cannot be read, or a column is missing.
    """
    seen: set[str] = set()
    with _Spool(directory, shards, metadata) as spool:
        for number, piece in pieces.items():
            for table in tables(piece, columns, metadata, seen):
                spool.append(table, number)
    return spool.rows.tolist(), seen


def spool_file(shard: int) -> str:
    """Name of the file of a shard's rows."""
    return f"{shard:05d}.arrow"


class _Spool:
    """One Arrow file of rows per shard in a directory, which is cleared first. Rows in memory are flushed at `SPOOL_BYTES`."""

    def __init__(self, directory: Path, shards: int, metadata: Mapping[str, FieldType]) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self.rows = np.zeros(shards, np.int64)
        self._directory = directory
        self._schema = pa.schema([*schema(metadata), ("_piece", pa.int32()), ("_row", pa.int64())])
        self._writers = [pa.ipc.new_file(str(directory / spool_file(shard)), self._schema) for shard in range(shards)]
        self._pending: list[pa.Table] = []
        self._bytes = 0

    def append(self, table: pa.Table, piece: int) -> None:
        """Add passages of a piece of the corpus, with their rows in it as column `_row`."""
        table = table.append_column("_piece", pa.array(np.full(len(table), piece, np.int32)))
        self._pending.append(table.select(self._schema.names))
        self._bytes += table.nbytes
        if self._bytes > SPOOL_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        table = pa.concat_tables(self._pending).combine_chunks()
        self._pending, self._bytes = [], 0
        shards = shards_of(table.column("id"), len(self._writers))
        counts = np.bincount(shards, minlength=len(self._writers))
        table, start = table.take(pa.array(np.argsort(shards, kind="stable"))), 0
        for writer, count in zip(self._writers, counts.tolist(), strict=True):
            if count:
                writer.write_table(table.slice(start, count))
            start += count
        self.rows += counts

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
        for shard, writer in enumerate(self._writers):
            writer.close()
            with (self._directory / spool_file(shard)).open("rb") as written:  # a resumed build relies on it after a
                durable.sync(written)  # power failure
        durable.sync_directory(self._directory)


def sorted_passages(
    spooled: Sequence[Path], pieces: Mapping[int, Piece], metadata: Mapping[str, FieldType], rows_at_once: int
) -> Iterator[pa.Table]:
    """Yield the passages of a shard by id ascending, `rows_at_once` at a time. Only the ids are held in memory.

    Args:
        spooled: files of the shard that `partition` wrote, one for each part of the corpus.

    Raises:
        BadRow: an id is duplicate.
    """
    with contextlib.ExitStack() as sources:
        parts = [pa.ipc.open_file(sources.enter_context(pa.memory_map(str(file)))).read_all() for file in spooled]
        table = pa.concat_tables(parts)
        order = pc.sort_indices(table.column("id")).to_numpy() if len(table) else np.empty(0, np.int64)
        for start in range(0, len(order), rows_at_once):
            overlap = min(start, 1)
            part = take(table, order[start - overlap : start + rows_at_once].astype(np.int64))
            ids = part.column("id").combine_chunks()
            again = pc.index(pc.equal(ids[1:], ids[:-1]), True).as_py()
            if again >= 0:
                places = part.select(["_piece", "_row"]).slice(again, 2).to_pylist()
                piece, row = max((place["_piece"], place["_row"]) for place in places)
                raise BadRow(
                    f"corpus={pieces[piece].file}: row {pieces[piece].rows_before() + row}: id {ids[again]} is a duplicate; "
                    "ids must be unique"
                )
            yield part.slice(overlap).select(schema(metadata).names)
