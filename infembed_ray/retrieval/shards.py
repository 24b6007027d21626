"""One shard of an index: FAISS vectors and, row for row, their passages in a memory-mapped Arrow file.

Both files are mapped, not read: opening a shard costs no memory, and replicas on one machine share the page cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa

from infembed_ray import records
from infembed_ray.errors import InputError
from infembed_ray.storage import fingerprint

INDEX_FILE = "index.faiss"
PASSAGES_FILE = "passages.arrow"

HNSW_FROM = 10_000
"""Passages from which a shard is searched by an HNSW graph; below, exact search is as fast and exact."""
HNSW_EF = 128
"""Candidates kept while building and searching the graph (efConstruction, efSearch)."""
RECALL_QUERIES = 256
ARROW_BATCH_ROWS = 1 << 14  # far below what overflows the 2 GiB of a string column


@dataclass(frozen=True)
class Hit:
    """One passage found; `score` is the inner product of unit vectors, in [-1, 1]."""

    id: str
    score: float
    text: str


def merge(results: Iterable[Sequence[Hit]], k: int) -> list[Hit]:
    """The best `k` hits of several shards' answers to one query, by (score, id), descending."""
    return heapq.nlargest(k, (hit for hits in results for hit in hits), key=lambda hit: (hit.score, hit.id))


def factory_string(passages: int) -> str:
    """The FAISS index of a shard with this many passages, as `faiss.index_factory` spells it."""
    return "HNSW32" if passages >= HNSW_FROM else "Flat"


@dataclass(frozen=True)
class ShardFacts:
    """What an index' manifest says of a shard."""

    name: str
    """Its directory inside the index."""
    passages: int
    factory: str
    recall_at_10: float
    """Against exact search, with passages of the shard as queries and themselves left out; 1 by definition for Flat."""
    checksums: Mapping[str, str]
    """File name -> `storage.fingerprint`."""


class Shard:
    """An open shard. `Shard.write` makes one on disk, `Shard.open` opens it.

    Args:
        index: FAISS index of n vectors under the inner product.
        passages: n rows `id`, `text`; row i is the passage of vector i.
    """

    def __init__(self, index: faiss.Index, passages: pa.Table) -> None:
        self._index = index
        self._ids = passages.column("id")
        self._texts = passages.column("text")

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @staticmethod
    def write(directory: Path, ids: Sequence[str], texts: Sequence[str], vectors: np.ndarray) -> ShardFacts:
        """Write a shard.

        Args:
            directory: is made; its name is the shard's.
            ids, texts: n passages.
            vectors: (n, d) float32, finite unit vectors; n may be 0.
        """
        if not len(ids) == len(texts) == len(vectors):
            raise ValueError(f"{len(ids)} ids, {len(texts)} texts, {len(vectors)} vectors: must be as many")
        directory.mkdir(parents=True, exist_ok=True)
        table = pa.table({"id": ids, "text": texts}, schema=records.PASSAGE)
        with pa.ipc.new_file(directory / PASSAGES_FILE, records.PASSAGE) as writer:
            writer.write_table(table, max_chunksize=ARROW_BATCH_ROWS)

        factory = factory_string(len(ids))
        index: Any = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        if factory.startswith("HNSW"):
            index.hnsw.efConstruction = index.hnsw.efSearch = HNSW_EF
        index.add(np.ascontiguousarray(vectors, dtype=np.float32))
        faiss.write_index(index, str(directory / INDEX_FILE))
        return ShardFacts(
            name=directory.name,
            passages=len(ids),
            factory=factory,
            recall_at_10=1.0 if factory == "Flat" else recall_at_10(index, vectors),
            checksums={name: fingerprint(directory / name) for name in (INDEX_FILE, PASSAGES_FILE)},
        )

    @classmethod
    def open(cls, root: Path, facts: ShardFacts) -> Shard:
        """Map the shard `facts` describes in the index directory `root`.

        Raises:
            InputError: a file is missing or is not, byte for byte, the one that was written.
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
        index = faiss.read_index(str(root / facts.name / INDEX_FILE), faiss.IO_FLAG_MMAP_IFC)
        return cls(index, pa.ipc.open_file(pa.memory_map(str(root / facts.name / PASSAGES_FILE))).read_all())

    def search(self, vectors: np.ndarray, k: int) -> list[list[Hit]]:
        """The best passages of each query by inner product, best first; equal scores by id, descending.

        Args:
            vectors: (queries, d) float32.
            k: most hits a query; fewer come if the shard has fewer.
        """
        scores, rows = self._index.search(np.ascontiguousarray(vectors, dtype=np.float32), k)
        return [
            merge([[self._hit(int(r), float(s)) for r, s in zip(*found, strict=True) if r >= 0]], k)
            for found in zip(rows, scores, strict=True)
        ]

    def _hit(self, row: int, score: float) -> Hit:
        return Hit(self._ids[row].as_py(), score, self._texts[row].as_py())


def recall_at_10(index: faiss.Index, vectors: np.ndarray) -> float:
    """Share of the exact 10 nearest neighbours that the index finds, over a fixed sample of its own vectors.

    Args:
        index: holds `vectors`, in their order.
        vectors: (n, d) float32, n > 10. A vector is not counted among its own neighbours.
    """
    sample = np.random.default_rng(0).choice(len(vectors), min(RECALL_QUERIES, len(vectors)), replace=False)
    _, exact = faiss.knn(vectors[sample], vectors, 11, faiss.METRIC_INNER_PRODUCT)
    _, found = index.search(vectors[sample], 11)

    def neighbours(row: int, ranking: np.ndarray) -> set[int]:
        return set([int(other) for other in ranking if other != row][:10])

    shares = [len(neighbours(r, e) & neighbours(r, f)) / 10 for r, e, f in zip(sample, exact, found, strict=True)]
    return round(float(np.mean(shares)), 4)
