"""Shards from passages in memory."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from infembed_ray.config.retrieval import FieldType
from infembed_ray.retrieval.chunks import Bounds
from infembed_ray.retrieval.passages import CHUNKS, schema, write_passages
from infembed_ray.retrieval.shard_files import PASSAGES_FILE, VECTORS_FILE, ShardFacts
from infembed_ray.retrieval.shards import Build, build_shard, write_vectors

_ROWS_AT_ONCE = 1 << 14


def batches(passages: pa.Table, rows: int) -> Iterator[pa.Table]:
    """Slice a table into blocks of `rows` rows."""
    for start in range(0, passages.num_rows, rows):
        yield passages.slice(start, rows)


def write_shard(
    directory: Path,
    ids: Sequence[str],
    texts: Sequence[str],
    vectors: np.ndarray,
    metadata: Mapping[str, Sequence[Any]] | None = None,
    types: Mapping[str, FieldType] | None = None,
    build: Build | None = None,
    chunks: Sequence[Bounds] | None = None,
) -> ShardFacts:
    """Write a shard; its rows are sorted by id.

    Args:
        ids, texts: n passages, in any order.
        vectors: (n, d) float16 or float32 finite unit vectors; n may be 0. With chunks, those of all chunks.
        metadata: column -> n values of the type in `types`.
        chunks: of each passage; None: they are not cut.
    """
    order = sorted(range(len(ids)), key=lambda row: ids[row])
    columns = {"id": ids, "text": texts, **(metadata or {})}
    columns |= {} if chunks is None else {CHUNKS: chunks}
    typed = schema(types or {}, chunks is not None)
    table = pa.table({n: [v[row] for row in order] for n, v in columns.items()}, schema=typed)
    directory.mkdir(parents=True, exist_ok=True)
    write_passages(directory / PASSAGES_FILE, table.schema, batches(table, _ROWS_AT_ONCE))
    ends = np.cumsum([1] * len(ids) if chunks is None else [len(bounds) // 2 for bounds in chunks], dtype=int)
    of_passages = np.split(vectors, ends)
    of_rows = [of_passages[row] for row in order]
    write_vectors(directory / VECTORS_FILE, of_rows, len(vectors), vectors.shape[1], str(vectors.dtype))
    return build_shard(directory, build or Build())
