"""A shard of an index: a FAISS index and, row for row, the passages in an Arrow file.

Both files are memory-mapped: opening a shard takes no memory, and replicas on one machine share the page cache. Index types
that do not store the vectors unchanged have them in a third file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.config.retrieval import Precision
from infembed_ray.errors import InputError
from infembed_ray.retrieval import faiss_index, shard_files
from infembed_ray.retrieval import lexical as lexicals
from infembed_ray.retrieval.chunks import Chunk
from infembed_ray.retrieval.faiss_import import faiss
from infembed_ray.retrieval.faiss_index import Searcher, calibrate
from infembed_ray.retrieval.lexical import Lexical
from infembed_ray.retrieval.passages import CHUNKS, VectorRows, open_passages
from infembed_ray.retrieval.shard_files import INDEX_FILE, PASSAGES_FILE, VECTORS_FILE, FileChecksums, ShardFacts
from infembed_ray.storage import durable
from infembed_ray.storage.places import Place

_LINKS_AT_ONCE = 1 << 20
_NO_METADATA: Mapping[str, Any] = {}
_TAKE = pc.get_function("take")
"""The kernel itself: the overhead of `Array.take` exceeds the cost of the few rows of a search."""


class Hit(NamedTuple):
    """A passage that a search found; `Index` has an example.

    Attributes:
        id, text: of the passage.
        score: inner product of unit vectors, in [-1, 1].
        metadata: value of each metadata column; dates and times in ISO 8601; None for a missing value.
        chunk: the chunk with this score, before BM25; None if passages are not cut into chunks.
    """

    id: str
    score: float
    text: str
    metadata: Mapping[str, str | int | float | bool | list[str] | None] = _NO_METADATA
    chunk: Chunk | None = None


def shard_name(shard: int) -> str:
    """Name of a shard's directory."""
    return f"shard-{shard:05d}"


