"""What the steps of a build leave behind for the next ones: partitioned rows, sorted passages and vectors.

They do not depend on the index type and outlive interrupted builds. A file appears whole or not at all, so one that is there is
finished. Sorted passages are one record batch per chunk: an actor that encodes a chunk reads only these bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.config.retrieval import FieldType, IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.progress import say
from infembed_ray.retrieval import corpus
from infembed_ray.retrieval.passages import position, schema, take, write_passages
from infembed_ray.retrieval.shard_files import PASSAGES_FILE, VECTORS_FILE, ShardFacts, verify_local
from infembed_ray.retrieval.shards import Shard, shards_of, write_vectors
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
    write_json,
)
from infembed_ray.storage.steps import Step

CHUNK_PASSAGES = 512
"""Minimum passages of a chunk: enough to batch by length; an interruption loses one chunk per actor."""
ENCODED = "encoded"
REUSED_FILE = "reused.vectors"
SIZES_FILE = "sizes.json"
SPOOL = "spool"
_MAX_CHUNK_PASSAGES = 8192
_MAX_CHUNKS = 10_000
"""Chunks of a corpus, beyond which they become larger."""
_ROWS_AT_ONCE = 8192
_LAYOUT = 4
"""Version of these files. Builds of another version do not resume from them."""


class DuplicateId(InputError):
    """Two rows of a corpus have one id."""


@dataclass(frozen=True)
class Chunk:
    """Rows `start` to `start + count` of a shard's passages, which are encoded together. `number` counts those of the shard."""

    shard: int
    number: int
    start: int
    count: int

    @property
    def name(self) -> str:
        """Begin of the name of the file with its vectors; the number of passages that were encoded follows."""
        return f"{shard_name(self.shard)}/{ENCODED}/{self.start:010d}"


def chunks_of(sizes: Sequence[int]) -> list[Chunk]:
    """The chunks of all shards, in order."""
    rows = chunk_rows(sizes)
    return [
        Chunk(shard, number, start, min(rows, size - start))
        for shard, size in enumerate(sizes)
        for number, start in enumerate(range(0, size, rows))
    ]


