"""Build an index: partition the corpus by shard, sort by id, encode what is new, build FAISS shards, publish.

`build_index` calls every step through `Tasks`: in this process, or as tasks of a Ray cluster (`distributed.OnRay`). Every step
leaves files behind (`Work`), and one whose files are there is not repeated: an interrupted build resumes. The files do not depend
on the index type. Each appears whole or not at all, so one that is there is finished.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from obstore.exceptions import BaseError

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.modeling.checkpoint import locate
from infembed_ray.progress import counted, say, track
from infembed_ray.records.files import BadRows, write_bad_rows
from infembed_ray.retrieval import faiss_index, shard_files
from infembed_ray.retrieval.chunks import Cutter, as_chunks
from infembed_ray.retrieval.corpus import parts_of, require_columns, require_passages, rows
from infembed_ray.retrieval.milvus import Milvus, MilvusAddress, is_address
from infembed_ray.retrieval.passages import CHUNKS, VectorRows, position, schema, take, write_passages
from infembed_ray.retrieval.shard_files import PASSAGES_FILE, VECTORS_FILE, ShardFacts
from infembed_ray.retrieval.shards import Build, Shard, build_shard, shard_name, shards_of, write_vectors
from infembed_ray.retrieval.versions import FORMAT, IndexFacts, finished, latest_of, warn_of_changes
from infembed_ray.storage import durable, places
from infembed_ray.storage.leases import lease
from infembed_ray.storage.object_store import SCRATCH, convert_errors, is_uri, room, scratch
from infembed_ray.storage.places import Place, address, delivering, listing
from infembed_ray.storage.steps import Staging, Step, find_input
from infembed_ray.telemetry import report

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder

BLOCK_PASSAGES = 512
"""Minimum passages of a block: enough to batch by length; an interruption loses one block per actor."""
ENCODED = "encoded"
REUSED_FILE = "reused.vectors"
SORTED_FILE = "sorted.json"
SIZES_FILE = "sizes.json"
SPOOL = "spool"
_MAX_BLOCK_PASSAGES = 8192
_MAX_BLOCKS = 10_000
"""Blocks of a corpus, beyond which they become larger."""
_ROWS_AT_ONCE = 8192
_SHARE = "give a directory that all nodes share, or a folder of an object store"
_LAYOUT = 7
"""Version of these files. Builds of another version do not resume from them."""
_FORMATS = {"format": str(FORMAT), "documents": "title and text"}
"""How documents are read and stored, in the identity of an index."""


@contextlib.contextmanager
def output_errors(output: str) -> Iterator[None]:
    """Turn an error of the file system or of the object store in the block into an InputError that names the setting."""
    try:
        yield
    except (OSError, BaseError) as error:
        if isinstance(error, (ConnectionError, TimeoutError)):  # raised by Ray
            raise
        number, file = getattr(error, "errno", None), getattr(error, "filename", None)
        missing = isinstance(error, FileNotFoundError)
        in_scratch = is_uri(output) or output.startswith(f"{scratch()}/")
        if missing and file:
            setting = SCRATCH if in_scratch and not is_uri(output) else "output"
            fault = f"node {platform.node()} does not see {file}, which another node wrote"
            raise InputError.of(setting, output, fault, _SHARE) from error
        if is_uri(output) and (number is None or missing):
            with convert_errors(output, "output"):
                raise
        if number is None:
            raise
        setting, place = (SCRATCH, scratch()) if in_scratch else ("output", output)
        remedy = "free space there" if number in (errno.ENOSPC, errno.EDQUOT) else "correct that"
        remedy += " and run the same command again: it resumes"
        raise InputError.of(setting, place, f"cannot be written ({os.strerror(number)})", remedy) from error


class DuplicateId(InputError):
    """Two rows of a corpus have one id."""


@dataclass(frozen=True)
class Block:
    """Rows `start` to `start + count` of a shard's passages, which are encoded together. `number` counts those of the shard."""

    shard: int
    number: int
    start: int
    count: int

    @property
    def name(self) -> str:
        """Name of the file with its vectors."""
        return f"{shard_name(self.shard)}/{ENCODED}/{self.start:010d}.npy"


