"""What is computed together and kept as one array: a chunk of passages, of queries, or of pairs of both.

A chunk says where its texts are, so that it travels to another node without them.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from infembed_ray.errors import InputError
from infembed_ray.evaluation.embeddings import digest
from infembed_ray.evaluation.retrievers.retriever import Encoder, Ranker, Reranker
from infembed_ray.evaluation.tasks.task import CORPUS, Query

TEXTS = 1024
"""Most passages or queries of a chunk: enough to batch by length, and what a kill costs an actor."""
PAIRS = 128
"""Most pairs of a chunk: they take longer."""
_BATCH = 4096


class Chunk(Protocol):
    """Texts that are computed together. Equal chunks have equal arrays."""

    @property
    def size(self) -> int:
        """Rows of its array."""
        ...

    def texts(self) -> list[tuple[str | None, ...]]:
        """What each row is computed from; no two kinds of chunks have the same."""
        ...

    def compute(self, retriever: Encoder | Reranker | Ranker) -> np.ndarray:
        """(size, d) or (size) float32."""
        ...


# ----------------------------------------------------------------------------------------------------- corpora


def share(corpus: pa.Table, directory: Path) -> Path:
    """Write a corpus to a file that all nodes map into memory, unless it is there.

    Args:
        corpus: (m) `CORPUS`; no more than a chunk of it is copied at a time.
        directory: one that all nodes see.

    Returns:
        the file, named by its content.
    """
    name = digest(text for batch in _batches(corpus) for column in batch.columns for text in column.to_pylist())
    file = directory / f"{name}.arrow"
    if not file.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{secrets.token_hex(4)}.partial")
        with partial.open("wb") as target:
            with pa.ipc.new_file(target, CORPUS) as writer:
                for batch in _batches(corpus):
                    writer.write_batch(batch)
            target.flush()
            os.fsync(target.fileno())
        partial.replace(file)
    return file


@cache
def shared(file: Path) -> pa.Table:
    """A corpus that `share` wrote, memory-mapped.

    Raises:
        InputError: this node does not see it.
    """
    if not file.is_file():
        raise InputError(
            f"embeddings={file.parent.parent}: node {platform.node()} does not see {file.name}, which the driver wrote "
            "there; give a directory that all nodes share"
        )
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def _batches(corpus: pa.Table) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that do not depend on how the table is divided."""
    for start in range(0, corpus.num_rows, _BATCH):
        (batch,) = corpus.slice(start, _BATCH).combine_chunks().to_batches()
        yield batch


# ------------------------------------------------------------------------------------------------------ chunks


@dataclass(frozen=True)
class Passages:
    """A chunk of a shared corpus."""

    corpus: Path
    start: int
    size: int

    @classmethod
    def of(cls, corpus: Path) -> list[Passages]:
        """All chunks of a corpus, in its order."""
        rows = shared(corpus).num_rows
        return [cls(corpus, start, min(TEXTS, rows - start)) for start in range(0, rows, TEXTS)]

    def texts(self) -> list[tuple[str | None, ...]]:
        return [("passage", text) for text in self._passages()]

    def compute(self, retriever: Encoder | Reranker | Ranker) -> np.ndarray:
        assert isinstance(retriever, Encoder)
        return retriever.encode_passages(self._passages())

    def _passages(self) -> list[str]:
        passages: list[str] = shared(self.corpus)["text"].slice(self.start, self.size).to_pylist()
        return passages


@dataclass(frozen=True)
class Queries:
    """A chunk of a task's queries."""

    queries: tuple[Query, ...]

    @classmethod
    def of(cls, queries: Sequence[Query]) -> list[Queries]:
        """All chunks of some queries, in their order."""
        return [cls(tuple(queries[start : start + TEXTS])) for start in range(0, len(queries), TEXTS)]

    @property
    def size(self) -> int:
        return len(self.queries)

    def texts(self) -> list[tuple[str | None, ...]]:
        return [("query", query.query, query.instruction) for query in self.queries]

    def compute(self, retriever: Encoder | Reranker | Ranker) -> np.ndarray:
        assert isinstance(retriever, Encoder)
        return retriever.encode_queries(self.queries)


@dataclass(frozen=True)
class Pairs:
    """A query beside some passages of a shared corpus."""

    query: Query
    corpus: Path
    rows: tuple[int, ...]

    @classmethod
    def of(cls, query: Query, corpus: Path, rows: Sequence[int]) -> list[Pairs]:
        """All chunks of a query and these passages, which are in the corpus's order: the ranking's leaves no trace."""
        ordered = sorted(rows)
        return [cls(query, corpus, tuple(ordered[start : start + PAIRS])) for start in range(0, len(ordered), PAIRS)]

    @property
    def size(self) -> int:
        return len(self.rows)

    def texts(self) -> list[tuple[str | None, ...]]:
        return [("pair", self.query.query, self.query.instruction, passage) for passage in self._passages()]

    def compute(self, retriever: Encoder | Reranker | Ranker) -> np.ndarray:
        assert isinstance(retriever, Reranker)
        return retriever.score([(self.query, passage) for passage in self._passages()])

    def _passages(self) -> list[str]:
        passages = shared(self.corpus)["text"]
        return [passages[row].as_py() for row in self.rows]  # `take` copies the whole column, and fails beyond 2 GB
