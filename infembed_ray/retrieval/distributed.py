"""`infembed index`: a corpus encoded by Ray Data actors, written as shards by Ray tasks.

The driver reads the corpus once and deals it to files; from then on nothing of it passes the driver. Passages are dealt to
shards by a hash of their ids and lie in the order of their ids, so the order of the rows in the corpus leaves no trace.
Actors encode chunks of a shard, each to a file of its own; a task a shard puts the vectors together and makes the index.
What is finished stays: an interrupted build goes on with the chunks and shards that are missing, and one that failed
finds everything encoded, also with another index type or floor. Once it is published, `infembed index compact` makes it
another type without encoding.

A build begins a lineage: changes made to what was served from the same output before are not in it, which is said.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.data import ActorPoolStrategy
from ray.exceptions import RayTaskError

from infembed_ray import records
from infembed_ray.config import CompactSettings, FieldType, IndexSettings
from infembed_ray.distributed import connect, on_a_cluster
from infembed_ray.errors import InputError
from infembed_ray.modeling.checkpoint import locate
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import say, track
from infembed_ray.retrieval import factory
from infembed_ray.retrieval.changes import ChangeLog
from infembed_ray.retrieval.compaction import Compaction
from infembed_ray.retrieval.corpus import BadRow, arrange, deal, require_columns, spool_file
from infembed_ray.retrieval.faiss_import import faiss
from infembed_ray.retrieval.index import FORMAT, IndexFacts, changes_of
from infembed_ray.retrieval.passages import open_passages
from infembed_ray.retrieval.shards import (
    PASSAGES_FILE,
    VECTORS_FILE,
    Build,
    ShardFacts,
    build_shard,
    verify,
    write_vectors,
)
from infembed_ray.retrieval.versions import finished
from infembed_ray.storage import Published, Step, existing, read_manifest, resolve, write_json

CHUNK_PASSAGES = 512
"""Passages encoded together: enough to batch by length, and what an interruption loses per actor."""
ENCODED = "encoded"
_DEALT = "sizes.json"
_MOST_CHUNK_PASSAGES = 8192
_MOST_CHUNKS = 10_000
"""Of a corpus, before chunks become larger."""
_MOST_BLOCKS = 4096
"""Of a Ray dataset: the driver holds something of each."""


def run(settings: IndexSettings) -> Published:
    """Encode the corpus and publish its index; nothing to do if the same corpus was indexed by the same model.

    Raises:
        InputError: corpus, model, type or output cannot be used; the model's embedding of a passage is not finite; no
            type fits the memory, or none finds what the floor demands; or the disk is full. Nothing is published then.
    """
    require_columns(settings.columns, settings.metadata)
    corpus = existing(settings.corpus, "corpus")
    found = locate(settings.model, "model")
    names = {**found.names, "format": str(FORMAT)}
    step = Step("index", settings, settings.output, {"corpus": corpus, **found.inputs}, names)
    if done := finished(step):
        return done
    _tell_of_changes(step)
    # Without its weights, which the actors load: what is it, and can it be what is asked for?
    encoder = InstructionEncoder.from_pretrained(found.path, dimensions=settings.dimensions, device="meta")
    if settings.factory is not None:
        factory.new(settings.factory, encoder.dimension)
    _require_gpu_faiss("index", settings.gpus_per_shard)
    with _told(settings.output), _workroom(step, settings) as room:
        sizes = _deal(corpus, settings, room)
        build = _build(settings, sizes, encoder.dimension)
        connect()
        _arrange_all(corpus, settings, room)
        chunks = [c for shard, size in enumerate(sizes) for c in room.chunks(shard, size, sum(sizes))]
        with step.publish() as staging:
            root = staging.path.resolve()  # actors and tasks may work in other directories
            say(f"index: {sum(sizes)} passages, {settings.shards} shards of {build.factory}, {found.path}")
            _encode(chunks, room, found.path, settings)
            shards = _write_shards(chunks, room, root, encoder.dimension, build, settings)
            facts = IndexFacts(
                encoder=encoder.fingerprint(),
                model=found.path,
                template=encoder.text.template,
                dimension=encoder.dimension,
                dimensions=settings.dimensions,
                passages=sum(shard.passages for shard in shards),
                metadata=settings.metadata,
                shards=shards,
                lineage=step.identity,
            )
            if facts.passages != sum(sizes):
                raise RuntimeError(f"{facts.passages} of {sum(sizes)} passages reached a shard")
            staging.counts = {"passages": facts.passages, "shards": len(shards)}
            staging.facts = {"index": facts.as_json()}
        shutil.rmtree(room.root)
    return step.published()


def _require_gpu_faiss(verb: str, gpus: float) -> None:
    """Check that FAISS runs on GPUs where the shards are built: on a cluster that is a GPU node, not the driver's.

    Raises:
        InputError: it runs on CPUs only.
    """
    if gpus and on_a_cluster():
        connect()
        say(f"{verb}: checking FAISS on a GPU node")
        check = ray.remote(num_cpus=0, num_gpus=gpus)(factory.require_gpu_faiss)
        list(_as_completed([check.remote()]))
    elif gpus:
        factory.require_gpu_faiss()


def _tell_of_changes(step: Step) -> None:
    """Say that a build leaves behind what was changed in the version that is served now."""
    with contextlib.suppress(InputError):  # there is none
        current = resolve(step.root)
        facts = IndexFacts.read(current)
        segments = ChangeLog(changes_of(current, facts), facts.metadata, facts.dimension).last()
        if segments and facts.lineage != step.identity:
            say(
                f"index: {segments} segments of changes were made to {current.name} through the API; this build begins with "
                "the corpus alone and does not have them (`infembed index compact` is what keeps them)"
            )


def _build(settings: IndexSettings, sizes: Sequence[int], dimension: int) -> Build:
    """The type of all shards; the largest decides."""
    largest = max(sizes)
    return Build(
        factory.choose(largest, dimension, settings.memory_gib, settings.shards, settings.factory),
        settings.memory_gib,
        settings.recall_floor,
        settings.gpus_per_shard > 0,
        settings.shards,
    )


@contextlib.contextmanager
def _told(output: str) -> Iterator[None]:
    """Turn what the file system refuses in the block into one line that names the setting."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(
            f"output={output}: node {platform.node()} does not see {error.filename}, which another one wrote there; give a "
            "directory that all nodes share"
        ) from error
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):  # Ray's
            raise
        raise InputError(
            f"output={output}: cannot be written ({error.strerror or error}); make room there and run the same command "
            "again: it goes on with what is finished"
        ) from error


