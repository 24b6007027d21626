"""Chunks of passages, queries or pairs, each stored as one array. A chunk refers to its texts, so it is small to send.

The store of the arrays, keyed by the texts that they were computed from, is a directory that all nodes see, or a folder of an
object store, which tasks and runs share. Its files appear whole and never change, and all of it can be deleted at any time.
"""

import contextlib
import hashlib
import io
import os
import platform
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa

from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers.baselines import PairReranker, Retriever, TextEncoder
from infembed_ray.evaluation.tasks import corpus as corpora
from infembed_ray.evaluation.tasks.corpus import digest
from infembed_ray.evaluation.tasks.task import CORPUS, Query
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import Place, delivering, errors_at, read_binary

S = TypeVar("S", range, tuple[Query, ...], tuple[int, ...])
TEXTS = 1024
"""Passages or queries per chunk: enough to batch by length, and the work that a killed actor loses."""
PAIRS = 128
"""Pairs per chunk; pairs take longer."""
VERSION = 2
"""Raise it when the same model computes something else for the same text, for example after a fix of pooling."""
_AHEAD = 8
"""Files that are read at the same time."""


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
        fault = f"node {platform.node()} does not see {file.name}, which the driver wrote there"
        remedy = "give a directory that all nodes share, or a folder of an object store"
        raise InputError.of("embeddings", file.parent.parent, fault, remedy)
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


# ------------------------------------------------------------------------------------------------------ chunks


@dataclass(frozen=True)
class TextChunk:
    """Texts that are computed together: passages, queries, or a query with passages. Equal chunks have equal arrays."""

    kind: Literal["passage", "query", "pair"]
    queries: tuple[Query, ...] = ()
    """The queries, or the only one of pairs."""
    corpus: Place = Path()
    """Shared corpus of the passages."""
    rows: Sequence[int] = ()
    """Rows of the passages, ascending: a range, or a tuple."""

    @property
    def size(self) -> int:
        """Number of texts or pairs."""
        return len(self.queries if self.kind == "query" else self.rows)

    def texts(self) -> list[tuple[str | None, ...]]:
        """Return the inputs of each row, which differ between the kinds of chunks."""
        if self.kind == "query":
            return [("query", query.query, query.instruction) for query in self.queries]
        asked = [(query.query, query.instruction) for query in self.queries]
        return [(self.kind, *(part for query in asked for part in query), passage) for passage in self._passages()]

    def compute(self, retriever: Retriever) -> np.ndarray:
        """Compute the array: (size, d) float32, or (size) for pairs."""
        if self.kind == "pair":
            assert isinstance(retriever, PairReranker)
            return retriever.score([(self.queries[0], passage) for passage in self._passages()])
        assert isinstance(retriever, TextEncoder)
        if self.kind == "query":
            return retriever.encode_queries(self.queries)
        return retriever.encode_passages(self._passages())

    def _passages(self) -> list[str]:
        passages = shared(self.corpus)["text"]
        if isinstance(self.rows, range):
            return list(passages.slice(self.rows.start, len(self.rows)).to_pylist())
        return [passages[row].as_py() for row in self.rows]  # `take` copies the whole column and fails beyond 2 GB


def of_passages(corpus: Place) -> list[TextChunk]:
    """Divide a shared corpus, in its order."""
    return [TextChunk("passage", corpus=corpus, rows=rows) for rows in _parts(range(shared(corpus).num_rows), TEXTS)]


def of_queries(queries: Sequence[Query]) -> list[TextChunk]:
    """Divide queries, in their order."""
    return [TextChunk("query", part) for part in _parts(tuple(queries), TEXTS)]


def of_pairs(query: Query, corpus: Place, rows: Sequence[int]) -> list[TextChunk]:
    """Divide the pairs of a query and passages, in the order of the corpus, not of a ranking."""
    return [TextChunk("pair", (query,), corpus, part) for part in _parts(tuple(sorted(rows)), PAIRS)]


def _parts(items: S, size: int) -> list[S]:
    return [items[start : start + size] for start in range(0, len(items), size)]


# ------------------------------------------------------------------------------------------------------- store


def store_of(root: Place, identity: str) -> Place:
    """Return the place of the arrays of one model; `identity` changes with anything that changes the arrays."""
    return root / hashlib.sha256(f"{VERSION}\0{identity}".encode()).hexdigest()[:16]


def file_of(store: Place, texts: Iterable[str | None]) -> Place:
    """Return the place for the array of these texts, in this order."""
    name = digest(texts)
    return store / name[:2] / f"{name[2:]}.npy"


def write(file: Place, array: np.ndarray) -> None:
    """Write an array, (rows, ...) float32, atomically and durably; several nodes may write the same one."""
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(array, dtype=np.float32), allow_pickle=False)
    with errors_at(file, "embeddings"), delivering(file) as path, durable.replacing(path, shared=True) as target:
        target.write(stream.getvalue())


def read_all(files: Iterable[Place]) -> Iterator[np.ndarray]:
    """Yield arrays in order; some files are read ahead.

    Raises:
        InputError: one is missing or truncated, or the object store failed.
    """
    with ThreadPoolExecutor(_AHEAD) as pool:
        reading: deque[Future[np.ndarray]] = deque()
        for file in files:
            reading.append(pool.submit(_read, file))
            if len(reading) == _AHEAD:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()


def _read(file: Place) -> np.ndarray:
    with errors_at(file, "embeddings"):
        try:
            array: np.ndarray = np.load(io.BytesIO(read_binary(file)), allow_pickle=False)
        except (FileNotFoundError, ValueError, EOFError) as error:
            fault = "missing or damaged since it was written"
            raise InputError.of("embeddings", file, fault, "delete it and run again") from error
    return array
