"""The work directory of a build: sorted passages and their vectors, which do not depend on the index type.

It outlives interrupted and failed builds. Builds of the same passages and vectors share it, one at a time. The workers of a
build share it too: it is a directory that all nodes see, or, for an output in an object store, a folder there
(`stored_work`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from infembed_ray import durable
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.leases import lease
from infembed_ray.places import Place
from infembed_ray.retrieval import work as shared
from infembed_ray.retrieval.corpus import spool_file
from infembed_ray.retrieval.passages import open_passages, write_passages
from infembed_ray.retrieval.shard_files import PASSAGES_FILE, VECTORS_FILE
from infembed_ray.retrieval.shards import write_vectors
from infembed_ray.retrieval.stored_work import StoredWork
from infembed_ray.retrieval.work import ENCODED, SIZES_FILE, SPOOL, Chunk, Work, shard_name
from infembed_ray.storage import Step

_LAYOUT = 2
"""Version of the files of a work directory. Builds of another version do not resume from it."""


@dataclass(frozen=True)
class WorkDirectory:
    """A work directory that all nodes see."""

    root: Path

    @property
    def _sizes(self) -> Path:
        return self.root / SIZES_FILE

    def _shard(self, shard: int) -> Path:
        return self.root / shard_name(shard)

    def sizes(self) -> list[int] | None:
        """As `Work.sizes`."""
        return json.loads(self._sizes.read_text(encoding="utf-8")) if self._sizes.is_file() else None

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """As `Work.set_sizes`."""
        durable.replace_json(self._sizes, list(sizes))

    @contextlib.contextmanager
    def spool(self, part: int) -> Iterator[Path]:
        """As `Work.spool`."""
        yield self.root / SPOOL / f"{part:05d}"

    @contextlib.contextmanager
    def spooled(self, shard: int) -> Iterator[list[Path]]:
        """As `Work.spooled`."""
        yield [spool_file(part, shard) for part in sorted((self.root / SPOOL).iterdir())]

    def drop_spool(self) -> None:
        """As `Work.drop_spool`."""
        shutil.rmtree(self.root / SPOOL, ignore_errors=True)

    def is_sorted(self, shard: int) -> bool:
        """As `Work.is_sorted`."""
        return (self._shard(shard) / PASSAGES_FILE).is_file()

    def write_sorted(self, shard: int, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
        """As `Work.write_sorted`."""
        self._shard(shard).mkdir(exist_ok=True)
        write_passages(self._shard(shard) / PASSAGES_FILE, schema, tables)

    def passages(self, chunk: Chunk) -> pa.Table:
        """As `Work.passages`."""
        return open_passages(self._shard(chunk.shard) / PASSAGES_FILE).slice(chunk.start, chunk.count)

    def write_encoded(self, chunk: Chunk, vectors: np.ndarray) -> None:
        """As `Work.write_encoded`."""
        file = self.root / chunk.name
        file.parent.mkdir(exist_ok=True)
        write_vectors(file, [vectors], *vectors.shape)

    def vectors(self, chunk: Chunk) -> np.ndarray:
        """As `Work.vectors`."""
        joined = self._shard(chunk.shard) / VECTORS_FILE
        if joined.is_file():  # by an interrupted build of a FAISS index in this directory
            return np.load(joined, mmap_mode="r")[chunk.start : chunk.start + chunk.count]
        vectors: np.ndarray = np.load(self.root / chunk.name)
        return vectors

    def missing(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """As `Work.missing`."""
        joined = {shard for shard in {c.shard for c in chunks} if (self._shard(shard) / VECTORS_FILE).is_file()}
        encoded = {file.relative_to(self.root).as_posix() for file in self.root.glob(f"shard-*/{ENCODED}/*.npy")}
        return [chunk for chunk in chunks if chunk.shard not in joined and chunk.name not in encoded]

    def gather(self, shard: int, chunks: Sequence[Chunk], directory: Path, dimension: int) -> None:
        """As `Work.gather`; the files are linked."""
        work = self._shard(shard)
        vectors = work / VECTORS_FILE
        if not vectors.is_file():
            count = open_passages(work / PASSAGES_FILE).num_rows
            write_vectors(vectors, map(self.vectors, chunks), count, dimension)
        shutil.rmtree(work / ENCODED, ignore_errors=True)
        for name in (PASSAGES_FILE, VECTORS_FILE):
            (directory / name).unlink(missing_ok=True)
            os.link(work / name, directory / name)

    def delete(self) -> None:
        """As `Work.delete`."""
        self._sizes.unlink(missing_ok=True)  # tasks that were cancelled may still write below the directory
        shutil.rmtree(self.root, ignore_errors=True)


def work_root(step: Step, settings: IndexSettings) -> Place:
    """Return the place of the work directory of these passages and vectors, which an interrupted build leaves."""
    decides = {
        "inputs": step.contents,
        "columns": settings.columns,
        "metadata": settings.metadata,
        "shards": settings.shards,
        "dimensions": settings.dimensions,
        "layout": [_LAYOUT, shared.CHUNK_PASSAGES],
    }
    name = f".{hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]}.encoded"
    return step.root.resolve() / name if step.remote is None else step.remote.parent / name


@contextlib.contextmanager
def work_directory(step: Step, settings: IndexSettings) -> Iterator[Work]:
    """Hold the work directory of these passages and vectors.

    Raises:
        InputError: another run holds it.
    """
    root = work_root(step, settings)
    with lease(root.parent, root.name.strip(".").removesuffix(".encoded"), f"output={root.parent}"):
        if isinstance(root, Path):
            root.mkdir(exist_ok=True)
            yield WorkDirectory(root)
        else:
            yield StoredWork(root)
