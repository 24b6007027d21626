"""`infembed index` and `infembed index compact` on Ray.

Tasks read the corpus once, a part each, and partition it into files per shard, by a hash of the passage ids. Tasks sort each
file by id, so the order of the rows leaves no trace. Ray Data actors encode chunks of a shard, each to a file of its own. One task
per shard joins the vectors and builds the index. Finished files stay: an interrupted or failed build resumes with the missing
chunks and shards, also with another index type or recall floor.

For an output in an object store, tasks and actors write there; nothing passes through the driver.

A build starts a lineage. Changes made to the served version through the API are not in it; the driver prints a warning.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import ray
from ray.data import ActorPoolStrategy

from infembed_ray.config.retrieval import CompactSettings, IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import counted, say, track
from infembed_ray.ray_cluster import connect, errors_of_tasks, on_a_cluster, require_resources
from infembed_ray.retrieval import factory, versions
from infembed_ray.retrieval.build import (
    Partitioned,
    Parts,
    choose_build,
    encode_chunk,
    output_errors,
    partition_corpus,
    partition_part,
    say_reused,
    sort_shard,
    write_shard,
)
from infembed_ray.retrieval.compaction import Compaction
from infembed_ray.retrieval.corpus import BadRow
from infembed_ray.retrieval.faiss_import import faiss
from infembed_ray.retrieval.index import IndexFacts, counts_of, finished, reusing, warn_of_changes
from infembed_ray.retrieval.pieces import Piece, parts_of
from infembed_ray.retrieval.preflight import check_model, prepare, prepare_engine
from infembed_ray.retrieval.shard_files import ShardFacts, clear_finished, drop_other_attempts
from infembed_ray.retrieval.shards import Build
from infembed_ray.retrieval.stores.address import is_address
from infembed_ray.retrieval.stores.milvus import Milvus
from infembed_ray.retrieval.stores.store import Address
from infembed_ray.retrieval.work import Chunk, Work, chunk_rows, work_directory
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import Published, Staging, find_input
from infembed_ray.telemetry import report

_MAX_BLOCKS = 4096
"""Blocks of a Ray dataset; the driver holds metadata of each."""


def run(settings: IndexSettings) -> Published:
    """Encode the corpus and publish its index. An index of the same corpus and model is not built again.

    Raises:
        InputError: corpus, model, index type or output cannot be used; an embedding is not finite; no type fits the
            memory or reaches the recall floor; or the disk is full. Nothing is published then.
    """
    if is_address(settings.output):
        return _run_in_engine(settings)
    corpus, model, step = prepare(settings)
    if done := finished(step):
        return done
    warn_of_changes(step)
    encoder = check_model(settings, model)
    _require_gpu_faiss("index", settings.gpus_per_shard)
    with output_errors(settings.output), work_directory(step, settings) as work:
        sizes = partition_corpus(corpus, settings, work, partial(_partition, settings, work))
        build = choose_build(settings, sizes, encoder.dimension)
        connect()
        require_resources(gpus_per_actor=("GPU", settings.gpus_per_actor), **_of_shards(settings))
        work = reusing(step, encoder, settings, work)
        _sort_shards(corpus, settings, work, sizes)
        chunks = work.chunks(sizes)
        say_reused(work, chunks)
        with step.publish() as staging:
            root = staging.remote or staging.path.resolve()  # actors and tasks have other working directories
            what = f"{counted(sum(sizes), 'passage')}, {counted(settings.shards, 'shard')} of {build.factory}"
            say(f"index: {what}, {model}")
            _encode(chunks, work, model, settings)
            shards = _write_shards(chunks, work, root, encoder.dimension, build, settings)
            staging.resumed |= {shard.name for shard in shards}
            facts = IndexFacts.of_build(encoder, model, settings, shards, step.identity)
            if facts.passages != sum(sizes):
                raise RuntimeError(f"{facts.passages} of {sum(sizes)} passages reached a shard")
            staging.counts = counts_of(facts, chunks)
            staging.facts = {"index": facts.as_json()}
        drop_other_attempts(step.remote, shards)
        work.delete()
    return step.published()


def _run_in_engine(settings: IndexSettings) -> Published:
    """As `run`, into a new collection of an external engine, which its alias names in the end."""
    engine, local = prepare_engine(settings)
    corpus, model, step = prepare(local)
    if done := next((version for version in engine.versions() if version.id == step.identity), None):
        engine.use(step.identity)
        return Published(step.path, done.manifest, fresh=False, uri=settings.output)
    started = time.monotonic()
    encoder = InstructionEncoder.from_pretrained(model, dimensions=settings.dimensions, device="meta")
    with _output_errors(local), work_directory(step, local) as work:
        engine.begin(step.identity, settings.metadata, encoder.dimension, settings.factory)  # first: it may refuse
        sizes = partition_corpus(corpus, local, work, partial(_partition, local, work))
        connect()
        require_resources(gpus_per_actor=("GPU", settings.gpus_per_actor))
        _sort_shards(corpus, local, work, sizes)
        chunks = work.chunks(sizes)
        say(f"index: {counted(sum(sizes), 'passage')} to {settings.output}, {model}")
        _encode(chunks, work, model, local)
        _insert(engine, step.identity, chunks, work, encoder.dimension)
        facts = replace(IndexFacts.of_build(encoder, model, settings, [], step.identity), passages=sum(sizes))
        made = Staging(step.partial, counts={"passages": facts.passages}, facts={"index": facts.as_json()})
        manifest = step.manifest(made, time.monotonic() - started)
        engine.finish(step.identity, manifest)
        work.delete()
    say(f"index: {engine.address} names this version; `infembed index use` names another")
    return Published(step.path, manifest, fresh=True, uri=settings.output)


def _output_errors(settings: IndexSettings) -> AbstractContextManager[None]:
    """As `output_errors`; before an external engine, the place of the files is the setting `work`."""
    return output_errors(settings.output, "work" if settings.output == settings.work else "output")


def _insert(engine: Milvus, identity: str, chunks: Sequence[Chunk], work: Work, dimension: int) -> None:
    """Insert all chunks into a new collection: one task per shard, or one task if the engine takes one writer."""
    parts: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        parts.setdefault(0 if engine.one_writer else chunk.shard, []).append(chunk)
    tasks = [_insert_chunks.remote(engine.address, identity, part, work, dimension) for part in parts.values()]
    with track("insert", sum(chunk.count for chunk in chunks)) as advance:
        for _, count in _as_completed(tasks):
            advance(count)


@ray.remote(num_cpus=1, max_retries=0)  # a second attempt would insert twice
def _insert_chunks(address: Address, identity: str, chunks: Sequence[Chunk], work: Work, dimension: int) -> int:
    engine = Milvus(address)
    for chunk in chunks:
        engine.insert(identity, work.passages(chunk), work.vectors(chunk, dimension))
    return sum(chunk.count for chunk in chunks)


def _require_gpu_faiss(verb: str, gpus: float) -> None:
    """Check that FAISS runs on GPUs where shards are built: on a GPU node of the cluster, or in the driver.

    Raises:
        InputError: FAISS runs on CPUs only.
    """
    if gpus and on_a_cluster():
        connect()
        say(f"{verb}: checking FAISS on a GPU node")
        check = ray.remote(num_cpus=0, num_gpus=gpus)(factory.require_gpu_faiss)
        list(_as_completed([check.remote()]))
    elif gpus:
        factory.require_gpu_faiss()


def _of_shards(settings: IndexSettings | CompactSettings) -> dict[str, tuple[str, float]]:
    """What a task that builds a shard takes, for `require_resources`."""
    return {"cpus_per_shard": ("CPU", settings.cpus_per_shard), "gpus_per_shard": ("GPU", settings.gpus_per_shard)}


def _as_completed(tasks: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (task, result) in the order of completion. If one fails, the others are cancelled.

    Raises:
        InputError: a task failed with it.
    """
    pending = list(tasks)
    try:
        while pending:
            (done,), pending = ray.wait(pending)
            with errors_of_tasks():
                result = ray.get(done)
            yield done, result
    finally:
        for task in pending:
            ray.cancel(task)


