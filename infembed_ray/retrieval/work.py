"""What the steps of a build leave behind for the next ones: sorted passages and their vectors.

They do not depend on the index type and outlive interrupted and failed builds. Builds of the same passages and vectors share
them, one at a time. They lie in a directory that all nodes see, or, for an output in an object store, in a folder there. A file
appears whole or not at all, so one that is there is finished. Sorted passages are one record batch a chunk: an actor that
encodes a chunk reads only these bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from infembed_ray.config.retrieval import IndexSettings, Precision
from infembed_ray.retrieval.passages import write_passages
from infembed_ray.retrieval.reuse import NEW, Base
from infembed_ray.retrieval.shard_files import PASSAGES_FILE, VECTORS_FILE
from infembed_ray.retrieval.shards import write_vectors
from infembed_ray.retrieval.spool import spool_file
from infembed_ray.storage import durable
from infembed_ray.storage.leases import lease
from infembed_ray.storage.object_store import room
from infembed_ray.storage.places import (
    Place,
    clear,
    delete,
    delivering,
    listing,
    open_binary,
    read_binary,
    read_json,
    read_text,
    write_json,
)
from infembed_ray.storage.steps import Step

CHUNK_PASSAGES = 512
"""Least passages of a chunk: enough to batch by length; an interruption loses one chunk per actor."""
ENCODED = "encoded"
BASE_FILE = "base.json"
NEW_FILE = "new.json"
REUSED_FILE = "reused.int64"
SIZES_FILE = "sizes.json"
SPOOL = "spool"
_MAX_CHUNK_PASSAGES = 8192
_MAX_CHUNKS = 10_000
"""Chunks of a corpus, beyond which they become larger."""
_LAYOUT = 3
"""Version of these files. Builds of another version do not resume from them."""


@dataclass(frozen=True)
class Chunk:
    """Rows `start` to `start + count` of a shard's passages, of which `new` are encoded, together.

    `number` counts the chunks of the shard.
    """

    shard: int
    number: int
    start: int
    count: int
    new: int

    @property
    def name(self) -> str:
        """Name of the file of the vectors that are encoded."""
        return f"{shard_name(self.shard)}/{ENCODED}/{self.start:010d}-{self.new}.npy"


def chunk_rows(total: int) -> int:
    """Most rows of a chunk of a corpus of `total` passages."""
    return max(CHUNK_PASSAGES, min(_MAX_CHUNK_PASSAGES, total // _MAX_CHUNKS))


def shard_name(shard: int) -> str:
    """Name of a shard's directory."""
    return f"shard-{shard:05d}"


