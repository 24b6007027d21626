"""Build an index: partition the corpus by shard, sort by id, encode what is new, build FAISS shards, publish.

`build_index` calls every step through `Tasks`: in this process, or as tasks of a Ray cluster (`distributed.OnRay`). Every step
leaves files behind, and one whose files are there is not repeated: an interrupted build resumes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
from obstore.exceptions import BaseError

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.modeling.checkpoint import locate
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import counted, say, track
from infembed_ray.retrieval import factory
from infembed_ray.retrieval.corpus import parts_of, require_columns, require_passages
from infembed_ray.retrieval.milvus import Milvus, MilvusAddress
from infembed_ray.retrieval.passages import schema
from infembed_ray.retrieval.shard_files import (
    ShardFacts,
    clear_finished,
    drop_other_attempts,
    finished_shard,
    mark_finished,
    shard_directory,
)
from infembed_ray.retrieval.shards import Build, build_shard
from infembed_ray.retrieval.versions import FORMAT, IndexFacts, finished, latest_of, warn_of_changes
from infembed_ray.retrieval.work import (
    SPOOL,
    Base,
    Chunk,
    DuplicateId,
    Work,
    chunk_rows,
    chunks_of,
    partition,
    shard_name,
    sorted_passages,
    work_directory,
)
from infembed_ray.storage.object_store import SCRATCH, convert_errors, is_uri, scratch
from infembed_ray.storage.places import Place, address
from infembed_ray.storage.steps import Step, find_input
from infembed_ray.telemetry import report


class Tasks:
    """Runs the steps of a build in this process, one task after the other."""

    def __init__(self, encoder: InstructionEncoder | None = None) -> None:
        self._encoder = encoder

    def run(self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], cpus: float = 1) -> Iterator[Any]:
        """Call a function with each of the arguments; yields the results as they come."""
        yield from starmap(function, calls)

    def encode(self, chunks: Sequence[Chunk], work: Work, settings: IndexSettings) -> Iterator[tuple[int, int]]:
        """Encode chunks; yields the number of passages of each, and how many of them are new."""
        assert self._encoder is not None
        for chunk in chunks:
            yield chunk.count, encode_chunk(self._encoder, work, chunk, settings)


@contextlib.contextmanager
def output_errors(output: str) -> Iterator[None]:
    """Turn an error of the file system or of the object store in the block into an InputError that names the setting."""
    try:
        yield
    except (OSError, BaseError) as error:
        number, file = getattr(error, "errno", None), getattr(error, "filename", None)
        setting = SCRATCH if not is_uri(output) and output.startswith(f"{scratch()}/") else "output"
        if isinstance(error, FileNotFoundError) and file:
            raise InputError.of(
                setting,
                output,
                f"node {platform.node()} does not see {file}, which another node wrote",
                "give a directory that all nodes share, or a folder of an object store",
            ) from error
        if isinstance(error, (ConnectionError, TimeoutError)):  # raised by Ray
            raise
        if is_uri(output) and (number is None or isinstance(error, FileNotFoundError)):
            with convert_errors(output, setting):
                raise
        if number is None:
            raise
        setting, place = (SCRATCH, str(scratch())) if is_uri(output) else (setting, output)
        remedy = "free space there" if number in (errno.ENOSPC, errno.EDQUOT) else "correct that"
        raise InputError.of(
            setting,
            place,
            f"cannot be written ({os.strerror(number)})",
            f"{remedy} and run the same command again: it resumes",
        ) from error


def prepare(settings: IndexSettings) -> tuple[Place, str, Step]:
    """Locate corpus and model, and identify the build.

    Returns:
        Corpus; directory, URI or hub name of the model; and the step.

    Raises:
        InputError: one of them does not exist, a column cannot be, or the output cannot be written.
    """
    _, corpus, model = check_all(
        lambda: require_columns(settings.columns, settings.metadata),
        lambda: find_input(settings.corpus, "corpus"),
        lambda: locate(settings.model, "model"),
    )
    names = {**model.names, "format": str(FORMAT)}
    return corpus, model.path, Step("index", settings, settings.output, {"corpus": corpus, **model.inputs}, names)


def prepare_engine(settings: IndexSettings) -> tuple[Milvus, IndexSettings]:
    """Connect to the external engine that `output` names.

    Returns:
        The engine; and the settings of the steps before it, whose output is the place of the unfinished build.

    Raises:
        InputError: a setting is for FAISS only, or the engine cannot be used.
    """
    for name in ("memory_gib", "lexical"):
        if value := getattr(settings, name):
            raise InputError.of(name, value, "an external engine has neither limits nor words of ours", "leave it out")
    engine = Milvus(MilvusAddress.parse(settings.output, "output"))
    place = str(scratch() / "stores" / engine.address.alias)
    return engine, settings.model_copy(update={"output": place, "vectors": "float32"})


def check_model(settings: IndexSettings, model: str) -> InstructionEncoder:
    """Check model and index type before any work; return the encoder without its weights."""
    encoder = InstructionEncoder.from_pretrained(model, dimensions=settings.dimensions, device="meta")
    if settings.factory is not None:
        factory.new(settings.factory, encoder.dimension)
    return encoder


def build_here(encoder: InstructionEncoder, corpus: Path, settings: IndexSettings) -> str:
    """Publish an index of a corpus in this process, unless it is there; returns its directory or URI."""
    require_columns(settings.columns, settings.metadata)
    names = {"model": encoder.fingerprint(), "format": str(FORMAT)}
    step = Step("index", settings, settings.output, {"corpus": corpus}, names)
    if done := finished(step):
        return done.address
    build_index(step, corpus, settings.model, encoder, settings, Tasks(encoder))
    return address(step.remote or step.path)


def build_index(
    step: Step, corpus: Place, model: str, encoder: InstructionEncoder, settings: IndexSettings, tasks: Tasks
) -> None:
    """Build and publish an index that no earlier run has.

    Args:
        encoder: of `model`; its weights are not needed.

    Raises:
        InputError: a row of the corpus is invalid, an embedding is not finite, no type fits the memory or reaches the recall
            floor, or the disk is full. Nothing is published then.
    """
    warn_of_changes(step)
    with output_errors(settings.output), work_directory(step, settings, encoder.dimension) as work:
        sizes = partition_corpus(corpus, settings, work, tasks)
        build = choose_build(settings, sizes, encoder.dimension)
        sort_shards(corpus, sizes, settings, work, tasks, _base(step, encoder, settings))
        with step.publish() as staging:
            root = staging.remote or staging.path.resolve()  # tasks have other working directories
            say(
                f"index: {counted(sum(sizes), 'passage')}, {counted(settings.shards, 'shard')} of {build.factory}, {model}"
            )
            chunks = encode_passages(sizes, settings, work, tasks)
            calls = [(root, shard, work, own, build, settings) for shard, own in _by_shard(chunks, settings.shards)]
            shards = write_shards(write_shard, calls, root, settings.cpus_per_shard, tasks)
            staging.resumed |= {shard.name for shard in shards}
            facts = IndexFacts.of_build(
                encoder, model, settings, shards, step.identity, sum(s.passages for s in shards)
            )
            if facts.passages != sum(sizes):
                raise RuntimeError(f"{facts.passages} of {sum(sizes)} passages reached a shard")
            staging.counts = {
                "passages": facts.passages,
                "encoded": sum(chunks.values()),
                "shards": len(shards),
            }
            staging.facts = {"index": facts.as_json()}
        drop_other_attempts(step.remote, shards)
        work.delete()


# ------------------------------------------------------------------------------------------------------ the corpus


def partition_corpus(corpus: Place, settings: IndexSettings, work: Work, tasks: Tasks) -> list[int]:
    """Partition the corpus, unless an interrupted run did; returns the passages of each shard.

    A corpus of one part needs no cluster, so its faults are found before Ray starts.

    Raises:
        InputError: see `work.partition`; or the corpus has no rows, or none with a metadata column.
    """
    if (sizes := work.sizes()) is not None:
        return sizes
    work.delete()  # what an interrupted deletion left
    parts = parts_of(corpus)
    sizes, seen = [0] * settings.shards, set[str]()
    try:
        with track("corpus", len(parts)) as advance:
            calls = [(settings, work, number, files) for number, files in enumerate(parts)]
            for counts, columns in (tasks if len(parts) > 1 else Tasks()).run(partition_part, calls):
                sizes = [total + count for total, count in zip(sizes, counts, strict=True)]
                seen |= columns
                advance(note=f"{sum(sizes)} passages")
        require_passages(corpus, sum(sizes), settings.columns, settings.metadata, seen)
    except InputError:
        work.delete()
        raise
    work.set_sizes(sizes)
    return sizes


def partition_part(
    settings: IndexSettings, work: Work, number: int, files: Sequence[Place]
) -> tuple[list[int], set[str]]:
    """Partition one part of a corpus; see `work.partition`."""
    if unseen := next((file for file in files if not file.is_file()), None):
        raise InputError.of(
            "corpus",
            settings.corpus,
            f"node {platform.node()} does not see {unseen}",
            "give a directory that all nodes share, or a folder of an object store",
        )
    with output_errors(settings.output), work.spool(number) as directory:
        return partition(files, settings.columns, settings.metadata, settings.shards, directory)


def sort_shards(
    corpus: Place, sizes: Sequence[int], settings: IndexSettings, work: Work, tasks: Tasks, base: Base | None
) -> None:
    """Sort the passages of all shards by id, and find the vectors that the base has.

    Raises:
        DuplicateId: two rows have one id.
    """
    missing = [shard for shard in range(settings.shards) if not work.is_sorted(shard)]
    parts, rows = len(parts_of(corpus)), chunk_rows(sizes)
    try:
        with track("sort", settings.shards, settings.shards - len(missing)) as advance:
            for _ in tasks.run(sort_shard, [(shard, parts, settings, work, rows, base) for shard in missing]):
                advance()
    except DuplicateId:
        work.delete()
        raise
    work.drop_spool()


def sort_shard(shard: int, parts: int, settings: IndexSettings, work: Work, rows: int, base: Base | None) -> None:
    """Sort the passages of a shard by id.

    Args:
        parts: of the corpus.
        rows: of a chunk.

    Raises:
        DuplicateId: two rows have one id.
        InputError: this node does not see the rows of a part, which another node partitioned.
    """
    with output_errors(settings.output), work.spooled(shard) as spooled:
        if len(spooled) < parts:
            raise FileNotFoundError(errno.ENOENT, "rows are missing", str(work.root / SPOOL))
        work.write_sorted(shard, schema(settings.metadata), sorted_passages(spooled, rows), base)


def _base(step: Step, encoder: InstructionEncoder, settings: IndexSettings) -> Base | None:
    """The latest version, if this encoder made it, in this precision or a better one."""
    if latest := latest_of(step):
        root, facts = latest
        if facts.encoder == encoder.fingerprint() and facts.vectors in (settings.vectors, "float32"):
            return Base(root, tuple(facts.shards))
    return None


# -------------------------------------------------------------------------------------------------------- vectors


def encode_passages(sizes: Sequence[int], settings: IndexSettings, work: Work, tasks: Tasks) -> dict[Chunk, int]:
    """Encode the chunks that have no file yet; returns all chunks, in order, and how many passages of each were encoded."""
    chunks, encoded = chunks_of(sizes), work.encoded()
    missing = [chunk for chunk in chunks if chunk.name not in encoded]
    total, left = sum(sizes), sum(chunk.count for chunk in missing)
    figures = {"encoded": 0, "reused": 0}
    with track("encode", total, total - left) as advance:
        if left < total:
            advance(0, note=f"{total - left} from an interrupted run")
        for count, new in tasks.encode(missing, work, settings) if missing else ():
            figures = {"encoded": figures["encoded"] + new, "reused": figures["reused"] + count - new}
            report(index_passages_total=figures)
            advance(count)
    encoded = work.encoded()
    new = sum(encoded[chunk.name] for chunk in chunks)
    if new < total:
        say(f"index: {new} of {total} passages were encoded; the vectors of the others are those of the version before")
    return {chunk: encoded[chunk.name] for chunk in chunks}


def encode_chunk(encoder: InstructionEncoder, work: Work, chunk: Chunk, settings: IndexSettings) -> int:
    """Encode the new passages of a chunk; returns their number. InputError if an embedding is not finite."""
    vectors = work.reused(chunk)
    new = np.flatnonzero(np.isnan(vectors[:, 0]))
    if new.size:
        passages = work.passages(chunk).take(new)
        encoded = encoder.encode_passages(passages.column("text").to_pylist(), settings.batch_tokens)
        broken = np.flatnonzero(~np.isfinite(encoded).all(axis=1))
        if broken.size:
            raise InputError.of(
                "model",
                encoder.source,
                f"its embedding of passage {passages.column('id')[int(broken[0])]} is not finite",
                "the weights are damaged or training diverged: give another checkpoint",
            )
        vectors[new] = encoded
    work.write_encoded(chunk, vectors, len(new))
    return len(new)


# --------------------------------------------------------------------------------------------------------- shards


def choose_build(settings: IndexSettings, sizes: Sequence[int], dimension: int) -> Build:
    """The index type of all shards, chosen for the largest."""
    chosen = factory.choose(
        max(sizes), dimension, settings.memory_gib, settings.shards, settings.factory, settings.vectors
    )
    return Build(chosen, settings.memory_gib, settings.recall_floor, settings.shards, settings.lexical)


def _by_shard(chunks: Mapping[Chunk, int], shards: int) -> Iterator[tuple[int, dict[Chunk, int]]]:
    for shard in range(shards):
        yield shard, {chunk: new for chunk, new in chunks.items() if chunk.shard == shard}


def write_shards(
    function: Callable[..., ShardFacts], calls: Sequence[Sequence[Any]], root: Place, cpus: float, tasks: Tasks
) -> list[ShardFacts]:
    """Write all shards of the index in `root`, one task per shard; shards that an interrupted run finished stay."""
    shards = []
    with track("shards", len(calls)) as advance:
        for facts in tasks.run(function, calls, cpus):
            shards.append(facts)
            advance(note=f"{facts.factory}, recall@10 {facts.recall_at_10:.3f}")
    clear_finished(root)
    return sorted(shards, key=lambda facts: facts.name)


def write_shard(
    root: Place, shard: int, work: Work, chunks: Mapping[Chunk, int], build: Build, settings: IndexSettings
) -> ShardFacts:
    """Join the vectors of a shard and build it, unless an interrupted run did."""
    return finish_shard(root, shard, settings.output, lambda into: work.gather(shard, chunks, into), build)


def finish_shard(root: Place, shard: int, output: str, fill: Callable[[Path], None], build: Build) -> ShardFacts:
    """Build a shard whose passages and vectors `fill` writes into a directory; one that an interrupted run finished stays."""
    if done := finished_shard(root, shard_name(shard)):
        return done
    with output_errors(output), shard_directory(root, shard_name(shard)) as directory:
        fill(directory)
        return mark_finished(root, shard_name(shard), directory, build_shard(directory, build))