def blocks_of(sizes: Sequence[int]) -> list[Block]:
    """The blocks of all shards, in order."""
    rows = block_rows(sizes)
    return [
        Block(shard, number, start, min(rows, size - start))
        for shard, size in enumerate(sizes)
        for number, start in enumerate(range(0, size, rows))
    ]


def block_rows(sizes: Sequence[int]) -> int:
    """Maximum rows of a block of a corpus with these shards."""
    return max(BLOCK_PASSAGES, min(_MAX_BLOCK_PASSAGES, sum(sizes) // _MAX_BLOCKS))


@dataclass(frozen=True)
class Base:
    """The older version whose vectors a build reuses: passages whose id and text are in it are not encoded again.

    Passages of both are sorted by id, so a block of new ones is compared with one range of old ones.
    """

    root: Place
    shards: tuple[ShardFacts, ...]
    _opened: dict[int, Shard | None] = field(default_factory=dict, init=False, compare=False)

    def _shard(self, number: int) -> Shard | None:
        """Verify and open a shard, once; None if it is damaged, which the checksums of the new version would hide."""
        if number not in self._opened:
            facts = self.shards[number]
            try:
                shard_files.verify_local(self.root, facts)
                self._opened[number] = Shard.open(self.root, facts)
            except InputError as damage:
                say(f"index: no vectors of {facts.name} are reused: {damage}")
                self._opened[number] = None
        return self._opened[number]

    def vectors(self, passages: pa.Table, dimension: int) -> np.ndarray:
        """The vectors of n > 0 passages by id ascending, n or one for each chunk, as float32; NaN for those that are new."""
        rows = VectorRows.of(passages)
        vectors = np.full((rows.size, dimension), np.nan, np.float32)
        owners = shards_of(passages.column("id"), len(self.shards))
        for number in np.unique(owners).tolist():
            if (shard := self._shard(number)) is None:
                continue
            own = np.flatnonzero(owners == number)
            given = passages.take(own)
            ids = given.column("id")
            first, last = (position(shard.passages, ids[place].as_py()) for place in (0, -1))
            some = shard.passages.slice(first, last + 1 - first)
            twins = pc.index_in(ids, some.column("id").combine_chunks())
            same = pc.equal(given.column("text"), some.column("text").take(twins)).fill_null(False).to_numpy()
            if CHUNKS in given.column_names:  # another version of the tokenizer may cut a text elsewhere
                bounds = given.column(CHUNKS).to_pylist(), some.column(CHUNKS).take(twins).to_pylist()
                same = same & [one == other for one, other in zip(*bounds, strict=True)]
            old = shard.rows.of_passages(first + twins.filter(same).to_numpy())
            vectors[rows.of_passages(own[same])] = shard.vectors(old)
        return vectors


@dataclass(frozen=True)
class Work:
    """The files of a build, in `root`, which every process of the build sees.

    Attributes:
        dimension: of the vectors.
    """

    root: Place
    dimension: int
    settings: IndexSettings

    def partition(
        self, part: int, files: Sequence[Place], cutter: Cutter | None = None
    ) -> tuple[list[int], set[str], BadRows]:
        """Write the rows of a part of the corpus, some files, to one Arrow file per shard.

        Returns:
            Passages of each shard, the names of the columns of all rows, and the rows that cannot be used.

        Raises:
            InputError: this node does not see a file, or it cannot be read; see `corpus.rows`.
        """
        if unseen := next((file for file in files if not file.is_file()), None):
            fault = f"node {platform.node()} does not see {unseen}"
            raise InputError.of("corpus", self.settings.corpus, fault, _SHARE)
        columns, metadata, shards = self.settings.columns, self.settings.metadata, self.settings.shards
        typed, sizes, seen = schema(metadata, cutter is not None), np.zeros(shards, np.int64), set[str]()
        bad = BadRows("corpus", self.settings.on_bad_row == "reject")
        every = itertools.chain.from_iterable(rows(file, columns, metadata, seen, bad, cutter) for file in files)
        with output_errors(self.settings.output), contextlib.ExitStack() as opened:
            directory = opened.enter_context(delivering(self.root / SPOOL / f"{part:05d}"))
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            names = [f"{shard:05d}.arrow" for shard in range(shards)]
            streams = [opened.enter_context(durable.replacing(directory / name)) for name in names]
            writers = [opened.enter_context(pa.ipc.new_file(stream, typed)) for stream in streams]
            while some := list(itertools.islice(every, _ROWS_AT_ONCE)):
                values = zip(zip(*some, strict=True), typed.types, strict=True)
                table = pa.table([pa.array(column, kind) for column, kind in values], typed)
                owners = shards_of(table.column("id"), shards)
                counts = np.bincount(owners, minlength=shards)
                table, start = table.take(pa.array(np.argsort(owners, kind="stable"))), 0
                for writer, count in zip(writers, counts.tolist(), strict=True):
                    if count:
                        writer.write_table(table.slice(start, count))
                    start += count
                sizes += counts
        return sizes.tolist(), seen, bad

    @contextlib.contextmanager
    def _spooled(self, shard: int) -> Iterator[list[Path]]:
        """Give the files with the unsorted rows of a shard, one for each part."""
        spool = self.root / SPOOL
        names = sorted(name for name in listing(spool) if name.endswith(f"/{shard:05d}.arrow"))
        if isinstance(spool, Path):
            yield [spool / name for name in names]
            return
        with room("build") as directory:
            for name in names:
                spool.download(name, directory / name)
            yield [directory / name for name in names]

    def _file(self, shard: int, name: str) -> Place:
        return self.root / shard_name(shard) / name

    def counts(self, shard: int) -> dict[str, int] | None:
        """The `vectors` of a shard, and the passages for which the base has them (`reused`); None before it is sorted."""
        return places.read_json(self._file(shard, SORTED_FILE))

    def sort(self, shard: int, parts: int, rows: int, base: Base | None) -> None:
        """Sort the passages of a shard by id, and write the vectors that `base` has. Only ids are held in memory.

        The passages of a block are one record batch, so that an actor that encodes it reads only these bytes.

        Args:
            parts: of the corpus.
            rows: of a block.

        Raises:
            DuplicateId: two rows have one id.
            InputError: this node does not see the rows of a part, which another node partitioned.
        """
        typed, counts = schema(self.settings.metadata, bool(self.settings.chunk_tokens)), {"reused": 0, "vectors": 0}
        with output_errors(self.settings.output), self._spooled(shard) as spooled:
            if len(spooled) < parts:
                raise FileNotFoundError(errno.ENOENT, "rows are missing", str(self.root / SPOOL))
            with contextlib.ExitStack() as opened:
                names = (PASSAGES_FILE, REUSED_FILE)
                paths = [opened.enter_context(delivering(self._file(shard, name))) for name in names]
                stream, of_vectors = (opened.enter_context(durable.replacing(path)) for path in paths)
                numbers = pa.schema([("vectors", pa.from_numpy_dtype(self.settings.vectors))])
                writer = opened.enter_context(pa.ipc.new_file(stream, typed))
                vectors = opened.enter_context(pa.ipc.new_file(of_vectors, numbers))
                for table in _sorted(spooled, rows):
                    writer.write_table(table.combine_chunks())
                    counts["vectors"] += VectorRows.of(table).size
                    if base is not None:
                        of_base = base.vectors(table, self.dimension)
                        counts["reused"] += int(np.isfinite(of_base[VectorRows.of(table).firsts, 0]).sum())
                        flat = of_base.astype(self.settings.vectors).ravel()
                        vectors.write_batch(pa.record_batch([pa.array(flat)], numbers))
            places.write_json(self._file(shard, SORTED_FILE), counts)

    @contextlib.contextmanager
    def _batches(self, shard: int, name: str = PASSAGES_FILE) -> Iterator[pa.RecordBatchFileReader]:
        with places.open_binary(self._file(shard, name)) as file, pa.ipc.open_file(file) as batches:
            yield batches

    def passages(self, block: Block) -> pa.Table:
        """Read the passages of a block."""
        with self._batches(block.shard) as batches:
            return pa.Table.from_batches([batches.get_batch(block.number)])

    def reused(self, block: Block, count: int) -> np.ndarray:
        """The `count` vectors of a block that are reused, (count, dimension); NaN for the passages to encode."""
        with self._batches(block.shard, REUSED_FILE) as batches:
            if not batches.num_record_batches:  # there is no base
                return np.full((count, self.dimension), np.nan, self.settings.vectors)
            read = batches.get_batch(block.number).column(0).to_numpy(zero_copy_only=False)
        return read.reshape(count, self.dimension).copy()

    def vectors(self, block: Block) -> np.ndarray:
        """Read the vectors of a block, (count, dimension)."""
        return np.load(io.BytesIO(places.read_binary(self.root / block.name)))

    def gather(self, shard: int, blocks: Sequence[Block], directory: Path) -> None:
        """Write the passages and the vectors of a shard, from its blocks in order, into a directory of this machine."""
        with self._batches(shard) as batches:
            numbers = range(batches.num_record_batches)
            tables = (pa.Table.from_batches([batches.get_batch(number)]) for number in numbers)
            count = write_passages(directory / PASSAGES_FILE, batches.schema, tables)
        vectors, precision = map(self.vectors, blocks), self.settings.vectors
        write_vectors(directory / VECTORS_FILE, vectors, count, self.dimension, precision)

    def delete(self) -> None:
        """Delete everything."""
        places.delete(self.root / SIZES_FILE)  # first: a build that finds the sizes expects all other files
        places.clear(self.root)


def _sorted(spooled: Sequence[Path], rows_at_once: int) -> Iterator[pa.Table]:
    """Yield the passages of Arrow files by id ascending, `rows_at_once` at a time."""
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(pa.memory_map(str(file))) for file in spooled]
        table = pa.concat_tables([pa.ipc.open_file(file).read_all() for file in files])
        if not len(table):
            return
        order = pc.sort_indices(table.column("id")).to_numpy().astype(np.int64)
        ids = take(table.select(["id"]), order).column("id").combine_chunks()
        if again := ids[1:].filter(pc.equal(ids[1:], ids[:-1])).unique().to_pylist():
            others = f" and {len(again) - 20:,} others" if len(again) > 20 else ""
            fault = f"several rows have the id {', '.join(again[:20])}{others}"
            raise DuplicateId.of("corpus", None, fault, "ids must be unique")
        for start in range(0, len(order), rows_at_once):
            yield take(table, order[start : start + rows_at_once])


def work_root(step: Step, settings: IndexSettings) -> Place:
    """Return the place of the work of these passages and vectors, which an interrupted build leaves."""
    decides = settings.model_dump(include={"columns", "metadata", "shards", "dimensions", "vectors", "on_bad_row"})
    chunks, layout = [settings.chunk_tokens, settings.chunk_overlap], [_LAYOUT, BLOCK_PASSAGES]
    decides |= {"inputs": step.contents, "chunks": chunks, "layout": layout}
    name = f".{hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]}.encoded"
    return step.root.resolve() / name if step.remote is None else step.remote.parent / name


@contextlib.contextmanager
def work_directory(step: Step, settings: IndexSettings, dimension: int) -> Iterator[Work]:
    """Hold the work of these passages and vectors; InputError if another run holds it."""
    root = work_root(step, settings)
    with lease(root.parent, root.name.strip(".").removesuffix(".encoded"), "output", root.parent):
        if isinstance(root, Path):
            root.mkdir(exist_ok=True)
        yield Work(root, dimension, settings)


# ---------------------------------------------------------------------------------------------------- the pipeline


class Tasks:
    """Runs the steps of a build in this process, one task after the other."""

    def __init__(self, encoder: InstructionEncoder | None = None) -> None:
        self._encoder = encoder

    def run(self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], cpus: float = 1) -> Iterator[Any]:
        """Call a function with each of the arguments; yields the results as they come."""
        yield from itertools.starmap(function, calls)

    def encode(self, blocks: Sequence[Block], work: Work) -> Iterator[tuple[int, int]]:
        """Encode blocks; yields the number of passages of each, and how many of them are new."""
        assert self._encoder is not None
        for block in blocks:
            yield block.count, encode_block(self._encoder, work, block)


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
        lambda: locate(settings.model, "model", kind="encoder"),
    )
    names = {**model.names, **_FORMATS}
    return corpus, model.path, Step("index", settings, settings.output, {"corpus": corpus, **model.inputs}, names)


