"""The steps of building an index, without Ray. `distributed.py` runs them as tasks, `Index.build` in this process.

Every step leaves files behind, and one whose files are there is not repeated: an interrupted build resumes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import starmap

import numpy as np
from obstore.exceptions import BaseError

from infembed_ray.config.retrieval import IndexSettings, Precision
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import say, track
from infembed_ray.retrieval import factory
from infembed_ray.retrieval.corpus import BadRow, require_passages
from infembed_ray.retrieval.passages import schema
from infembed_ray.retrieval.pieces import Piece, parts_of
from infembed_ray.retrieval.shard_files import (
    ShardFacts,
    clear_finished,
    finished_shard,
    mark_finished,
    shard_directory,
)
from infembed_ray.retrieval.shards import Build, build_shard
from infembed_ray.retrieval.spool import partition, sorted_passages
from infembed_ray.retrieval.work import SPOOL, Chunk, Work, chunk_rows, shard_name
from infembed_ray.storage.object_store import SCRATCH, convert_errors, is_uri, scratch
from infembed_ray.storage.places import Place


@contextlib.contextmanager
def output_errors(output: str, setting: str = "output") -> Iterator[None]:
    """Turn an error of the file system or of the object store in the block into an InputError that names the setting."""
    try:
        yield
    except (OSError, BaseError) as error:
        number, file = getattr(error, "errno", None), getattr(error, "filename", None)
        if isinstance(error, FileNotFoundError) and file:
            raise InputError(
                f"{setting}={output}: node {platform.node()} does not see {file}, which another node wrote; give a "
                "directory that all nodes share, or a folder of an object store"
            ) from error
        if isinstance(error, (ConnectionError, TimeoutError)):  # raised by Ray
            raise
        if is_uri(output) and (number is None or isinstance(error, FileNotFoundError)):
            with convert_errors(output, setting):
                raise
        if number is None:
            raise
        place = f"{SCRATCH}={scratch()}" if is_uri(output) else f"{setting}={output}"
        remedy = "free space there" if number in (errno.ENOSPC, errno.EDQUOT) else "correct that"
        raise InputError(
            f"{place}: cannot be written ({os.strerror(number)}); {remedy} and run the same command again: it resumes"
        ) from error


Parts = Sequence[Mapping[int, Piece]]
Partitioned = tuple[list[int], set[str]]
"""Passages of each shard, and the names of all columns."""


def partition_corpus(
    corpus: Place, settings: IndexSettings, work: Work, run: Callable[[Parts], Iterable[Partitioned]]
) -> list[int]:
    """Partition the corpus, unless an interrupted run did; returns the passages of each shard.

    Args:
        run: calls `partition_part` for each part, here or in tasks.

    Raises:
        InputError: see `spool.partition`; or the corpus has no rows, or none with a metadata column.
    """
    if (known := work.sizes()) is not None:
        return known
    work.delete()  # what an interrupted deletion left
    parts = parts_of(corpus)
    sizes, seen = [0] * settings.shards, set[str]()
    try:
        with track("corpus", len(parts)) as advance:
            for counts, columns in run(parts):
                sizes = [total + count for total, count in zip(sizes, counts, strict=True)]
                seen |= columns
                advance(note=f"{sum(sizes)} passages")
        require_passages(corpus, sizes, settings.columns, settings.metadata, seen)
    except InputError:
        work.delete()
        raise
    work.set_sizes(sizes)
    return sizes


def partition_part(settings: IndexSettings, work: Work, number: int, pieces: Mapping[int, Piece]) -> Partitioned:
    """Partition one part of a corpus; see `spool.partition`."""
    with work.spool(number) as directory:
        return partition(pieces, settings.columns, settings.metadata, settings.shards, directory)


def sort_shard(shard: int, parts: Parts, settings: IndexSettings, work: Work, rows_at_once: int) -> None:
    """Sort the passages of a shard by id, and find those that the base has, unless an interrupted run did.

    Raises:
        BadRow: an id is duplicate.
        FileNotFoundError: this node does not see the rows of a part, which another node partitioned.
    """
    if not work.is_sorted(shard):
        pieces = {number: piece for part in parts for number, piece in part.items()}
        with work.spooled(shard) as spooled:
            if len(spooled) < len(parts):
                raise FileNotFoundError(errno.ENOENT, "rows are missing", str(work.root / SPOOL))
            tables = sorted_passages(spooled, pieces, settings.metadata, rows_at_once)
            work.write_sorted(shard, schema(settings.metadata), tables)


def choose_build(settings: IndexSettings, sizes: Sequence[int], dimension: int) -> Build:
    """The index type of all shards, chosen for the largest."""
    return Build(
        factory.choose(max(sizes), dimension, settings.memory_gib, settings.shards, settings.factory, settings.vectors),
        settings.memory_gib,
        settings.recall_floor,
        settings.gpus_per_shard > 0,
        settings.shards,
        settings.lexical,
    )


def encode_chunk(encoder: InstructionEncoder, work: Work, chunk: Chunk, settings: IndexSettings) -> None:
    """Encode a chunk of a shard's passages; InputError if an embedding is not finite."""
    rows = work.new_passages(chunk)
    vectors = encoder.encode_passages(rows.column("text").to_pylist(), settings.batch_tokens)
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if broken.size:
        raise InputError(
            f"model={encoder.source}: its embedding of passage {rows.column('id')[int(broken[0])]} is not finite; "
            "the weights are damaged or training diverged: give another checkpoint"
        )
    work.write_encoded(chunk, vectors.astype(settings.vectors))


