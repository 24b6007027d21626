"""The steps of building an index, without Ray. `distributed.py` runs them as tasks, `Index.build` in this process.

Every step leaves files behind, and one whose files are there is not repeated: an interrupted build resumes.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from obstore.exceptions import BaseError

from infembed_ray import records
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.object_store import SCRATCH, Folder, convert_errors, is_uri, scratch
from infembed_ray.places import Place
from infembed_ray.progress import track
from infembed_ray.retrieval import factory
from infembed_ray.retrieval.corpus import BadRow, partition, partition_files, sorted_passages
from infembed_ray.retrieval.passages import schema
from infembed_ray.retrieval.shard_files import (
    ShardFacts,
    clear_finished,
    finished_shard,
    mark_finished,
    shard_directory,
)
from infembed_ray.retrieval.shards import Build, build_shard
from infembed_ray.retrieval.work import Chunk, Work, chunk_rows, chunks_of, shard_name


@contextlib.contextmanager
def output_errors(output: str) -> Iterator[None]:
    """Turn an error of the file system or of the object store in the block into an InputError that names the setting."""
    try:
        yield
    except (OSError, BaseError) as error:
        number, file = getattr(error, "errno", None), getattr(error, "filename", None)
        if isinstance(error, FileNotFoundError) and file:
            raise InputError(
                f"output={output}: node {platform.node()} does not see {file}, which another node wrote; give a "
                "directory that all nodes share, or a folder of an object store"
            ) from error
        if isinstance(error, (ConnectionError, TimeoutError)):  # raised by Ray
            raise
        if is_uri(output) and (number is None or isinstance(error, FileNotFoundError)):
            with convert_errors(output, "output"):
                raise
        if number is None:
            raise
        place = f"{SCRATCH}={scratch()}" if is_uri(output) else f"output={output}"
        raise InputError(
            f"{place}: cannot be written ({os.strerror(number)}); free space there and run the same command "
            "again: it resumes"
        ) from error


def partition_corpus(corpus: Path, settings: IndexSettings, work: Work) -> list[int]:
    """Partition the corpus, unless an interrupted run did; returns the passages of each shard."""
    sizes = work.sizes()
    if sizes is None:
        work.drop_spool()
        try:
            with track("corpus", None) as advance, work.spool(0) as spool:
                sizes = partition(corpus, settings.columns, settings.metadata, settings.shards, spool, advance)
        except InputError:
            work.delete()
            raise
        work.set_sizes(sizes)
    return sizes


PARTS = 64
"""Most parts of a corpus in an object store, which tasks read at the same time."""


def parts_of(corpus: Folder) -> list[dict[int, Place]]:
    """Divide the data files of a corpus in an object store; returns number -> file for each part."""
    files = dict(enumerate(records.data_files(corpus, "corpus")))
    parts = min(PARTS, len(files))
    return [{number: files[number] for number in range(part, len(files), parts)} for part in range(parts)]


def partition_part(
    files: Mapping[int, Place], settings: IndexSettings, work: Work, part: int
) -> tuple[list[int], set[str]]:
    """Partition some files of a corpus.

    Returns:
        Passages of each shard, and the names of all columns.

    Raises:
        BadRow: see `partition`.
        InputError: a file cannot be read, or a column is missing.
    """
    seen: set[str] = set()
    with work.spool(part) as spool:
        sizes = partition_files(files.items(), settings.columns, settings.metadata, settings.shards, spool, seen)
    return sizes, seen


def sort_shard(shard: int, files: Sequence[Place], settings: IndexSettings, work: Work, rows_at_once: int) -> None:
    """Sort the passages of a shard by id, unless an interrupted run did.

    Args:
        files: of the corpus, for error messages.
        rows_at_once: rows of a chunk.

    Raises:
        BadRow: an id is duplicate.
    """
    if not work.is_sorted(shard):
        with work.spooled(shard) as spooled:
            tables = sorted_passages(spooled, files, settings.metadata, rows_at_once)
            work.write_sorted(shard, schema(settings.metadata), tables)


def choose_build(settings: IndexSettings, sizes: Sequence[int], dimension: int) -> Build:
    """The index type of all shards, chosen for the largest."""
    return Build(
        factory.choose(max(sizes), dimension, settings.memory_gib, settings.shards, settings.factory),
        settings.memory_gib,
        settings.recall_floor,
        settings.gpus_per_shard > 0,
        settings.shards,
    )


def encode_chunk(encoder: InstructionEncoder, work: Work, chunk: Chunk, batch_tokens: int) -> None:
    """Encode a chunk of a shard's passages.

    Raises:
        InputError: an embedding is not finite.
    """
    rows = work.passages(chunk)
    vectors = encoder.encode_passages(rows.column("text").to_pylist(), batch_tokens)
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if broken.size:
        raise InputError(
            f"model={encoder.source}: its embedding of passage {rows.column('id')[int(broken[0])]} is not finite; "
            "the weights are damaged or training diverged: give another checkpoint"
        )
    work.write_encoded(chunk, vectors)


def write_shard(
    root: Place, shard: int, work: Work, chunks: Sequence[Chunk], dimension: int, build: Build
) -> ShardFacts:
    """Join the vectors of a shard and build it, unless an interrupted run did.

    Args:
        root: of the index.
        chunks: of the shard.
    """
    name = shard_name(shard)
    if done := finished_shard(root, name):
        return done
    with shard_directory(root, name) as directory:
        work.gather(shard, chunks, directory, dimension)
        return mark_finished(root, name, directory, build_shard(directory, build))


def sort_here(corpus: Path, settings: IndexSettings, work: Work, sizes: Sequence[int]) -> None:
    """Sort the passages of all shards by id, in this process.

    Raises:
        BadRow: an id is duplicate.
    """
    files = records.data_files(corpus, "corpus")
    try:
        for shard in range(settings.shards):
            sort_shard(shard, files, settings, work, chunk_rows(sum(sizes)))
    except BadRow:
        work.delete()
        raise
    work.drop_spool()


def write_shards_here(
    encoder: InstructionEncoder,
    work: Work,
    sizes: Sequence[int],
    root: Place,
    build: Build,
    settings: IndexSettings,
) -> list[ShardFacts]:
    """Encode the sorted passages and write all shards of the index in `root`, in this process."""
    chunks = chunks_of(sizes)
    missing = work.missing(chunks)
    with track("encode", sum(sizes), sum(sizes) - sum(chunk.count for chunk in missing)) as advance:
        for chunk in missing:
            encode_chunk(encoder, work, chunk, settings.batch_tokens)
            advance(chunk.count)
    shards = []
    for shard in range(settings.shards):
        own = [chunk for chunk in chunks if chunk.shard == shard]
        shards.append(write_shard(root, shard, work, own, encoder.dimension, build))
    clear_finished(root)
    return shards