# -------------------------------------------------------------------------------------------------- the workroom


@dataclass(frozen=True)
class Chunk:
    """Passages of one shard that are encoded together: rows of its file. `file` will hold their vectors."""

    shard: int
    passages: Path
    start: int
    count: int
    file: Path

    def as_item(self) -> dict[str, Any]:
        """As a row of a Ray dataset."""
        return {"file": str(self.file), "passages": str(self.passages), "start": self.start, "count": self.count}


@dataclass(frozen=True)
class Workroom:
    """Directory of what does not depend on the type of the index: passages by shard, and their vectors."""

    root: Path

    @property
    def spool(self) -> Path:
        """Directory of the rows as they come."""
        return self.root / "spool"

    def shard(self, shard: int) -> Path:
        """Directory of a shard's passages and of all of its vectors, once they are put together."""
        return self.root / f"shard-{shard:05d}"

    def chunks(self, shard: int, passages: int, of: int) -> list[Chunk]:
        """All chunks of a shard, in order; what a chunk's file holds never changes.

        Args:
            passages: of the shard.
            of: of the corpus.
        """
        size = max(CHUNK_PASSAGES, min(_MOST_CHUNK_PASSAGES, of // _MOST_CHUNKS))
        chunks = []
        for start in range(0, passages, size):
            count = min(size, passages - start)
            file = self.shard(shard) / ENCODED / f"{start:010d}-{count}.npy"
            chunks.append(Chunk(shard, self.shard(shard) / PASSAGES_FILE, start, count, file))
        return chunks

    def missing(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those that are not encoded yet."""
        there: set[Path] = set()
        for shard in {chunk.shard for chunk in chunks}:
            if (self.shard(shard) / VECTORS_FILE).is_file():
                there.update(chunk.file for chunk in chunks if chunk.shard == shard)
            elif (self.shard(shard) / ENCODED).is_dir():
                there.update((self.shard(shard) / ENCODED).glob("*.npy"))
        return [chunk for chunk in chunks if chunk.file not in there]


@contextlib.contextmanager
def _workroom(step: Step, settings: IndexSettings) -> Iterator[Workroom]:
    """The workroom of everything that has the same passages and vectors; one run at a time."""
    decides = {
        "inputs": step.contents,
        "columns": settings.columns,
        "metadata": settings.metadata,
        "shards": settings.shards,
        "dimensions": settings.dimensions,
    }
    name = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
    root = step.root.resolve() / f".{name}.encoded"
    with (step.root / f".{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"output={step.root}: another run is encoding this very corpus; wait for it") from error
        root.mkdir(exist_ok=True)
        yield Workroom(root)


# ---------------------------------------------------------------------------------------------------- the corpus


def _deal(corpus: Path, settings: IndexSettings, room: Workroom) -> list[int]:
    """Deal the corpus to the shards, unless an interrupted run did; passages of each."""
    done = room.root / _DEALT
    if not done.is_file():
        try:
            with track("corpus", None) as advance:
                sizes = deal(corpus, settings.columns, settings.metadata, settings.shards, room.spool, advance)
        except InputError:
            shutil.rmtree(room.root)
            raise
        write_json(done, sizes)
    dealt: list[int] = json.loads(done.read_text(encoding="utf-8"))
    return dealt


def _arrange_all(corpus: Path, settings: IndexSettings, room: Workroom) -> None:
    """Put the passages of each shard in order, each by its own task."""
    files = records.data_files(corpus, "corpus")
    tasks = []
    for shard in range(settings.shards):
        room.shard(shard).mkdir(exist_ok=True)
        target = room.shard(shard) / PASSAGES_FILE
        if not target.is_file():
            spooled = spool_file(room.spool, shard)
            tasks.append(_arrange.remote(spooled, files, settings.metadata, target, settings.output))
    try:
        with track("sort", settings.shards, settings.shards - len(tasks)) as advance:
            for _ in _as_completed(tasks):
                advance()
    except BadRow:
        (room.root / _DEALT).unlink()  # the tasks that were cancelled may still write there
        shutil.rmtree(room.root, ignore_errors=True)
        raise
    shutil.rmtree(room.spool, ignore_errors=True)


@ray.remote(num_cpus=1)
def _arrange(
    spooled: Path, files: Sequence[Path], metadata: Mapping[str, FieldType], passages: Path, output: str
) -> None:
    with _told(output):
        arrange(spooled, files, metadata, passages)


def _as_completed(tasks: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Tasks and their results, in the order in which they end; the others are cancelled when one fails, or its worker.

    Raises:
        InputError: one failed so.
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


# -------------------------------------------------------------------------------------------------------- vectors


class EncodeChunk:
    """A Ray Data actor: loads the model once, then encodes chunk after chunk to its file."""

    def __init__(self, model: str, dimensions: int | None, batch_tokens: int, device: str, output: str) -> None:
        self.batch_tokens = batch_tokens
        self.output = output
        self.model = model
        self.fault: str | None = None
        try:
            self.encoder = InstructionEncoder.from_pretrained(model, dimensions=dimensions, device=device)
        except InputError as error:  # Ray would try again and again to start an actor that fails
            self.fault = str(error)

    def __call__(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Columns `file, passages, start, count` -> `passages`, and `fault`: why they cannot be encoded, if so."""
        try:
            if self.fault is None:
                with _told(self.output):
                    self._encode(Path(chunk["file"]), Path(chunk["passages"]), int(chunk["start"]), int(chunk["count"]))
        except InputError as error:
            self.fault = str(error)
        return {"passages": 0 if self.fault else int(chunk["count"]), "fault": self.fault}

    def _encode(self, file: Path, passages: Path, start: int, count: int) -> None:
        rows = open_passages(passages).slice(start, count)
        vectors = self.encoder.encode_passages(rows.column("text").to_pylist(), self.batch_tokens)
        broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if broken.size:
            raise InputError(
                f"model={self.model}: its embedding of passage {rows.column('id')[int(broken[0])]} is not finite; "
                "the weights are damaged or training diverged: give another checkpoint"
            )
        file.parent.mkdir(exist_ok=True)
        write_vectors(file, [vectors], *vectors.shape)


def _encode(chunks: Sequence[Chunk], room: Workroom, model: str, settings: IndexSettings) -> None:
    missing = room.missing(chunks)
    total = sum(chunk.count for chunk in chunks)
    before = total - sum(chunk.count for chunk in missing)
    with track("encode", total, before) as advance:
        if before:
            advance(0, note=f"{before} from an interrupted run")
        if not missing:
            return
        device = "cuda" if settings.gpus_per_actor else "cpu"
        items = [chunk.as_item() for chunk in missing]
        encoded = ray.data.from_items(items, override_num_blocks=min(len(items), _MOST_BLOCKS)).map(
            EncodeChunk,
            fn_constructor_args=(model, settings.dimensions, settings.batch_tokens, device, settings.output),
            compute=ActorPoolStrategy(size=settings.actors),
            num_gpus=settings.gpus_per_actor,
        )
        for row in encoded.iter_rows():
            if row["fault"] is not None:
                raise InputError(row["fault"])
            advance(row["passages"])


# --------------------------------------------------------------------------------------------------------- shards


def _write_shards(
    chunks: Sequence[Chunk], room: Workroom, root: Path, dimension: int, build: Build, settings: IndexSettings
) -> list[ShardFacts]:
    """Write all shards, each by its own task; in their order. Those that an interrupted run finished stay."""
    task = _write_shard.options(num_cpus=settings.cpus_per_shard, num_gpus=settings.gpus_per_shard)
    tasks = {}
    for shard in range(settings.shards):
        files = [chunk.file for chunk in chunks if chunk.shard == shard]
        directory = root / room.shard(shard).name
        threads = max(1, int(settings.cpus_per_shard))
        tasks[task.remote(directory, room.shard(shard), files, dimension, build, threads, settings.output)] = shard
    written: dict[int, ShardFacts] = {}
    with track("shards", settings.shards) as advance:
        for done, facts in _as_completed(list(tasks)):
            written[tasks[done]] = facts
            advance(note=f"{facts.factory}, recall@10 {facts.recall_at_10:.3f}")
    for file in root.glob("*.json"):
        file.unlink()
    return [written[shard] for shard in range(settings.shards)]


@ray.remote
def _write_shard(
    directory: Path, room: Path, files: Sequence[Path], dimension: int, build: Build, threads: int, output: str
) -> ShardFacts:
    faiss.omp_set_num_threads(threads)
    done = directory.with_suffix(".json")
    with _told(output):
        if done.is_file():
            facts = ShardFacts(**json.loads(done.read_text(encoding="utf-8")))
            with contextlib.suppress(InputError):  # the machine stopped before it was on the disk
                verify(directory.parent, facts)
                return facts
        vectors = room / VECTORS_FILE
        if not vectors.is_file():
            count = open_passages(room / PASSAGES_FILE).num_rows
            write_vectors(vectors, (np.load(file) for file in files), count, dimension)
        shutil.rmtree(room / ENCODED, ignore_errors=True)
        directory.mkdir(exist_ok=True)
        for name in (PASSAGES_FILE, VECTORS_FILE):
            (directory / name).unlink(missing_ok=True)
            os.link(room / name, directory / name)
        facts = build_shard(directory, build)
        write_json(done, asdict(facts))
        return facts


# ----------------------------------------------------------------------------------------------------- compaction


def compact(settings: CompactSettings) -> Published:
    """Fold the changes made to an index into its next version, a task a shard; nothing to do if there are none.

    Raises:
        InputError: there is no index; a file of it or a change is missing or damaged; no type fits the memory, or none
            finds what the floor demands; or the disk is full. Nothing is published then.
    """
    work = Compaction.of(settings.index, settings.factory, settings.memory_gib, settings.recall_floor)
    if not work.changes and not work.retyped:
        say(f"index compact: no changes since {work.version}")
        return Published(work.base, read_manifest(work.base, "index"), fresh=False)
    step = work.step()
    if done := finished(step):
        work.end()
        return done
    _require_gpu_faiss("index compact", settings.gpus_per_shard)
    work.begin()
    with _told(str(step.root)), step.publish() as staging:
        root = staging.path.resolve()
        say(f"index compact: {work.version} and {work.changes} segments of changes, {len(work.facts.shards)} shards")
        connect()
        task = _compact_shard.options(num_cpus=settings.cpus_per_shard, num_gpus=settings.gpus_per_shard)
        threads, gpu = max(1, int(settings.cpus_per_shard)), settings.gpus_per_shard > 0
        tasks = {task.remote(work, shard, root, threads, gpu): shard for shard in range(len(work.facts.shards))}
        written: dict[int, ShardFacts] = {}
        with track("shards", len(tasks)) as advance:
            for done_task, facts in _as_completed(list(tasks)):
                written[tasks[done_task]] = facts
                advance(note=f"{facts.factory}, recall@10 {facts.recall_at_10:.3f}")
        next_facts = work.finish(root, [written[shard] for shard in sorted(written)])
        staging.counts = {"passages": next_facts.passages, "shards": len(written), "changes": work.changes}
        staging.facts = {"index": next_facts.as_json()}
    work.end()
    return step.published()


@ray.remote
def _compact_shard(work: Compaction, shard: int, root: Path, threads: int, gpu: bool) -> ShardFacts:
    faiss.omp_set_num_threads(threads)
    with _told(str(root.parent)):
        return work.write_shard(shard, root, gpu)