def prepare_engine(settings: IndexSettings) -> tuple[Milvus, IndexSettings]:
    """Connect to the external engine that `output` names.

    Returns:
        The engine; and the settings of the steps before it, whose output is the place of the unfinished build.

    Raises:
        InputError: a setting is for FAISS only, or the engine cannot be used.
    """
    for name in ("memory_gib", "lexical", "chunk_tokens"):
        if value := getattr(settings, name):
            raise InputError.of(name, value, "is for FAISS shards, not for an external engine", "leave it out")
    engine = Milvus(MilvusAddress.parse(settings.output, "output"))
    place = str(scratch() / "stores" / engine.address.alias)
    return engine, settings.model_copy(update={"output": place, "vectors": "float32"})


def check_model(settings: IndexSettings, model: str) -> InstructionEncoder:
    """Check model and FAISS index type before any work; return the encoder without its weights."""
    # Late: the tasks that import this module need no torch.
    from infembed_ray.modeling.encoder import InstructionEncoder

    encoder = InstructionEncoder.from_pretrained(model, dimensions=settings.dimensions, device="meta")
    Cutter.of(encoder.texts, settings)
    if settings.factory is not None and not is_address(settings.output):  # an external engine checks its own types
        faiss_index.new(settings.factory, encoder.dimension)
    return encoder