def write_shard(
    root: Place, shard: int, work: Work, chunks: Sequence[Chunk], dimension: int, build: Build, precision: Precision
) -> ShardFacts:
    """Join the vectors of a shard and build it, unless an interrupted run did."""
    name = shard_name(shard)
    if done := finished_shard(root, name):
        return done
    with shard_directory(root, name) as directory:
        work.gather(shard, chunks, directory, dimension, precision)
        return mark_finished(root, name, directory, build_shard(directory, build))


def partition_here(corpus: Place, settings: IndexSettings, work: Work) -> list[int]:
    """Partition the corpus in this process, unless an interrupted run did; returns the passages of each shard."""
    return partition_corpus(
        corpus, settings, work, lambda parts: starmap(partial(partition_part, settings, work), enumerate(parts))
    )


def sort_here(corpus: Place, settings: IndexSettings, work: Work, sizes: Sequence[int]) -> list[Chunk]:
    """Sort the passages of all shards by id, in this process and return their chunks; BadRow if an id is duplicate."""
    parts = parts_of(corpus)
    try:
        for shard in range(settings.shards):
            sort_shard(shard, parts, settings, work, chunk_rows(sum(sizes)))
    except BadRow:
        work.delete()
        raise
    work.drop_spool()
    return work.chunks(sizes)


def say_reused(work: Work, chunks: Sequence[Chunk]) -> None:
    """Say how many vectors are reused."""
    if work.base is not None:
        total, new = sum(chunk.count for chunk in chunks), sum(chunk.new for chunk in chunks)
        say(
            f"index: {new} of {total} passages are new since {work.base.root.name}; the vectors of the others are reused"
        )


def write_shards_here(
    encoder: InstructionEncoder, work: Work, chunks: Sequence[Chunk], root: Place, build: Build, settings: IndexSettings
) -> list[ShardFacts]:
    """Encode the sorted passages and write all shards of the index in `root`, in this process."""
    missing = work.missing(chunks)
    total, left = (sum(chunk.new for chunk in some) for some in (chunks, missing))
    with track("encode", total, total - left) as advance:
        for chunk in missing:
            encode_chunk(encoder, work, chunk, settings)
            advance(chunk.new)
    shards = []
    for shard in range(settings.shards):
        own = [chunk for chunk in chunks if chunk.shard == shard]
        shards.append(write_shard(root, shard, work, own, encoder.dimension, build, settings.vectors))
    clear_finished(root)
    return shards
