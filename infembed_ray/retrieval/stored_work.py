"""The work directory of a build in an object store: no node needs to see another node's files.

An object appears whole or not at all, so one that is there is finished. Sorted passages are stored as one record batch a
chunk: an actor that encodes a chunk reads only these bytes of the object. Files that a worker needs on disk lie in the scratch
directory of its machine until its task ends.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from infembed_ray.object_store import Folder, room
from infembed_ray.places import open_binary
from infembed_ray.retrieval.corpus import spool_file
from infembed_ray.retrieval.passages import write_passages
from infembed_ray.retrieval.shard_files import PASSAGES_FILE, VECTORS_FILE
from infembed_ray.retrieval.shards import write_vectors
from infembed_ray.retrieval.work import SIZES_FILE, SPOOL, Chunk, shard_name


@dataclass(frozen=True)
class StoredWork:
    """A work directory in an object store; the methods are those of `work.Work`."""

    folder: Folder

    def sizes(self) -> list[int] | None:
        """As `Work.sizes`."""
        text = self.folder.read(SIZES_FILE)
        return None if text is None else json.loads(text)

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """As `Work.set_sizes`."""
        self.folder.write(SIZES_FILE, json.dumps(list(sizes)))

    @contextlib.contextmanager
    def spool(self, part: int) -> Iterator[Path]:
        """As `Work.spool`."""
        with room("build") as directory:
            yield directory / SPOOL
            for file in (directory / SPOOL).iterdir():
                self.folder.upload(file, f"{SPOOL}/{part:05d}/{file.name}")

    @contextlib.contextmanager
    def spooled(self, shard: int) -> Iterator[list[Path]]:
        """As `Work.spooled`."""
        with room("build") as directory:
            files = []
            for name in sorted((self.folder / SPOOL).entries()):
                if name.endswith(spool_file(Path("/"), shard).as_posix()):
                    files.append(directory / name)
                    (self.folder / SPOOL).download(name, files[-1])
            yield files

    def drop_spool(self) -> None:
        """As `Work.drop_spool`."""
        (self.folder / SPOOL).clear()

    def is_sorted(self, shard: int) -> bool:
        """As `Work.is_sorted`."""
        return (self.folder / shard_name(shard) / PASSAGES_FILE).is_file()

    def write_sorted(self, shard: int, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
        """As `Work.write_sorted`."""
        with room("build") as directory:
            file = directory / PASSAGES_FILE
            with pa.ipc.new_file(str(file), schema) as writer:
                for table in tables:
                    writer.write_table(table.combine_chunks())
            self.folder.upload(file, f"{shard_name(shard)}/{PASSAGES_FILE}")

    @contextlib.contextmanager
    def _sorted(self, shard: int) -> Iterator[pa.RecordBatchFileReader]:
        with open_binary(self.folder / shard_name(shard) / PASSAGES_FILE) as file, pa.ipc.open_file(file) as batches:
            yield batches

    def passages(self, chunk: Chunk) -> pa.Table:
        """As `Work.passages`."""
        with self._sorted(chunk.shard) as batches:
            return pa.Table.from_batches([batches.get_batch(chunk.number)])

    def write_encoded(self, chunk: Chunk, vectors: np.ndarray) -> None:
        """As `Work.write_encoded`."""
        with room("build") as directory:
            write_vectors(directory / VECTORS_FILE, [vectors], *vectors.shape)
            self.folder.upload(directory / VECTORS_FILE, chunk.name)

    def missing(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """As `Work.missing`."""
        there = self.folder.entries()
        return [chunk for chunk in chunks if chunk.name not in there]

    def gather(self, shard: int, chunks: Sequence[Chunk], directory: Path, dimension: int) -> None:
        """As `Work.gather`."""
        with self._sorted(shard) as batches:
            tables = (
                pa.Table.from_batches([batches.get_batch(number)]) for number in range(batches.num_record_batches)
            )
            count = write_passages(directory / PASSAGES_FILE, batches.schema, tables)
        write_vectors(directory / VECTORS_FILE, map(self.vectors, chunks), count, dimension)

    def vectors(self, chunk: Chunk) -> np.ndarray:
        """As `Work.vectors`."""
        with open_binary(self.folder / chunk.name) as file:
            vectors: np.ndarray = np.load(io.BytesIO(file.read()))
        return vectors

    def delete(self) -> None:
        """As `Work.delete`."""
        if self.sizes() is not None:
            self.folder.delete(SIZES_FILE)  # first: a build that finds the sizes expects all other files
        self.folder.clear()