def shard_of(passage_id: str, shards: int) -> int:
    """The shard of a passage: a hash of its id, the same in every process."""
    digest = hashlib.blake2b(passage_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


def shards_of(ids: pa.ChunkedArray, shards: int) -> np.ndarray:
    """The shards of passages, as `shard_of`: (n,) int64."""
    encoded = ids.cast(pa.large_binary()).to_pylist()
    digests = b"".join([hashlib.blake2b(id, digest_size=8).digest() for id in encoded])
    return (np.frombuffer(digests, ">u8") % shards).astype(np.int64)


@dataclass(frozen=True)
class Build:
    """How to build the index of a shard.

    Attributes:
        factory: index type; None: chosen by `faiss_index.choose`, which also takes `memory_gib` and `shards`.
        recall_floor: least recall@10.
        lexical: build a lexical index, too.
    """

    factory: str | None = None
    memory_gib: float | None = None
    recall_floor: float = 0.0
    shards: int = 1
    lexical: bool = False


class Shard:
    """An open shard.

    Attributes:
        passages: memory-mapped table of n rows (id, text, metadata), by id ascending.
        rows: the vectors of each passage.
        precision: of the vectors; `Flat` stores those of float16 in float32.
        lexical: BM25 over the same rows; None if it was not built.
    """

    def __init__(
        self, searcher: Searcher, passages: pa.Table, precision: Precision = "float32", lexical: Lexical | None = None
    ) -> None:
        self._searcher = searcher
        self.precision = precision
        self.lexical = lexical
        self.passages = passages
        self.rows = VectorRows.of(passages)
        (self._batch,) = passages.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], passages.schema)]

    def __len__(self) -> int:
        return len(self.passages)

    @classmethod
    def open(cls, root: Place, facts: ShardFacts, gpu: bool = False) -> Shard:
        """Map a shard of the index in `root`; in an object store, copy it to this machine first.

        Args:
            gpu: search on the GPUs of this process; graphs are searched on CPUs.

        Raises:
            InputError: a file is missing, has another size or cannot be opened; or a block of the copy has a wrong checksum.
        """
        directory = shard_files.local_directory(root, facts)
        try:
            passages = open_passages(directory / PASSAGES_FILE)
            if facts.factory.startswith("HNSW"):
                _read_links(directory / INDEX_FILE, VectorRows.of(passages).size)
            index = faiss.read_index(str(directory / INDEX_FILE), faiss.IO_FLAG_MMAP_IFC)
            originals = np.load(directory / VECTORS_FILE, mmap_mode="r") if VECTORS_FILE in facts.checksums else None
            lexical = Lexical.open(directory) if facts.lexical else None
        except (OSError, RuntimeError, ValueError):
            shard_files.verify(directory.parent, replace(facts, name=directory.name))  # names the damaged file
            raise
        return cls(Searcher(index, originals, facts.search, gpu), passages, facts.vectors, lexical)

    def search_rows(self, vectors: np.ndarray, k: int, keep: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Find the passages of each query with the largest inner products, those of the best chunks, by (score, id), descending.

        Args:
            vectors: (queries, d) float32.
            keep: (n,) bool mask of the rows to search; None: all.

        Returns:
            (queries, k) float32 scores and int64 rows, padded with row -1.
        """
        if self.rows.starts is None:
            return self._searcher.search(vectors, k, keep)
        wanted = min(k, len(self) if keep is None else int(np.count_nonzero(keep)))
        of_chunks, count = None if keep is None else self.rows.spread(keep), min(k, self.rows.size)
        scores, rows = np.full((len(vectors), k), -np.inf, np.float32), np.full((len(vectors), k), -1)
        while count < faiss_index.WIDEN * self.rows.size and not (rows[:, :wanted] >= 0).all():
            count *= faiss_index.WIDEN
            found, chunks = self._searcher.search(vectors, min(count, self.rows.size), of_chunks)
            for query, filled in enumerate(chunks >= 0):
                passages = np.searchsorted(self.rows.starts, chunks[query][filled], "right") - 1
                best = np.sort(np.unique(passages, return_index=True)[1])[:k]
                scores[query, : len(best)], rows[query, : len(best)] = found[query][best], passages[best]
        return scores, rows

    def hits(self, rows: np.ndarray, scores: np.ndarray) -> list[list[Hit]]:
        """Fetch the passages of (queries, k) rows with their scores; skips rows below 0."""
        queries, k = rows.shape
        ends = range(k, queries * k + 1, k)
        if rows.size and rows.min() < 0:
            filled = rows >= 0
            ends = np.cumsum(filled.sum(axis=1)).tolist()
            rows, scores = rows[filled], scores[filled]
        every = hits_of(self._batch, scores.ravel(), pa.array(rows.ravel()))
        return [every[start:end] for start, end in zip(chain((0,), ends), ends, strict=False)]

    def take(self, rows: np.ndarray) -> pa.Table:
        """The passages of m rows."""
        return pa.Table.from_batches([self._batch]).take(pa.array(rows))

    def vectors(self, rows: np.ndarray | slice) -> np.ndarray:
        """The encoded vectors of some rows, (rows, d) float32."""
        return self._searcher.vectors(rows)


def _read_links(file: Path, passages: int) -> None:
    """Bring the links of a graph, which its file begins with, into the page cache. FAISS checks all of them when it opens the
    file, and its mapping would read them page by page, 25 times as slowly."""
    with file.open("rb", buffering=0) as stream:
        for _ in range(0, passages * faiss_index.LINK_BYTES, _LINKS_AT_ONCE):
            stream.read(_LINKS_AT_ONCE)


def hits_of(passages: pa.Table | pa.RecordBatch, scores: np.ndarray, rows: pa.Array | None = None) -> list[Hit]:
    """Passages, or some rows of them, as hits with the given scores."""
    names = [name for name in passages.schema.names if name != CHUNKS]  # the last one
    given = passages.columns[: len(names)]
    ids, texts, *columns = (column if rows is None else _TAKE.call([column, rows]) for column in given)
    metadata: Iterable[Mapping[str, Any]] = repeat(_NO_METADATA)
    if columns:
        as_json = (c.cast(pa.string()) if pa.types.is_date(c.type) else c for c in columns)
        listed = [
            [value and value.isoformat() for value in c.to_pylist()] if pa.types.is_timestamp(c.type) else c.to_pylist()
            for c in as_json
        ]
        values = zip(*listed, strict=True)
        metadata = (dict(zip(names[2:], of_row, strict=True)) for of_row in values)
    ids, texts = (column.to_numpy(zero_copy_only=False) for column in (ids, texts))
    return list(map(Hit, ids, scores.tolist(), texts, metadata))


def write_vectors(
    file: Path, blocks: Iterable[np.ndarray], count: int, dimension: int, precision: str = "float32"
) -> None:
    """Write (count, dimension) vectors from blocks to a NumPy file, atomically, rounded to a precision.

    Raises:
        ValueError: their number differs from `count`, or one is not finite.
        OSError: the disk is full.
    """
    dtype = np.dtype(precision).newbyteorder("<")
    header = {"descr": dtype.str, "fortran_order": False, "shape": (count, dimension)}
    written = 0
    with durable.replacing(file) as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for block in blocks:
            rounded = np.ascontiguousarray(block, dtype=dtype)
            if block.ndim != 2 or block.shape[1] != dimension or not np.isfinite(rounded).all():
                raise ValueError(f"vectors from {written} on: must be finite, {dimension} numbers each")
            stream.write(rounded.data)
            written += len(block)
        if written != count:
            raise ValueError(f"{written} vectors instead of {count}")


def build_shard(directory: Path, build: Build) -> ShardFacts:
    """Build the index of a shard whose passages and vectors are written.

    Args:
        directory: holds `PASSAGES_FILE` and `VECTORS_FILE`, row for row. The vectors are deleted if the index stores them.

    Raises:
        InputError: no type fits the memory, the given type needs more vectors, or recall is below the floor.
        OSError: the disk is full.
    """
    table = open_passages(directory / PASSAGES_FILE)
    passages = len(table)
    vectors = np.load(directory / VECTORS_FILE, mmap_mode="r")
    precision: Precision = "float16" if vectors.dtype == np.float16 else "float32"
    if len(vectors) != VectorRows.of(table).size:
        raise ValueError(f"{directory.name}: {passages} passages, {len(vectors)} vectors: must have the same length")
    factory = "Flat"
    if passages:
        limits = build.memory_gib, build.shards, build.factory, precision
        factory = faiss_index.choose(len(vectors), vectors.shape[1], *limits)
    index = faiss_index.build(factory, vectors)
    searcher = Searcher(index, vectors)
    parameters, recall = calibrate(searcher)
    if recall < build.recall_floor:
        best = ", ".join(f"{name} {value}" for name, value in parameters.items())
        fault = f"{directory.name} as {factory} finds {recall:.1%} of the 10 nearest at best ({best})"
        remedy = "allow more memory_gib, give another factory, or lower the floor"
        raise InputError.of("recall_floor", build.recall_floor, fault, remedy)
    with durable.replacing(directory / INDEX_FILE) as stream:  # FAISS's own writer ignores a full disk
        faiss.write_index(index, faiss.PyCallbackIOWriter(stream.write))
    names = [INDEX_FILE, PASSAGES_FILE, VECTORS_FILE]
    if faiss_index.holds_originals(index, precision):
        (directory / VECTORS_FILE).unlink()
        names.remove(VECTORS_FILE)
    if build.lexical:
        few = table.select(["text"]).to_batches(max_chunksize=1024)  # in memory at a time
        lexicals.write(directory, chain.from_iterable(batch.column(0).to_pylist() for batch in few))
        names += [shard_files.TERMS_FILE, shard_files.POSTINGS_FILE]
    return ShardFacts(
        name=directory.name,
        passages=passages,
        factory=factory,
        search=parameters,
        recall_at_10=recall,
        bytes=sum((directory / name).stat().st_size for name in names),
        checksums={name: FileChecksums.measure(directory / name) for name in names},
        vectors=precision,
    )