def build_here(encoder: InstructionEncoder, corpus: Path, settings: IndexSettings) -> str:
    """Publish an index of a corpus in this process, unless it is there; returns its directory or URI."""
    require_columns(settings.columns, settings.metadata)
    names = {"model": encoder.fingerprint(), **_FORMATS}
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
    cutter = Cutter.of(encoder.texts, settings)
    warn_of_changes(step)
    with output_errors(settings.output), work_directory(step, settings, encoder.dimension) as work:
        sizes, bad = partition_corpus(corpus, work, tasks, cutter)
        build = choose_build(settings, sizes, encoder.dimension)
        sort_shards(corpus, sizes, work, tasks, _base(step, encoder, settings))
        if cutter is not None:
            vectors = [(work.counts(shard) or {})["vectors"] for shard in range(len(sizes))]
            build = choose_build(settings, vectors, encoder.dimension)
        with step.publish() as staging:
            what = f"{counted(sum(sizes), 'passage')}, {counted(settings.shards, 'shard')}"
            say(f"index: {what} of {build.factory}, {model}")
            encoded = encode_passages(sizes, work, tasks)
            blocks = blocks_of(sizes)
            calls = [(work, n, [c for c in blocks if c.shard == n], build) for n in range(settings.shards)]
            shards = write_shards(write_shard, calls, staging, settings.cpus_per_shard, tasks)
            facts = facts_of(step, encoder, model, settings, shards, sum(s.passages for s in shards))
            if facts.passages != sum(sizes):
                raise RuntimeError(f"{facts.passages} of {sum(sizes)} passages reached a shard")
            staging.counts = {"passages": facts.passages, "encoded": encoded, "shards": len(shards)}
            staging.facts = {"index": facts.as_json()}
            write_bad_rows(staging.path, bad)
        shard_files.clear_attempts(step.remote or step.path, shards)
        work.delete()


