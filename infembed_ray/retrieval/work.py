"""What the steps of a build leave behind for the next ones: sorted passages in chunks, and the vectors of each chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

CHUNK_PASSAGES = 512
"""Least passages of a chunk: enough to batch by length; an interruption loses one chunk per actor."""
ENCODED = "encoded"
SIZES_FILE = "sizes.json"
SPOOL = "spool"
_MAX_CHUNK_PASSAGES = 8192
_MAX_CHUNKS = 10_000
"""Chunks of a corpus, beyond which they become larger."""


@dataclass(frozen=True)
class Chunk:
    """Rows `start` to `start + count` of a shard's passages, encoded together; `number` counts them in the shard."""

    shard: int
    number: int
    start: int
    count: int

    @property
    def name(self) -> str:
        """Name of the file of their vectors, relative to the work directory."""
        return f"{shard_name(self.shard)}/{ENCODED}/{self.start:010d}-{self.count}.npy"


def chunk_rows(total: int) -> int:
    """Most rows of a chunk of a corpus of `total` passages."""
    return max(CHUNK_PASSAGES, min(_MAX_CHUNK_PASSAGES, total // _MAX_CHUNKS))


def chunks_of(sizes: Sequence[int]) -> list[Chunk]:
    """The chunks of a corpus with these numbers of passages in its shards, in order."""
    rows = chunk_rows(sum(sizes))
    return [
        Chunk(shard, number, start, min(rows, size - start))
        for shard, size in enumerate(sizes)
        for number, start in enumerate(range(0, size, rows))
    ]


def shard_name(shard: int) -> str:
    """Name of a shard's directory."""
    return f"shard-{shard:05d}"


class Work(Protocol):
    """What the steps of a build leave behind; every process of a build sees it."""

    def sizes(self) -> list[int] | None:
        """The passages of each shard; None before the corpus is partitioned."""

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Record that the corpus is partitioned."""

    def spool(self, part: int) -> AbstractContextManager[Path]:
        """Give a directory for the unsorted rows of a part of the corpus, which are kept when the block ends."""

    def spooled(self, shard: int) -> AbstractContextManager[list[Path]]:
        """Give the files with the unsorted rows of a shard, one for each part."""

    def drop_spool(self) -> None:
        """Delete all unsorted rows."""

    def is_sorted(self, shard: int) -> bool:
        """Whether the passages of a shard are sorted."""

    def write_sorted(self, shard: int, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
        """Write the passages of a shard, from tables of `chunk_rows` rows by id ascending."""

    def passages(self, chunk: Chunk) -> pa.Table:
        """Read the passages of a chunk."""

    def write_encoded(self, chunk: Chunk, vectors: np.ndarray) -> None:
        """Write the vectors of a chunk."""

    def vectors(self, chunk: Chunk) -> np.ndarray:
        """Read the vectors of a chunk, (n, d) float32."""

    def missing(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks that are not encoded yet."""

    def gather(self, shard: int, chunks: Sequence[Chunk], directory: Path, dimension: int) -> None:
        """Put the passages and the vectors of a shard, with these chunks, into a directory of this machine."""

    def delete(self) -> None:
        """Delete everything."""
