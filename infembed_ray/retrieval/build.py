"""The steps of building an index, without Ray. `distributed.py` runs them as tasks, `Index.build` in this process.

Every step leaves files behind, and one whose files are there is not repeated: an interrupted build resumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from infembed_ray import durable, records
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import track
from infembed_ray.retrieval import factory
from infembed_ray.retrieval.corpus import BadRow, partition, sort_shard, spool_file
from infembed_ray.retrieval.passages import open_passages
from infembed_ray.retrieval.shard_files import (
    PASSAGES_FILE,
    VECTORS_FILE,
    ShardFacts,
    clear_finished,
    finished_shard,
    mark_finished,
)
from infembed_ray.retrieval.shards import Build, build_shard, write_vectors
from infembed_ray.retrieval.work_directory import ENCODED, WorkDirectory


@contextlib.contextmanager
def output_errors(output: str) -> Iterator[None]:
    """Turn an OSError of the file system in the block into an InputError that names the setting."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(
            f"output={output}: node {platform.node()} does not see {error.filename}, which another node wrote; give a "
            "directory that all nodes share"
        ) from error
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):  # raised by Ray, not by the file system
            raise
        raise InputError(
            f"output={output}: cannot be written ({error.strerror or error}); free space there and run the same command "
            "again: it resumes"
        ) from error


def partition_corpus(corpus: Path, settings: IndexSettings, work: WorkDirectory) -> list[int]:
    """Partition the corpus, unless an interrupted run did; returns the passages of each shard."""
    if not work.sizes.is_file():
        try:
            with track("corpus", None) as advance:
                sizes = partition(corpus, settings.columns, settings.metadata, settings.shards, work.spool, advance)
        except InputError:
            shutil.rmtree(work.root)
            raise
        durable.replace_json(work.sizes, sizes)
    counted: list[int] = json.loads(work.sizes.read_text(encoding="utf-8"))
    return counted


def choose_build(settings: IndexSettings, sizes: Sequence[int], dimension: int) -> Build:
    """The index type of all shards, chosen for the largest."""
    return Build(
        factory.choose(max(sizes), dimension, settings.memory_gib, settings.shards, settings.factory),
        settings.memory_gib,
        settings.recall_floor,
        settings.gpus_per_shard > 0,
        settings.shards,
    )


def encode_chunk(
    encoder: InstructionEncoder, passages: Path, start: int, count: int, file: Path, batch_tokens: int
) -> None:
    """Encode `count` rows of a shard's passages to a file.

    Raises:
        InputError: an embedding is not finite.
    """
    rows = open_passages(passages).slice(start, count)
    vectors = encoder.encode_passages(rows.column("text").to_pylist(), batch_tokens)
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if broken.size:
        raise InputError(
            f"model={encoder.source}: its embedding of passage {rows.column('id')[int(broken[0])]} is not finite; "
            "the weights are damaged or training diverged: give another checkpoint"
        )
    file.parent.mkdir(exist_ok=True)
    write_vectors(file, [vectors], *vectors.shape)


def write_shard(directory: Path, work: Path, files: Sequence[Path], dimension: int, build: Build) -> ShardFacts:
    """Join the vectors of a shard, link its files into the index and build it.

    Args:
        directory: of the shard in the index.
        work: directory of its sorted passages.
        files: encoded chunks of the shard, in order.
    """
    if done := finished_shard(directory):
        return done
    vectors = work / VECTORS_FILE
    if not vectors.is_file():
        count = open_passages(work / PASSAGES_FILE).num_rows
        write_vectors(vectors, (np.load(file) for file in files), count, dimension)
    shutil.rmtree(work / ENCODED, ignore_errors=True)
    directory.mkdir(exist_ok=True)
    for name in (PASSAGES_FILE, VECTORS_FILE):
        (directory / name).unlink(missing_ok=True)
        os.link(work / name, directory / name)
    return mark_finished(directory, build_shard(directory, build))


def sort_here(corpus: Path, settings: IndexSettings, work: WorkDirectory) -> None:
    """Sort the passages of all shards by id, in this process.

    Raises:
        BadRow: an id is duplicate.
    """
    files = records.data_files(corpus, "corpus")
    try:
        for shard in range(settings.shards):
            work.shard(shard).mkdir(exist_ok=True)
            target = work.shard(shard) / PASSAGES_FILE
            if not target.is_file():
                sort_shard(spool_file(work.spool, shard), files, settings.metadata, target)
    except BadRow:
        shutil.rmtree(work.root)
        raise
    shutil.rmtree(work.spool, ignore_errors=True)


def write_shards_here(
    encoder: InstructionEncoder,
    work: WorkDirectory,
    sizes: Sequence[int],
    root: Path,
    build: Build,
    settings: IndexSettings,
) -> list[ShardFacts]:
    """Encode the sorted passages and write all shards of the index in `root`, in this process."""
    chunks = [chunk for shard, size in enumerate(sizes) for chunk in work.chunks(shard, size, sum(sizes))]
    missing = work.missing(chunks)
    with track("encode", sum(sizes), sum(sizes) - sum(chunk.count for chunk in missing)) as advance:
        for chunk in missing:
            encode_chunk(encoder, chunk.passages, chunk.start, chunk.count, chunk.file, settings.batch_tokens)
            advance(chunk.count)
    shards = []
    for shard in range(settings.shards):
        source = work.shard(shard)
        files = [chunk.file for chunk in chunks if chunk.shard == shard]
        shards.append(write_shard(root / source.name, source, files, encoder.dimension, build))
    clear_finished(root)
    return shards
