"""The work directory of a build: sorted passages and their vectors, which do not depend on the index type.

It outlives interrupted and failed builds. Builds of the same passages and vectors share it, one at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infembed_ray import durable
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.retrieval.shard_files import PASSAGES_FILE, VECTORS_FILE
from infembed_ray.storage import Step

CHUNK_PASSAGES = 512
"""Least passages of a chunk: enough to batch by length; an interruption loses one chunk per actor."""
ENCODED = "encoded"
_MAX_CHUNK_PASSAGES = 8192
_MAX_CHUNKS = 10_000
"""Chunks of a corpus, beyond which they become larger."""


@dataclass(frozen=True)
class Chunk:
    """Rows `start` to `start + count` of a shard's passages, encoded together; `file` receives their vectors."""

    shard: int
    passages: Path
    start: int
    count: int
    file: Path

    def as_item(self) -> dict[str, Any]:
        """The chunk as a row of a Ray dataset."""
        return {"file": str(self.file), "passages": str(self.passages), "start": self.start, "count": self.count}


@dataclass(frozen=True)
class WorkDirectory:
    """Paths below the work directory."""

    root: Path

    @property
    def sizes(self) -> Path:
        """JSON list of the passages of each shard; written when the corpus is partitioned."""
        return self.root / "sizes.json"

    @property
    def spool(self) -> Path:
        """Directory of the unsorted rows."""
        return self.root / "spool"

    def shard(self, shard: int) -> Path:
        """Directory of a shard's sorted passages and its vectors."""
        return self.root / f"shard-{shard:05d}"

    def chunks(self, shard: int, passages: int, total: int) -> list[Chunk]:
        """The chunks of a shard, in order.

        Args:
            passages: of the shard.
            total: passages of the corpus.
        """
        size = max(CHUNK_PASSAGES, min(_MAX_CHUNK_PASSAGES, total // _MAX_CHUNKS))
        chunks = []
        for start in range(0, passages, size):
            count = min(size, passages - start)
            file = self.shard(shard) / ENCODED / f"{start:010d}-{count}.npy"
            chunks.append(Chunk(shard, self.shard(shard) / PASSAGES_FILE, start, count, file))
        return chunks

    def missing(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks that are not encoded yet."""
        joined = {shard for shard in {c.shard for c in chunks} if (self.shard(shard) / VECTORS_FILE).is_file()}
        encoded = set(self.root.glob(f"shard-*/{ENCODED}/*.npy"))
        return [chunk for chunk in chunks if chunk.shard not in joined and chunk.file not in encoded]


def work_root(step: Step, settings: IndexSettings) -> Path:
    """Return the work directory of these passages and vectors, which an interrupted build leaves."""
    decides = {
        "inputs": step.contents,
        "columns": settings.columns,
        "metadata": settings.metadata,
        "shards": settings.shards,
        "dimensions": settings.dimensions,
    }
    name = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
    return step.root.resolve() / f".{name}.encoded"


@contextlib.contextmanager
def work_directory(step: Step, settings: IndexSettings) -> Iterator[WorkDirectory]:
    """Hold the work directory of these passages and vectors.

    Raises:
        InputError: another run holds it.
    """
    root = work_root(step, settings)
    busy = InputError(f"output={step.root}: another run encodes the same corpus; wait for it to end")
    with durable.exclusive_lock(root.with_suffix(".lock"), busy=busy):
        root.mkdir(exist_ok=True)
        yield WorkDirectory(root)