# ---------------------------------------------------------------------------------------------------- the corpus


def _partition(settings: IndexSettings, work: Work, parts: Parts) -> Iterator[Partitioned]:
    """Partition the corpus, one task per part. A corpus of one part needs no cluster, so its faults are found before Ray starts."""
    if len(parts) == 1:
        yield partition_part(settings, work, 0, parts[0])
        return
    connect()
    for _, partitioned in _as_completed([_partition_part.remote(settings, work, *part) for part in enumerate(parts)]):
        yield partitioned


@ray.remote(num_cpus=1)
def _partition_part(settings: IndexSettings, work: Work, number: int, pieces: Mapping[int, Piece]) -> Partitioned:
    with _output_errors(settings):
        unseen = next((piece.file for piece in pieces.values() if not piece.file.is_file()), None)
        if unseen is not None:
            raise InputError(
                f"corpus={settings.corpus}: node {platform.node()} does not see {unseen}; give a directory that all nodes "
                "share, or a folder of an object store"
            )
        return partition_part(settings, work, number, pieces)


def _sort_shards(corpus: Place, settings: IndexSettings, work: Work, sizes: Sequence[int]) -> None:
    """Sort the passages of each shard by id, one task per shard."""
    rows, parts, shared = chunk_rows(sum(sizes)), ray.put(parts_of(corpus)), ray.put(work)  # large for many files
    missing = [shard for shard in range(settings.shards) if not work.is_sorted(shard)]
    tasks = [_sort_shard.remote(shard, parts, settings, shared, rows) for shard in missing]
    try:
        with track("sort", settings.shards, settings.shards - len(tasks)) as advance:
            for _ in _as_completed(tasks):
                advance()
    except BadRow:
        work.delete()
        raise
    work.drop_spool()