def facts_of(
    step: Step,
    encoder: InstructionEncoder,
    model: str,
    settings: IndexSettings,
    shards: Sequence[ShardFacts],
    passages: int,
) -> IndexFacts:
    """The facts of an index that was built from a corpus, the first of its lineage."""
    return IndexFacts(
        encoder=encoder.fingerprint(),
        model=model,
        template=encoder.text.template,
        dimension=encoder.dimension,
        passages=passages,
        **settings.model_dump(include={"dimensions", "metadata", "chunk_tokens", "chunk_overlap"}),
        title=settings.columns.get("title", "title") or None,
        shards=shards,
        lineage=step.identity,
    )


# ------------------------------------------------------------------------------------------------------ the corpus


def partition_corpus(
    corpus: Place, work: Work, tasks: Tasks, cutter: Cutter | None = None
) -> tuple[list[int], BadRows]:
    """Partition the corpus, unless an interrupted run did; returns the passages of each shard, and the rows left out.

    A corpus of one part needs no cluster, so its faults are found before Ray starts: InputError as `Work.partition` and
    `require_passages`.
    """
    if (done := places.read_json(work.root / SIZES_FILE)) is not None:
        return done["sizes"], BadRows("corpus", True, rows=done["bad_rows"])
    work.delete()  # what an interrupted deletion left
    parts = parts_of(corpus)
    sizes, seen = [0] * work.settings.shards, set[str]()
    bad = BadRows("corpus", work.settings.on_bad_row == "reject")
    try:
        with track("corpus", len(parts)) as advance:
            calls = [(work, number, files, cutter) for number, files in enumerate(parts)]
            for counts, columns, bad_of_part in (tasks if len(parts) > 1 else Tasks()).run(Work.partition, calls):
                sizes = [total + count for total, count in zip(sizes, counts, strict=True)]
                seen |= columns
                bad.merge(bad_of_part)
                advance(note=f"{sum(sizes)} passages")
        bad.check()
        require_passages(corpus, sum(sizes), work.settings.columns, work.settings.metadata, seen)
    except InputError:
        work.delete()
        raise
    left_out = json.loads(json.dumps(bad.rows, default=str))
    places.write_json(work.root / SIZES_FILE, {"sizes": sizes, "bad_rows": left_out})
    return sizes, bad


