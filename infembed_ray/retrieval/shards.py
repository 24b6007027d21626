"""One shard of an index: vectors in a FAISS index and, row for row, their passages in a memory-mapped Arrow file.

Both files are mapped, not read: opening a shard costs no memory, and replicas on one machine share the page cache. A
type that does not hold the vectors as they are has them in a third file beside it.
"""

from __future__ import annotations

import hashlib
import heapq
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.config import FieldType
from infembed_ray.errors import InputError
from infembed_ray.retrieval import factory as factories
from infembed_ray.retrieval.faiss_import import faiss
from infembed_ray.retrieval.passages import batches, open_passages, row_of, schema, write_passages
from infembed_ray.retrieval.searcher import Searcher, calibrate
from infembed_ray.storage import fingerprint

INDEX_FILE = "index.faiss"
PASSAGES_FILE = "passages.arrow"
VECTORS_FILE = "vectors.npy"

_ROWS_AT_ONCE = 1 << 14
_NO_METADATA: Mapping[str, Any] = {}
_TAKE = pc.get_function("take")
"""Called by itself, because what `Array.take` does around it costs more than the few rows of a search."""


class Hit(NamedTuple):
    """One passage found.

    Attributes:
        score: the inner product of unit vectors, in [-1, 1].
        metadata: the index' columns: text, numbers, true or false, days as in ISO 8601; None where there is none.
    """

    id: str
    score: float
    text: str
    metadata: Mapping[str, str | int | float | bool | None] = _NO_METADATA


def merge(results: Iterable[Sequence[Hit]], k: int) -> list[Hit]:
    """The best `k` hits of several shards' answers to one query, by (score, id), descending."""
    return heapq.nlargest(k, (hit for hits in results for hit in hits), key=lambda hit: (hit.score, hit.id))