@ray.remote(num_cpus=1)
def _sort_shard(shard: int, parts: Parts, settings: IndexSettings, work: Work, rows_at_once: int) -> None:
    with _output_errors(settings):
        sort_shard(shard, parts, settings, work, rows_at_once)


# -------------------------------------------------------------------------------------------------------- vectors


class EncodeChunk:
    """A Ray Data actor that loads the model once and encodes chunks, each to its file."""

    def __init__(self, work: Work, model: str, settings: IndexSettings, device: str) -> None:
        self.work = work
        self.settings = settings
        self.fault: str | None = None
        try:
            self.encoder = InstructionEncoder.from_pretrained(model, dimensions=settings.dimensions, device=device)
        except InputError as error:  # Ray restarts an actor that raises, without end
            self.fault = str(error)

    def __call__(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Encode one chunk.

        Returns:
            `passages`, how many were encoded, and `fault`, why they cannot be encoded, or None.
        """
        try:
            if self.fault is None:
                with _output_errors(self.settings):
                    encode_chunk(self.encoder, self.work, Chunk(**chunk), self.settings)
        except InputError as error:
            self.fault = str(error)
        return {"passages": 0 if self.fault else int(chunk["new"]), "fault": self.fault}


def _encode(chunks: Sequence[Chunk], work: Work, model: str, settings: IndexSettings) -> None:
    """Encode the chunks that have no file yet."""
    missing = work.missing(chunks)
    total = sum(chunk.new for chunk in chunks)
    before = total - sum(chunk.new for chunk in missing)
    passages = {"encoded": 0, "reused": sum(chunk.count - chunk.new for chunk in chunks)}
    report(index_passages_total=passages)
    with track("encode", total, before) as advance:
        if before:
            advance(0, note=f"{before} from an interrupted run")
        if not missing:
            return
        device = "cuda" if settings.gpus_per_actor else "cpu"
        items = [asdict(chunk) for chunk in missing]
        encoded = ray.data.from_items(items, override_num_blocks=min(len(items), _MAX_BLOCKS)).map(
            EncodeChunk,
            fn_constructor_args=(work, model, settings, device),
            compute=ActorPoolStrategy(size=settings.actors),
            num_gpus=settings.gpus_per_actor,
        )
        for row in encoded.iter_rows():
            if row["fault"] is not None:
                raise InputError(row["fault"])
            advance(row["passages"])
            passages["encoded"] += row["passages"]
            report(index_passages_total=passages)


# --------------------------------------------------------------------------------------------------------- shards


def _write_shards(
    chunks: Sequence[Chunk], work: Work, root: Place, dimension: int, build: Build, settings: IndexSettings
) -> list[ShardFacts]:
    """Write all shards, one task per shard; shards that an interrupted run finished stay."""
    task = _write_shard.options(num_cpus=settings.cpus_per_shard, num_gpus=settings.gpus_per_shard)
    threads, shared = max(1, int(settings.cpus_per_shard)), ray.put(work)
    tasks = []
    for shard in range(settings.shards):
        own = [chunk for chunk in chunks if chunk.shard == shard]
        tasks.append(task.remote(root, shard, shared, own, dimension, build, threads, settings))
    return _collect(tasks, root)


def _collect(tasks: Sequence[Any], root: Place) -> list[ShardFacts]:
    """Wait for one task per shard; returns the facts in the order of the shards."""
    written = {}
    with track("shards", len(tasks)) as advance:
        for task, facts in _as_completed(tasks):
            written[task] = facts
            advance(note=f"{facts.factory}, recall@10 {facts.recall_at_10:.3f}")
    clear_finished(root)
    return [written[task] for task in tasks]


@ray.remote
def _write_shard(
    root: Place,
    shard: int,
    work: Work,
    chunks: Sequence[Chunk],
    dimension: int,
    build: Build,
    threads: int,
    settings: IndexSettings,
) -> ShardFacts:
    faiss.omp_set_num_threads(threads)
    with _output_errors(settings):
        return write_shard(root, shard, work, chunks, dimension, build, settings.vectors)


# ----------------------------------------------------------------------------------------------------- compaction


def compact(settings: CompactSettings) -> Published:
    """Fold the changes of an index into its next version, one task per shard. Without changes there is nothing to fold.

    Then old versions are deleted, if `keep_versions` says so, and the changes that no version reads any more.

    Raises:
        InputError: there is no index; one of its files or changes is missing or damaged; no type fits the memory or
            reaches the recall floor; or the disk is full. Nothing is published then.
    """
    base = find_input(settings.index, "index")
    published = _compacted(settings)
    try:
        versions.prune(base, settings.keep_versions)
    except (InputError, OSError) as error:  # such as NFS, while a replica still maps a file
        say(f"index compact: old versions or changes stay until the next compaction: {error}")
    return published


def _compacted(settings: CompactSettings) -> Published:
    work = Compaction.open(settings.index, settings.factory, settings.memory_gib, settings.recall_floor)
    if not work.changes and not work.retyped:
        say(f"index compact: no changes since {work.version}")
        return work.published()
    step = work.step()
    if done := finished(step):
        work.end()
        return done
    _require_gpu_faiss("index compact", settings.gpus_per_shard)
    work.begin()
    with output_errors(str(step.root)), step.publish() as staging:
        root = staging.remote or staging.path.resolve()
        changes = counted(work.changes, "segment")
        say(f"index compact: {work.version} and {changes} of changes, {counted(len(work.facts.shards), 'shard')}")
        connect()
        require_resources(**_of_shards(settings))
        task = _compact_shard.options(num_cpus=settings.cpus_per_shard, num_gpus=settings.gpus_per_shard)
        threads, gpu = max(1, int(settings.cpus_per_shard)), settings.gpus_per_shard > 0
        shards = _collect([task.remote(work, n, root, threads, gpu) for n in range(len(work.facts.shards))], root)
        staging.resumed |= {shard.name for shard in shards}
        next_facts = work.next_facts(shards)
        staging.counts = {"passages": next_facts.passages, "shards": len(shards), "changes": work.changes}
        staging.facts = {"index": next_facts.as_json()}
    drop_other_attempts(step.remote, shards)
    work.end()
    return step.published()


@ray.remote
def _compact_shard(work: Compaction, shard: int, root: Place, threads: int, gpu: bool) -> ShardFacts:
    faiss.omp_set_num_threads(threads)
    with output_errors(str(root.parent)):
        return work.write_shard(shard, root, gpu)