def sort_shards(corpus: Place, sizes: Sequence[int], work: Work, tasks: Tasks, base: Base | None) -> None:
    """Sort the passages of all shards by id, and find the vectors that the base has; DuplicateId as `Work.sort`."""
    missing = [shard for shard in range(len(sizes)) if work.counts(shard) is None]
    parts, rows = len(parts_of(corpus)), block_rows(sizes)
    try:
        with track("sort", len(sizes), len(sizes) - len(missing)) as advance:
            for _ in tasks.run(Work.sort, [(work, shard, parts, rows, base) for shard in missing]):
                advance()
    except DuplicateId:
        work.delete()
        raise
    places.clear(work.root / SPOOL)


def _base(step: Step, encoder: InstructionEncoder, settings: IndexSettings) -> Base | None:
    """The latest version, if this encoder made it, with the same chunks, in this precision or a better one."""
    if latest := latest_of(step):
        root, facts = latest
        of_encoder = facts.encoder == encoder.fingerprint() and facts.vectors in (settings.vectors, "float32")
        if of_encoder and (facts.chunk_tokens, facts.chunk_overlap) == (settings.chunk_tokens, settings.chunk_overlap):
            return Base(root, tuple(facts.shards))
    return None


# -------------------------------------------------------------------------------------------------------- vectors