@dataclass(frozen=True)
class Work:
    """The files of a build, in `root`. Every process of the build sees them. Vectors are reused from `base`."""

    root: Place
    base: Base | None = None

    def sizes(self) -> list[int] | None:
        """The passages of each shard; None before the corpus is partitioned."""
        sizes: list[int] | None = read_json(self.root / SIZES_FILE)
        return sizes

    def choose_base(self, latest: str | None) -> str | None:
        """The name of the version whose vectors this build reuses: `latest`, unless an interrupted run began with another one, or none."""
        text = read_text(self.root / BASE_FILE)
        if text is not None:
            return json.loads(text)
        write_json(self.root / BASE_FILE, latest)
        return latest

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Record that the corpus is partitioned."""
        write_json(self.root / SIZES_FILE, list(sizes))

    def spool(self, part: int) -> AbstractContextManager[Path]:
        """Give a directory for the unsorted rows of a part of the corpus, which are kept when the block ends."""
        return delivering(self.root / SPOOL / f"{part:05d}")

    @contextlib.contextmanager
    def spooled(self, shard: int) -> Iterator[list[Path]]:
        """Give the files with the unsorted rows of a shard, one for each part."""
        spool = self.root / SPOOL
        names = sorted(name for name in listing(spool) if name.endswith(f"/{spool_file(shard)}"))
        if isinstance(spool, Path):
            yield [spool / name for name in names]
            return
        with room("build") as directory:
            for name in names:
                spool.download(name, directory / name)
            yield [directory / name for name in names]

    def drop_spool(self) -> None:
        """Delete all unsorted rows."""
        clear(self.root / SPOOL)

    def _file(self, shard: int, name: str) -> Place:
        return self.root / shard_name(shard) / name

    def is_sorted(self, shard: int) -> bool:
        """Whether the passages of a shard are sorted."""
        return self._file(shard, PASSAGES_FILE).is_file()

    def write_sorted(self, shard: int, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
        """Write the passages of a shard, from tables of `chunk_rows` rows by id ascending, and the rows of `base` that have them."""
        known = []
        with (
            delivering(self._file(shard, PASSAGES_FILE)) as file,
            durable.replacing(file) as stream,
            pa.ipc.new_file(stream, schema) as writer,
        ):
            for table in tables:
                writer.write_table(table.combine_chunks())
                known.append(np.full(len(table), NEW) if self.base is None else self.base.rows(table))
            with delivering(self._file(shard, REUSED_FILE)) as reused, durable.replacing(reused) as numbers:
                numbers.write(np.concatenate([np.empty(0, np.int64), *known]).tobytes())
            write_json(self._file(shard, NEW_FILE), [int((rows == NEW).sum()) for rows in known])

    def chunks(self, sizes: Sequence[int]) -> list[Chunk]:
        """The chunks of all shards, in order."""
        rows = chunk_rows(sum(sizes))
        return [
            Chunk(shard, number, start, min(rows, size - start), new)
            for shard, size in enumerate(sizes)
            for number, (start, new) in enumerate(zip(range(0, size, rows), self._new(shard), strict=True))
        ]

    def _new(self, shard: int) -> list[int]:
        return list(json.loads(read_binary(self._file(shard, NEW_FILE))))

    def reused(self, chunk: Chunk) -> np.ndarray:
        """The rows of the base that have a chunk's passages, (count,) int64; `NEW` for the others."""
        with open_binary(self._file(chunk.shard, REUSED_FILE)) as file:
            file.seek(8 * chunk.start)
            return np.frombuffer(file.read(8 * chunk.count), np.int64)

    @contextlib.contextmanager
    def _sorted(self, shard: int) -> Iterator[pa.RecordBatchFileReader]:
        with open_binary(self._file(shard, PASSAGES_FILE)) as file, pa.ipc.open_file(file) as batches:
            yield batches

    def passages(self, chunk: Chunk) -> pa.Table:
        """Read the passages of a chunk."""
        with self._sorted(chunk.shard) as batches:
            return pa.Table.from_batches([batches.get_batch(chunk.number)])

    def new_passages(self, chunk: Chunk) -> pa.Table:
        """Read the passages of a chunk that are to be encoded."""
        passages = self.passages(chunk)
        return passages if chunk.new == chunk.count else passages.filter(pa.array(self.reused(chunk) == NEW))

    def write_encoded(self, chunk: Chunk, vectors: np.ndarray) -> None:
        """Write the vectors of a chunk."""
        with delivering(self.root / chunk.name) as file:
            write_vectors(file, [vectors], len(vectors), vectors.shape[1], str(vectors.dtype))

    def missing(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks with passages that are not encoded yet."""
        there = listing(self.root)
        return [chunk for chunk in chunks if chunk.new and chunk.name not in there]

    def gather(
        self, shard: int, chunks: Sequence[Chunk], directory: Path, dimension: int, precision: Precision
    ) -> None:
        """Write the passages and the vectors of a shard, with these chunks, into a directory of this machine."""
        with self._sorted(shard) as batches:
            numbers = range(batches.num_record_batches)
            tables = (pa.Table.from_batches([batches.get_batch(number)]) for number in numbers)
            count = write_passages(directory / PASSAGES_FILE, batches.schema, tables)
        vectors = (self.vectors(chunk, dimension) for chunk in chunks)
        write_vectors(directory / VECTORS_FILE, vectors, count, dimension, precision)

    def vectors(self, chunk: Chunk, dimension: int) -> np.ndarray:
        """Read the vectors of a chunk, encoded and reused, (n, dimension) float32."""
        vectors = np.empty((chunk.count, dimension), np.float32)
        rows = self.reused(chunk)
        if chunk.new:
            vectors[rows == NEW] = np.load(io.BytesIO(read_binary(self.root / chunk.name)))
        if self.base is not None:
            vectors[rows != NEW] = self.base.vectors(rows[rows != NEW], dimension)
        return vectors

    def delete(self) -> None:
        """Delete everything."""
        delete(self.root / SIZES_FILE)  # first: a build that finds the sizes expects all other files
        clear(self.root)


def work_root(step: Step, settings: IndexSettings) -> Place:
    """Return the place of the work of these passages and vectors, which an interrupted build leaves."""
    decides = {
        "inputs": step.contents,
        "columns": settings.columns,
        "metadata": settings.metadata,
        "shards": settings.shards,
        "dimensions": settings.dimensions,
        "vectors": settings.vectors,
        "layout": [_LAYOUT, CHUNK_PASSAGES],
        **({} if settings.reuse else {"reuse": False}),  # an interrupted build with reuse may have reused vectors
    }
    name = f".{hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]}.encoded"
    return step.root.resolve() / name if step.remote is None else step.remote.parent / name


@contextlib.contextmanager
def work_directory(step: Step, settings: IndexSettings) -> Iterator[Work]:
    """Hold the work of these passages and vectors; InputError if another run holds it."""
    root = work_root(step, settings)
    with lease(root.parent, root.name.strip(".").removesuffix(".encoded"), "output", root.parent):
        if isinstance(root, Path):
            root.mkdir(exist_ok=True)
        yield Work(root)
