"""Chunks of passages, of queries or of (query, passage) pairs, each of which is stored as one array.

A chunk refers to its texts, so it is small to send to another node.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers.retriever import PairReranker, Retriever, TextEncoder
from infembed_ray.evaluation.tasks import corpus as corpora
from infembed_ray.evaluation.tasks.task import CORPUS, Query
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import Place, errors_at

TEXTS = 1024
"""Passages or queries per chunk: enough to batch by length, and the work that a killed actor loses."""
PAIRS = 128
"""Pairs per chunk; pairs take longer."""


# ----------------------------------------------------------------------------------------------------- corpora


def share(corpus: pa.Table, directory: Place) -> Place:
    """Put a corpus into a place that all nodes see, as a file named by its content, which they map into memory.

    A corpus that this machine has converted (`corpus.mapped`) is linked, or written again to another file system.
    """
    file = directory / corpora.name_of(corpus)
    with errors_at(file, "embeddings"):
        copy = _copy_of(file)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # it was not converted here, is there already, or is on another file system
            os.link(corpora.directory() / file.name, copy)
        if not copy.is_file():
            with durable.replacing(copy, shared=True) as target, pa.ipc.new_file(target, CORPUS) as writer:
                for batch in corpora.batches(corpus):
                    writer.write_batch(batch)
        if isinstance(file, Folder) and not file.is_file():
            file.parent.upload(copy, file.name)
    return file


def _copy_of(file: Place) -> Path:
    """Return the path of a shared corpus on this node: the file, or the node's copy of it."""
    return corpora.directory() / file.name if isinstance(file, Folder) else file


@cache
def shared(file: Place) -> pa.Table:
    """Map a corpus that `share` wrote into memory; the first process of a node copies it from an object store.

    Raises:
        InputError: this node does not see the file.
    """
    if isinstance(file, Folder):
        with errors_at(file, "embeddings"):
            copy = _copy_of(file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with durable.exclusive_lock(copy.with_suffix(".lock"), wait=True):
                if not copy.is_file():
                    file.parent.download(file.name, copy)
        file = copy
    if not file.is_file():
        raise InputError(
            f"embeddings={file.parent.parent}: node {platform.node()} does not see {file.name}, which the driver wrote "
            "there; give a directory that all nodes share, or a folder of an object store"
        )
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


# ------------------------------------------------------------------------------------------------------ chunks


@dataclass(frozen=True)
class Passages:
    """Some passages of a shared corpus."""

    corpus: Place
    start: int
    size: int

    @classmethod
    def divide(cls, corpus: Place) -> list[Passages]:
        """Divide a corpus, in its order."""
        rows = shared(corpus).num_rows
        return [cls(corpus, start, min(TEXTS, rows - start)) for start in range(0, rows, TEXTS)]

    def texts(self) -> list[tuple[str | None, ...]]:
        """Return the inputs of each row, which differ between the kinds of chunks."""
        return [("passage", text) for text in self._passages()]

    def compute(self, retriever: Retriever) -> np.ndarray:
        """Compute the array: (size, d) float32, or (size) for pairs."""
        assert isinstance(retriever, TextEncoder)
        return retriever.encode_passages(self._passages())

    def _passages(self) -> list[str]:
        passages: list[str] = shared(self.corpus)["text"].slice(self.start, self.size).to_pylist()
        return passages


@dataclass(frozen=True)
class Queries:
    """Some queries of a task."""

    queries: tuple[Query, ...]

    @classmethod
    def divide(cls, queries: Sequence[Query]) -> list[Queries]:
        """Divide queries, in their order."""
        return [cls(tuple(queries[start : start + TEXTS])) for start in range(0, len(queries), TEXTS)]

    @property
    def size(self) -> int:
        return len(self.queries)

    def texts(self) -> list[tuple[str | None, ...]]:
        return [("query", query.query, query.instruction) for query in self.queries]

    def compute(self, retriever: Retriever) -> np.ndarray:
        assert isinstance(retriever, TextEncoder)
        return retriever.encode_queries(self.queries)


@dataclass(frozen=True)
class Pairs:
    """A query with some passages of a shared corpus."""

    query: Query
    corpus: Place
    rows: tuple[int, ...]

    @classmethod
    def divide(cls, query: Query, corpus: Place, rows: Sequence[int]) -> list[Pairs]:
        """Divide the pairs of a query and passages, in the order of the corpus, not of a ranking."""
        ordered = sorted(rows)
        return [cls(query, corpus, tuple(ordered[start : start + PAIRS])) for start in range(0, len(ordered), PAIRS)]

    @property
    def size(self) -> int:
        return len(self.rows)

    def texts(self) -> list[tuple[str | None, ...]]:
        return [("pair", self.query.query, self.query.instruction, passage) for passage in self._passages()]

    def compute(self, retriever: Retriever) -> np.ndarray:
        assert isinstance(retriever, PairReranker)
        return retriever.score([(self.query, passage) for passage in self._passages()])

    def _passages(self) -> list[str]:
        passages = shared(self.corpus)["text"]
        return [passages[row].as_py() for row in self.rows]  # `take` copies the whole column and fails beyond 2 GB


Chunk = Passages | Queries | Pairs
"""Texts that are computed together. Equal chunks have equal arrays."""