def chunk_rows(sizes: Sequence[int]) -> int:
    """Maximum rows of a chunk of a corpus with these shards."""
    return max(CHUNK_PASSAGES, min(_MAX_CHUNK_PASSAGES, sum(sizes) // _MAX_CHUNKS))


def shard_name(shard: int) -> str:
    """Name of a shard's directory."""
    return f"shard-{shard:05d}"


def partition(
    files: Iterable[Place],
    columns: Mapping[str, str],
    metadata: Mapping[str, FieldType],
    shards: int,
    directory: Path,
) -> tuple[list[int], set[str]]:
    """Write the rows of files of a corpus to one Arrow file per shard in a directory, which is cleared first.

    Args:
        columns: column name of the index -> column name in the corpus.

    Returns:
        Passages of each shard, and the names of the columns of all rows.

    Raises:
        InputError: a file cannot be read, or a row is invalid; see `corpus.rows`.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    typed, sizes, seen = schema(metadata), np.zeros(shards, np.int64), set[str]()
    every = itertools.chain.from_iterable(corpus.rows(file, columns, metadata, seen) for file in files)
    with contextlib.ExitStack() as opened:
        streams = [opened.enter_context(durable.replacing(directory / f"{shard:05d}.arrow")) for shard in range(shards)]
        writers = [opened.enter_context(pa.ipc.new_file(stream, typed)) for stream in streams]
        while some := list(itertools.islice(every, _ROWS_AT_ONCE)):
            table = pa.table(
                [pa.array(values, kind) for values, kind in zip(zip(*some, strict=True), typed.types, strict=True)],
                typed,
            )
            owners = shards_of(table.column("id"), shards)
            counts = np.bincount(owners, minlength=shards)
            table, start = table.take(pa.array(np.argsort(owners, kind="stable"))), 0
            for writer, count in zip(writers, counts.tolist(), strict=True):
                if count:
                    writer.write_table(table.slice(start, count))
                start += count
            sizes += counts
    return sizes.tolist(), seen


def sorted_passages(spooled: Sequence[Path], rows_at_once: int) -> Iterator[pa.Table]:
    """Yield the passages of a shard by id ascending, `rows_at_once` at a time. Only the ids are held in memory.

    Args:
        spooled: files of the shard that `partition` wrote, one for each part of the corpus.

    Raises:
        DuplicateId: two rows have one id.
    """
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(pa.memory_map(str(file))) for file in spooled]
        table = pa.concat_tables([pa.ipc.open_file(file).read_all() for file in files])
        if not len(table):
            return
        order = pc.sort_indices(table.column("id")).to_numpy().astype(np.int64)
        ids = take(table.select(["id"]), order).column("id").combine_chunks()
        if (again := pc.index(pc.equal(ids[1:], ids[:-1]), True).as_py()) >= 0:
            raise DuplicateId.of("corpus", None, f"id {ids[again]} is a duplicate", "ids must be unique")
        for start in range(0, len(order), rows_at_once):
            yield take(table, order[start : start + rows_at_once])


@dataclass(frozen=True)
class Base:
    """The older version whose vectors a build reuses: passages whose id and text are in it are not encoded again.

    Passages of both are sorted by id, so a chunk of new ones is compared with one range of old ones.
    """

    root: Place
    shards: tuple[ShardFacts, ...]

    @cached_property
    def _opened(self) -> dict[int, Shard | None]:
        return {}

    def _shard(self, number: int) -> Shard | None:
        """Verify and open a shard, once; None if it is damaged, which the checksums of the new version would hide."""
        if number not in self._opened:
            facts = self.shards[number]
            try:
                verify_local(self.root, facts)
                self._opened[number] = Shard.open(self.root, facts)
            except InputError as damage:
                say(f"index: no vectors of {facts.name} are reused: {damage}")
                self._opened[number] = None
        return self._opened[number]

    def vectors(self, passages: pa.Table, dimension: int) -> np.ndarray:
        """The vectors of n > 0 passages by id ascending: (n, dimension) float32, NaN for those that are new."""
        vectors = np.full((len(passages), dimension), np.nan, np.float32)
        owners = shards_of(passages.column("id"), len(self.shards))
        for number in np.unique(owners).tolist():
            if (shard := self._shard(number)) is None:
                continue
            own = np.flatnonzero(owners == number)
            given = passages.take(own)
            ids = given.column("id")
            first, last = (position(shard.passages, ids[place].as_py()) for place in (0, -1))
            some = shard.passages.slice(first, last + 1 - first)
            places = pc.index_in(ids, some.column("id").combine_chunks())
            same = pc.equal(given.column("text"), some.column("text").take(places)).fill_null(False).to_numpy()
            vectors[own[same]] = shard.vectors(first + places.filter(same).to_numpy())
        return vectors


@dataclass(frozen=True)
class Work:
    """The files of a build, in `root`, which every process of the build sees.

    Attributes:
        dimension, precision: of the vectors.
    """

    root: Place
    dimension: int
    precision: str

    def sizes(self) -> list[int] | None:
        """The passages of each shard; None before the corpus is partitioned."""
        sizes: list[int] | None = read_json(self.root / SIZES_FILE)
        return sizes

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Record that the corpus is partitioned."""
        write_json(self.root / SIZES_FILE, list(sizes))

    def spool(self, part: int) -> contextlib.AbstractContextManager[Path]:
        """Give a directory for the rows of a part of the corpus by shard, which are kept when the block ends."""
        return delivering(self.root / SPOOL / f"{part:05d}")

    @contextlib.contextmanager
    def spooled(self, shard: int) -> Iterator[list[Path]]:
        """Give the files with the unsorted rows of a shard, one for each part."""
        spool = self.root / SPOOL
        names = sorted(name for name in listing(spool) if name.endswith(f"/{shard:05d}.arrow"))
        if isinstance(spool, Path):
            yield [spool / name for name in names]
            return
        with room("build") as directory:
            for name in names:
                spool.download(name, directory / name)
            yield [directory / name for name in names]

    def drop_spool(self) -> None:
        """Delete the unsorted rows."""
        clear(self.root / SPOOL)

    def _file(self, shard: int, name: str) -> Place:
        return self.root / shard_name(shard) / name

    def is_sorted(self, shard: int) -> bool:
        """Whether the passages of a shard are sorted."""
        return self._file(shard, PASSAGES_FILE).is_file()

    def write_sorted(self, shard: int, typed: pa.Schema, tables: Iterable[pa.Table], base: Base | None) -> None:
        """Write the passages of a shard, from tables of `chunk_rows` rows by id ascending, and the vectors that `base` has."""
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(delivering(self._file(shard, PASSAGES_FILE)))
            stream = opened.enter_context(durable.replacing(file))  # appears last: `is_sorted` looks for it
            vectors = None
            if base is not None:
                reused = opened.enter_context(delivering(self._file(shard, REUSED_FILE)))
                vectors = opened.enter_context(durable.replacing(reused))
            writer = opened.enter_context(pa.ipc.new_file(stream, typed))
            for table in tables:
                writer.write_table(table.combine_chunks())
                if base is not None and vectors is not None:
                    vectors.write(base.vectors(table, self.dimension).astype(self.precision).tobytes())

    @contextlib.contextmanager
    def _sorted(self, shard: int) -> Iterator[pa.RecordBatchFileReader]:
        with open_binary(self._file(shard, PASSAGES_FILE)) as file, pa.ipc.open_file(file) as batches:
            yield batches

    def passages(self, chunk: Chunk) -> pa.Table:
        """Read the passages of a chunk."""
        with self._sorted(chunk.shard) as batches:
            return pa.Table.from_batches([batches.get_batch(chunk.number)])

    def reused(self, chunk: Chunk) -> np.ndarray:
        """The vectors of a chunk that are reused, (count, dimension); NaN for the passages to encode."""
        size = np.dtype(self.precision).itemsize * self.dimension
        try:
            with open_binary(self._file(chunk.shard, REUSED_FILE)) as file:
                file.seek(size * chunk.start)
                read = np.frombuffer(file.read(size * chunk.count), self.precision)
        except FileNotFoundError:
            read = np.full(chunk.count * self.dimension, np.nan, self.precision)
        return read.reshape(chunk.count, self.dimension).copy()

    def write_encoded(self, chunk: Chunk, vectors: np.ndarray, new: int) -> None:
        """Write the vectors of a chunk, of which `new` were encoded."""
        with delivering(self.root / f"{chunk.name}-{new}.npy") as file:
            write_vectors(file, [vectors], len(vectors), self.dimension, self.precision)

    def encoded(self) -> dict[str, int]:
        """Name of each chunk that has its vectors -> how many of them were encoded."""
        names = (name[: -len(".npy")].rpartition("-") for name in listing(self.root) if name.endswith(".npy"))
        return {name: int(new) for name, _, new in names}

    def vectors(self, chunk: Chunk, new: int) -> np.ndarray:
        """Read the vectors of a chunk, of which `new` were encoded, (count, dimension)."""
        vectors: np.ndarray = np.load(io.BytesIO(read_binary(self.root / f"{chunk.name}-{new}.npy")))
        return vectors

    def gather(self, shard: int, chunks: Mapping[Chunk, int], directory: Path) -> None:
        """Write the passages and the vectors of a shard into a directory of this machine.

        Args:
            chunks: the chunks of the shard in order -> how many of their passages were encoded.
        """
        with self._sorted(shard) as batches:
            numbers = range(batches.num_record_batches)
            tables = (pa.Table.from_batches([batches.get_batch(number)]) for number in numbers)
            count = write_passages(directory / PASSAGES_FILE, batches.schema, tables)
        vectors = (self.vectors(chunk, new) for chunk, new in chunks.items())
        write_vectors(directory / VECTORS_FILE, vectors, count, self.dimension, self.precision)

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
    }
    name = f".{hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]}.encoded"
    return step.root.resolve() / name if step.remote is None else step.remote.parent / name


@contextlib.contextmanager
def work_directory(step: Step, settings: IndexSettings, dimension: int) -> Iterator[Work]:
    """Hold the work of these passages and vectors; InputError if another run holds it."""
    root = work_root(step, settings)
    with lease(root.parent, root.name.strip(".").removesuffix(".encoded"), "output", root.parent):
        if isinstance(root, Path):
            root.mkdir(exist_ok=True)
        yield Work(root, dimension, settings.vectors)