def shard_of(passage_id: str, shards: int) -> int:
    """The shard a passage belongs to: the same in every run and process, whatever else the corpus holds."""
    digest = hashlib.blake2b(passage_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


@dataclass(frozen=True)
class Build:
    """How a shard's index is made.

    Attributes:
        factory: FAISS's name of its type; None: chosen.
        memory_gib, shards: see `factory.choose`.
        recall_floor: recall@10 below which there is no shard.
        gpu: train on this process' GPUs.
    """

    factory: str | None = None
    memory_gib: float | None = None
    recall_floor: float = 0.0
    gpu: bool = False
    shards: int = 1


@dataclass(frozen=True)
class ShardFacts:
    """What an index' manifest says of a shard."""

    name: str
    """Its directory inside the index."""
    passages: int
    factory: str
    search: Mapping[str, int]
    """Parameters that it is searched with: efSearch of graphs, nprobe of lists, rerank (candidates a hit) of lossy types."""
    recall_at_10: float
    """Against exact search, of passages as queries or of made ones, whichever is lower (`searcher.calibrate`); 1 by
    definition for Flat."""
    bytes: int
    """Of its files."""
    checksums: Mapping[str, str]
    """File name -> `storage.fingerprint`."""


class Shard:
    """An open shard. `Shard.write` makes one on disk, `Shard.open` opens it.

    Attributes:
        passages: n rows `id`, `text`, metadata; row i is the passage of vector i. Ids ascend. Memory-mapped.
    """

    def __init__(self, searcher: Searcher, passages: pa.Table) -> None:
        self._searcher = searcher
        self.passages = passages
        (self._batch,) = passages.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], passages.schema)]

    def __len__(self) -> int:
        return len(self._searcher)

    @property
    def schema(self) -> pa.Schema:
        """Of the passages."""
        return self.passages.schema

    # ----------------------------------------------------------------------------------------------- on disk

    @staticmethod
    def write(
        directory: Path,
        ids: Sequence[str],
        texts: Sequence[str],
        vectors: np.ndarray,
        metadata: Mapping[str, Sequence[Any]] | None = None,
        types: Mapping[str, FieldType] | None = None,
        build: Build = Build(),
    ) -> ShardFacts:
        """Write a shard of what is in memory. Its rows are the passages by id.

        Args:
            directory: is made; its name is the shard's.
            ids, texts: n passages, in any order.
            vectors: (n, d) float32, finite unit vectors; n may be 0.
            metadata: column -> n values, of the types that `types` gives.

        Raises:
            ValueError: not as many of each, or an id stands twice.
            InputError: see `build_index`.
        """
        if not len(ids) == len(texts) == len(vectors):
            raise ValueError(f"{len(ids)} ids, {len(texts)} texts, {len(vectors)} vectors: must be as many")
        order = sorted(range(len(ids)), key=lambda row: ids[row])
        columns = {"id": ids, "text": texts, **(metadata or {})}
        table = pa.table({n: [v[row] for row in order] for n, v in columns.items()}, schema=schema(types or {}))
        directory.mkdir(parents=True, exist_ok=True)
        write_passages(directory / PASSAGES_FILE, table.schema, batches(table, _ROWS_AT_ONCE))
        write_vectors(directory / VECTORS_FILE, [vectors[order]] if order else [], len(ids), vectors.shape[1])
        return build_shard(directory, build)

    @classmethod
    def open(cls, root: Path, facts: ShardFacts, gpu: bool = False) -> Shard:
        """Map the shard `facts` describes in the index directory `root`.

        Args:
            gpu: search on this process' GPUs; graphs are searched by the CPU all the same.

        Raises:
            InputError: a file is missing or is not, byte for byte, the one that was written.
        """
        verify(root, facts)
        directory = root / facts.name
        index = faiss.read_index(str(directory / INDEX_FILE), faiss.IO_FLAG_MMAP_IFC)
        originals = np.load(directory / VECTORS_FILE, mmap_mode="r") if VECTORS_FILE in facts.checksums else None
        return cls(Searcher(index, originals, facts.search, gpu), open_passages(directory / PASSAGES_FILE))

    # ------------------------------------------------------------------------------------------------ search

    def search(self, vectors: np.ndarray, k: int, keep: np.ndarray | None = None) -> list[list[Hit]]:
        """The best passages of each query by inner product, best first; equal scores by id, descending.

        Args:
            vectors: (queries, d) float32.
            k: most hits a query; fewer come if the shard has fewer.
            keep: (n,) bool: rows that may be found; None: all.
        """
        scores, rows = self.search_rows(vectors, k, keep)
        return self.hits(rows, scores)

    def search_rows(self, vectors: np.ndarray, k: int, keep: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The same as (queries, k) float32 scores and int64 rows; row -1 where there are no more."""
        return self._searcher.search(vectors, k, keep)

    def hits(self, rows: np.ndarray, scores: np.ndarray) -> list[list[Hit]]:
        """The passages of (queries, k) rows with their scores; rows below 0 are left out."""
        queries, k = rows.shape
        ends = range(k, queries * k + 1, k)
        if rows.size and rows.min() < 0:
            found = rows >= 0
            ends = np.cumsum(found.sum(axis=1)).tolist()
            rows, scores = rows[found], scores[found]
        every = hits_of(self._batch, rows.ravel(), scores.ravel())
        return [every[start:end] for start, end in zip(chain((0,), ends), ends, strict=False)]

    def vectors(self, rows: np.ndarray | slice) -> np.ndarray:
        """(rows, d) float32: vectors of passages as they were encoded."""
        return self._searcher.vectors(rows)

    def row_of(self, id: str) -> int | None:
        """The row of a passage; None: it is not here."""
        return row_of(self.passages, id)


def hits_of(passages: pa.RecordBatch, rows: np.ndarray, scores: np.ndarray) -> list[Hit]:
    """The passages of m rows as hits with these scores."""
    wanted = pa.array(rows)
    ids, texts, *columns = (_TAKE.call([column, wanted]) for column in passages.columns)
    metadata: Iterable[Mapping[str, Any]] = repeat(_NO_METADATA)
    if columns:
        values = zip(*(_as_json(column).to_pylist() for column in columns), strict=True)
        names = passages.schema.names[2:]
        metadata = (dict(zip(names, of_row, strict=True)) for of_row in values)
    return list(
        map(Hit, ids.to_numpy(zero_copy_only=False), scores.tolist(), texts.to_numpy(zero_copy_only=False), metadata)
    )


def _as_json(column: Any) -> Any:
    """Days as text."""
    return column.cast(pa.string()) if pa.types.is_date(column.type) else column


# ----------------------------------------------------------------------------------------------------- writing


def write_vectors(file: Path, blocks: Iterable[np.ndarray], count: int, dimension: int) -> None:
    """Write (count, dimension) float32 vectors that come some at a time; the file appears whole or not at all.

    Raises:
        ValueError: there are not so many, or one is not finite.
        OSError: the disk is full.
    """
    partial = file.with_name(f"{file.name}.partial")
    header = {"descr": "<f4", "fortran_order": False, "shape": (count, dimension)}
    written = 0
    with partial.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for block in blocks:
            if block.ndim != 2 or block.shape[1] != dimension or not np.isfinite(block).all():
                raise ValueError(f"vectors {written} and on: must be finite, {dimension} numbers each")
            stream.write(np.ascontiguousarray(block, dtype="<f4").data)
            written += len(block)
        stream.flush()
        os.fsync(stream.fileno())
    if written != count:
        raise ValueError(f"{written} vectors came instead of {count}")
    partial.replace(file)


def build_shard(directory: Path, build: Build) -> ShardFacts:
    """Make the index of a shard whose passages and vectors are written.

    Args:
        directory: holds `PASSAGES_FILE` and `VECTORS_FILE`, row for row. The vectors are deleted if the index holds them.

    Raises:
        InputError: nothing fits the memory, the given type cannot be made of so many vectors, or its recall is below the
            floor.
        OSError: the disk is full.
    """
    passages = open_passages(directory / PASSAGES_FILE).num_rows
    vectors = np.load(directory / VECTORS_FILE, mmap_mode="r")
    if len(vectors) != passages:
        raise ValueError(f"{directory.name}: {passages} passages, {len(vectors)} vectors: must be as many")
    factory = "Flat"
    if passages:
        factory = factories.choose(passages, vectors.shape[1], build.memory_gib, build.shards, build.factory)
    index = factories.build(factory, vectors, build.gpu)
    searcher = Searcher(index, vectors)
    parameters, recall = calibrate(searcher)
    if recall < build.recall_floor:
        raise InputError(
            f"recall_floor={build.recall_floor:g}: {directory.name} as {factory} finds {recall:.1%} of the 10 nearest, at "
            f"best ({_told(parameters)}); allow it more memory_gib, give another factory, or lower the floor"
        )
    _write_index(index, directory / INDEX_FILE)
    names = [INDEX_FILE, PASSAGES_FILE, VECTORS_FILE]
    if factories.holds_originals(index):
        (directory / VECTORS_FILE).unlink()
        names.remove(VECTORS_FILE)
    return ShardFacts(
        name=directory.name,
        passages=passages,
        factory=factory,
        search=parameters,
        recall_at_10=recall,
        bytes=sum((directory / name).stat().st_size for name in names),
        checksums={name: fingerprint(directory / name) for name in names},
    )


def _told(parameters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parameters.items())


def _write_index(index: Any, file: Path) -> None:
    """Write an index through a stream of ours: FAISS's own closes without an error what the disk had no room for."""
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("wb") as stream:
        faiss.write_index(index, faiss.PyCallbackIOWriter(stream.write))
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


def verify(root: Path, facts: ShardFacts) -> None:
    """Read a shard's files whole, in bounded memory.

    Raises:
        InputError: one is missing, or not the one that was written.
    """
    for name, checksum in facts.checksums.items():
        file = root / facts.name / name
        if not file.is_file():
            raise InputError(f"index={root}: {facts.name}/{name} is missing; restore it or build the index again")
        if fingerprint(file) != checksum:
            raise InputError(
                f"index={root}: {facts.name}/{name} is corrupted (its checksum is not the manifest's); "
                "restore it or build the index again"
            )