def encode_passages(sizes: Sequence[int], work: Work, tasks: Tasks) -> int:
    """Encode the blocks that have no file yet; returns how many passages this build encodes, with interrupted runs."""
    encoded = listing(work.root)
    missing = [block for block in blocks_of(sizes) if block.name not in encoded]
    total, left = sum(sizes), sum(block.count for block in missing)
    figures = {"encoded": 0, "reused": 0}
    with track("encode", total, total - left) as advance:
        if left < total:
            advance(0, note=f"{total - left} from an interrupted run")
        for count, new in tasks.encode(missing, work) if missing else ():
            figures = {"encoded": figures["encoded"] + new, "reused": figures["reused"] + count - new}
            report(index_passages_total=figures)
            advance(count)
    new = total - sum((work.counts(shard) or {}).get("reused", 0) for shard in range(len(sizes)))
    if new < total:
        say(f"index: {new} of {total} passages were encoded; the vectors of the others are those of the version before")
    return new


def encode_block(encoder: InstructionEncoder, work: Work, block: Block) -> int:
    """Encode the new passages of a block; returns their number. InputError if an embedding is not finite."""
    passages = work.passages(block)
    rows = VectorRows.of(passages)
    vectors = work.reused(block, rows.size)
    new = np.flatnonzero(np.isnan(vectors[rows.firsts, 0]))
    if new.size:
        passages = passages.take(new)
        texts = passages.column("text").to_pylist()
        if rows.starts is not None:
            cut = zip(texts, passages.column(CHUNKS).to_pylist(), strict=True)
            texts = [chunk.text for text, bounds in cut for chunk in as_chunks(text, bounds)]
        encoded = encoder.encode_passages(texts, work.settings.batch_tokens)
        broken = np.flatnonzero(~np.isfinite(encoded).all(axis=1))
        if broken.size:
            ids = VectorRows.of(passages).spread(passages.column("id").to_numpy())
            fault = f"its embedding of passage {ids[broken[0]]} is not finite"
            remedy = "the weights are damaged or training diverged: give another checkpoint"
            raise InputError.of("model", encoder.source, fault, remedy)
        vectors[rows.of_passages(new)] = encoded
    with delivering(work.root / block.name) as file:
        write_vectors(file, [vectors], rows.size, work.dimension, work.settings.vectors)
    return len(new)


# --------------------------------------------------------------------------------------------------------- shards


def choose_build(settings: IndexSettings, sizes: Sequence[int], dimension: int) -> Build:
    """The index type of all shards, chosen for the largest."""
    given = settings.memory_gib, settings.shards, settings.factory, settings.vectors
    chosen = faiss_index.choose(max(sizes), dimension, *given)
    return Build(chosen, settings.memory_gib, settings.recall_floor, settings.shards, settings.lexical)


def write_shards(
    function: Callable[..., ShardFacts], calls: Sequence[Sequence[Any]], staging: Staging, cpus: float, tasks: Tasks
) -> list[ShardFacts]:
    """Write all shards of an index, one task per shard; those that an interrupted run finished stay.

    Args:
        function: takes the place of the index, and the arguments of a call.
    """
    root = staging.remote or staging.path.resolve()  # tasks have other working directories
    shards: list[ShardFacts] = []
    with track("shards", len(calls)) as advance:
        for facts in tasks.run(function, [(root, *call) for call in calls], cpus):
            shards.append(facts)
            advance(note=f"{facts.factory}, recall@10 {facts.recall_at_10:.3f}")
    staging.resumed |= {shard.name for shard in shards}
    return sorted(shards, key=lambda facts: facts.name)


def write_shard(root: Place, work: Work, shard: int, blocks: Sequence[Block], build: Build) -> ShardFacts:
    """Join the vectors of a shard and build it, unless an interrupted run did."""

    def write(directory: Path) -> ShardFacts:
        work.gather(shard, blocks, directory)
        return build_shard(directory, build)

    with output_errors(work.settings.output):
        return shard_files.write_once(root, shard_name(shard), write)
