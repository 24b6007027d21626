"""`infembed index` and `infembed index compact` on Ray.

The corpus is read once and partitioned into one file per shard, by a hash of the passage ids: by the driver, or by tasks if it
is in an object store. Tasks sort each file by id, so the order of the rows leaves no trace. Ray Data actors encode chunks of a
shard, each to a file of its own. One task per shard joins the vectors and builds the index. Finished files stay: an interrupted
or failed build resumes with the missing chunks and shards, also with another index type or recall floor.

For an output in an object store, tasks and actors write there; nothing passes through the driver.

A build starts a lineage. Changes made to the served version through the API are not in it; the driver prints a warning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import ray
from ray.data import ActorPoolStrategy
from ray.exceptions import RayTaskError

from infembed_ray import records
from infembed_ray.config.retrieval import CompactSettings, IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.object_store import Folder
from infembed_ray.places import Place
from infembed_ray.progress import counted, say, track
from infembed_ray.ray_cluster import connect, on_a_cluster
from infembed_ray.retrieval import factory
from infembed_ray.retrieval.build import (
    choose_build,
    encode_chunk,
    output_errors,
    partition_corpus,
    partition_part,
    parts_of,
    sort_shard,
    write_shard,
)
from infembed_ray.retrieval.compaction import Compaction
from infembed_ray.retrieval.corpus import BadRow, require_passages
from infembed_ray.retrieval.faiss_import import faiss
from infembed_ray.retrieval.index import IndexFacts, finished, warn_of_changes
from infembed_ray.retrieval.preflight import check_model, prepare, prepare_engine
from infembed_ray.retrieval.shard_files import ShardFacts, clear_finished, drop_other_attempts
from infembed_ray.retrieval.shards import Build
from infembed_ray.retrieval.stores.address import is_address
from infembed_ray.retrieval.stores.engines import connect as connect_store
from infembed_ray.retrieval.stores.store import Address, Engine
from infembed_ray.retrieval.work import Chunk, Work, chunk_rows, chunks_of
from infembed_ray.retrieval.work_directory import work_directory
from infembed_ray.storage import Published, Staging

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
        sizes = _sizes(corpus, settings, work)
        build = choose_build(settings, sizes, encoder.dimension)
        connect()
        _sort_shards(corpus, settings, work, sizes)
        chunks = chunks_of(sizes)
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
            staging.counts = {"passages": facts.passages, "shards": len(shards)}
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
    with output_errors(local.output), work_directory(step, local) as work:
        engine.begin(step.identity, settings.metadata, encoder.dimension, settings.factory)  # first: it may refuse
        sizes = _sizes(corpus, local, work)
        connect()
        _sort_shards(corpus, local, work, sizes)
        chunks = chunks_of(sizes)
        say(f"index: {counted(sum(sizes), 'passage')} to {settings.output}, {model}")
        _encode(chunks, work, model, local)
        _insert(engine, step.identity, chunks, work)
        facts = replace(IndexFacts.of_build(encoder, model, settings, [], step.identity), passages=sum(sizes))
        made = Staging(step.partial, counts={"passages": facts.passages}, facts={"index": facts.as_json()})
        manifest = step.manifest(made, time.monotonic() - started)
        engine.finish(step.identity, manifest)
        work.delete()
    say(f"index: {engine.address} names this version; `infembed index use` names another")
    return Published(step.path, manifest, fresh=True, uri=settings.output)


def _sizes(corpus: Place, settings: IndexSettings, work: Work) -> list[int]:
    """Partition the corpus into shards; returns the passages of each."""
    if isinstance(corpus, Folder):
        connect()
        return _partition(corpus, settings, work)
    return partition_corpus(corpus, settings, work)


def _insert(engine: Engine, identity: str, chunks: Sequence[Chunk], work: Work) -> None:
    """Insert all chunks into a new collection: one task per shard, or one task if the engine takes one writer."""
    parts: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        parts.setdefault(0 if engine.one_writer else chunk.shard, []).append(chunk)
    tasks = [_insert_chunks.remote(engine.address, identity, part, work) for part in parts.values()]
    with track("insert", sum(chunk.count for chunk in chunks)) as advance:
        for _, count in _as_completed(tasks):
            advance(count)


@ray.remote(num_cpus=1, max_retries=0)  # a second attempt would insert twice
def _insert_chunks(address: Address, identity: str, chunks: Sequence[Chunk], work: Work) -> int:
    engine = connect_store(address)
    for chunk in chunks:
        engine.insert(identity, work.passages(chunk), work.vectors(chunk))
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


def _as_completed(tasks: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (task, result) in the order of completion. If one fails, the others are cancelled.

    Raises:
        InputError: a task failed with it.
    """
    pending = list(tasks)
    try:
        while pending:
            (done,), pending = ray.wait(pending)
            yield done, ray.get(done)
    except RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise error.cause from None
        raise
    finally:
        for task in pending:
            ray.cancel(task)


# ---------------------------------------------------------------------------------------------------- the corpus


def _partition(corpus: Folder, settings: IndexSettings, work: Work) -> list[int]:
    """Partition a corpus in an object store, one task per part, unless an interrupted run did."""
    if (known := work.sizes()) is not None:
        return known
    work.drop_spool()
    tasks = [_partition_part.remote(files, settings, work, part) for part, files in enumerate(parts_of(corpus))]
    sizes, seen = [0] * settings.shards, set[str]()
    try:
        with track("corpus", len(tasks)) as advance:
            for _, (counts, columns) in _as_completed(tasks):
                sizes = [total + count for total, count in zip(sizes, counts, strict=True)]
                seen |= columns
                advance()
        require_passages(corpus, sizes, settings.columns, settings.metadata, seen)
    except InputError:
        work.delete()
        raise
    work.set_sizes(sizes)
    return sizes


@ray.remote(num_cpus=1)
def _partition_part(
    files: Mapping[int, Place], settings: IndexSettings, work: Work, part: int
) -> tuple[list[int], set[str]]:
    with output_errors(settings.output):
        return partition_part(files, settings, work, part)


def _sort_shards(corpus: Place, settings: IndexSettings, work: Work, sizes: Sequence[int]) -> None:
    """Sort the passages of each shard by id, one task per shard."""
    files = records.data_files(corpus, "corpus")
    missing = [shard for shard in range(settings.shards) if not work.is_sorted(shard)]
    tasks = [_sort_shard.remote(shard, files, settings, work, chunk_rows(sum(sizes))) for shard in missing]
    try:
        with track("sort", settings.shards, settings.shards - len(tasks)) as advance:
            for _ in _as_completed(tasks):
                advance()
    except BadRow:
        work.delete()
        raise
    work.drop_spool()


@ray.remote(num_cpus=1)
def _sort_shard(shard: int, files: Sequence[Place], settings: IndexSettings, work: Work, rows_at_once: int) -> None:
    with output_errors(settings.output):
        sort_shard(shard, files, settings, work, rows_at_once)


# -------------------------------------------------------------------------------------------------------- vectors


class EncodeChunk:
    """A Ray Data actor that loads the model once and encodes chunks, each to its file."""

    def __init__(
        self, work: Work, model: str, dimensions: int | None, batch_tokens: int, device: str, output: str
    ) -> None:
        self.work = work
        self.batch_tokens = batch_tokens
        self.output = output
        self.fault: str | None = None
        try:
            self.encoder = InstructionEncoder.from_pretrained(model, dimensions=dimensions, device=device)
        except InputError as error:  # Ray restarts an actor that raises, without end
            self.fault = str(error)

    def __call__(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Encode one chunk.

        Args:
            chunk: the fields of a `Chunk`.

        Returns:
            `passages`, how many were encoded, and `fault`, why they cannot be encoded, or None.
        """
        try:
            if self.fault is None:
                with output_errors(self.output):
                    encode_chunk(self.encoder, self.work, Chunk(**chunk), self.batch_tokens)
        except InputError as error:
            self.fault = str(error)
        return {"passages": 0 if self.fault else int(chunk["count"]), "fault": self.fault}


def _encode(chunks: Sequence[Chunk], work: Work, model: str, settings: IndexSettings) -> None:
    """Encode the chunks that have no file yet."""
    missing = work.missing(chunks)
    total = sum(chunk.count for chunk in chunks)
    before = total - sum(chunk.count for chunk in missing)
    with track("encode", total, before) as advance:
        if before:
            advance(0, note=f"{before} from an interrupted run")
        if not missing:
            return
        device = "cuda" if settings.gpus_per_actor else "cpu"
        items = [asdict(chunk) for chunk in missing]
        encoded = ray.data.from_items(items, override_num_blocks=min(len(items), _MAX_BLOCKS)).map(
            EncodeChunk,
            fn_constructor_args=(work, model, settings.dimensions, settings.batch_tokens, device, settings.output),
            compute=ActorPoolStrategy(size=settings.actors),
            num_gpus=settings.gpus_per_actor,
        )
        for row in encoded.iter_rows():
            if row["fault"] is not None:
                raise InputError(row["fault"])
            advance(row["passages"])


# --------------------------------------------------------------------------------------------------------- shards


def _write_shards(
    chunks: Sequence[Chunk], work: Work, root: Place, dimension: int, build: Build, settings: IndexSettings
) -> list[ShardFacts]:
    """Write all shards, one task per shard; shards that an interrupted run finished stay."""
    task = _write_shard.options(num_cpus=settings.cpus_per_shard, num_gpus=settings.gpus_per_shard)
    threads = max(1, int(settings.cpus_per_shard))
    tasks = []
    for shard in range(settings.shards):
        own = [chunk for chunk in chunks if chunk.shard == shard]
        tasks.append(task.remote(root, shard, work, own, dimension, build, threads, settings.output))
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
    output: str,
) -> ShardFacts:
    faiss.omp_set_num_threads(threads)
    with output_errors(output):
        return write_shard(root, shard, work, chunks, dimension, build)


# ----------------------------------------------------------------------------------------------------- compaction


def compact(settings: CompactSettings) -> Published:
    """Fold the changes of an index into its next version, one task per shard. Without changes there is nothing to do.

    Raises:
        InputError: there is no index; one of its files or changes is missing or damaged; no type fits the memory or
            reaches the recall floor; or the disk is full. Nothing is published then.
    """
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
