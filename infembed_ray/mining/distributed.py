"""`infembed mine`: actors search an index for blocks of tuples, and the driver writes the tuples with their negatives.

Each finished block is a file, so an interrupted run repeats only the blocks in progress. The result depends on neither the number
of actors nor on interruptions.
"""

import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import count, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.util import ActorPool

from infembed_ray import ray_compat
from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.config.mining import MineSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.retrievers.baselines import RANKER_KINDS
from infembed_ray.mining.miner import KnownPositives, Mined, Miner, depth_of, known_positives, read
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import counted, say, track
from infembed_ray.ray_cluster import connect, errors_of_tasks
from infembed_ray.records import tuples
from infembed_ray.records.files import BadRows, write_bad_rows
from infembed_ray.records.tables import KEPT_FILE
from infembed_ray.records.tuples import Example
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.versions import change_log
from infembed_ray.storage import durable
from infembed_ray.storage.places import Place, address
from infembed_ray.storage.steps import STATES, Published, Step, find_input, output_state

ROWS_PER_BLOCK = 256
_IN_FLIGHT = 2
"""Blocks per actor that are sent ahead."""
_COUNTS = ("mined", "too_similar", "short")
"""Fields of `Mined` that the metadata of a block's file hold."""


@dataclass(frozen=True)
class MiningInputs:
    """What a mining reads: its records, the index's version and the teacher, if there is one."""

    records: Place
    index: Index
    teacher: RetrieverSettings | None


def run(settings: MineSettings) -> Published:
    """Mine hard negatives for all tuples, and publish the tuples as `records.parquet`, an input of `infembed train`.

    Raises:
        InputError: an input cannot be used, or the output cannot be written.
    """
    inputs, step = prepare(settings)
    if done := step.finished():
        return done
    positives = known_positives(partial(read, settings, inputs.records))
    connect()
    with step.publish() as staging:
        parts = staging.path / STATES
        parts.mkdir(exist_ok=True)
        write_bad_rows(staging.path, _mine(settings, inputs, positives, parts))
        staging.counts = _join(parts, staging.path / KEPT_FILE)
        shutil.rmtree(parts)
    counts = staging.counts
    say(
        f"mine: {counts['mined']:,} negatives for {counted(counts['tuples'], 'tuple')}; {counted(counts['too_similar'], 'passage')} "
        f"left out as false negatives; {counts['short']:,} of the tuples have fewer mined negatives than negatives={settings.negatives}"
    )
    return step.published()


def prepare(settings: MineSettings) -> tuple[MiningInputs, Step]:
    """Locate the inputs, check the index's encoder and the teacher without their weights, and identify the run.

    Raises:
        InputError: an input does not exist, does not fit, or the output cannot be written.
    """
    records, index, (teacher, paths, names) = check_all(
        lambda: find_input(settings.records, "records"),
        lambda: Index.describe(settings.index),
        lambda: _teacher(settings),
    )
    facts = index.facts
    InstructionEncoder.from_pretrained(facts.model, dimensions=facts.dimensions, device="meta")
    changed = change_log(index.path, facts).last()
    version = index.version if changed <= facts.folded else f"{index.version} with changes to {changed}"
    step = Step("mine", settings, settings.output, {"records": records, **paths}, {"index": version, **names})
    return MiningInputs(records, index, teacher), step


def _teacher(settings: MineSettings) -> tuple[RetrieverSettings | None, Mapping[str, Place], Mapping[str, str]]:
    if settings.teacher is None:
        return None, {}, {}
    teacher = baselines.resolve("teacher", settings.teacher, where="teacher")
    if teacher.kind in RANKER_KINDS:
        raise InputError(f"teacher={teacher.kind}: ranks whole tasks; give an encoder or a reranker")
    paths, names = baselines.inputs(teacher, "teacher")
    teacher = teacher.model_copy(update={part: address(path) for part, path in paths.items()})
    named = {f"teacher.{part}": name for part, name in names.items()}
    return teacher, {f"teacher.{part}": path for part, path in paths.items()}, named


class _Actor:
    """A `Miner` in a process of its own, loaded at the first block."""

    def __init__(self, load: partial[Miner]) -> None:
        self._load = cache(load)

    def mine(self, rows: list[Example], positives: KnownPositives) -> Mined:
        return self._load().mine(rows, positives)


def _mine(settings: MineSettings, inputs: MiningInputs, positives: KnownPositives, parts: Path) -> BadRows:
    """Write the file of every block that has none yet; return the rows that are left out."""
    device = "cuda" if settings.gpus_per_worker else "cpu"
    load = partial(Miner, settings, address(inputs.index.path), inputs.teacher, device)
    actor = ray.remote(num_gpus=settings.gpus_per_worker, **ray_compat.retries())(_Actor)
    shared, pool = ray.put(positives), ActorPool([actor.remote(load) for _ in range(settings.workers)])
    bad = BadRows("records", settings.on_bad_row == "reject")
    rows, waiting = read(settings, inputs.records, bad), deque[Path]()
    with track("mine", None) as advance:
        for number in count():
            block = list(islice(rows, ROWS_PER_BLOCK))
            file = parts / f"part-{number:06}.parquet"
            if file.exists():
                advance(len(block))
            elif block:
                pool.submit(lambda miner, block: miner.mine.remote(block, shared), block)
                waiting.append(file)
            while waiting and (not block or len(waiting) >= _IN_FLIGHT * settings.workers):
                with errors_of_tasks():
                    mined: Mined = pool.get_next()  # in the order of the blocks
                _write(waiting.popleft(), mined)
                advance(len(mined.rows))
            if not block:
                return bad
    raise AssertionError  # `count` does not end


def _write(file: Path, mined: Mined) -> None:
    table = pa.Table.from_pylist([vars(row) for row in mined.rows], tuples.SCHEMA)
    counts = {name: str(getattr(mined, name)) for name in _COUNTS}
    with durable.replacing(file) as sink:
        pq.write_table(table.replace_schema_metadata(counts), sink)


def _join(parts: Path, output: Path) -> dict[str, int]:
    """Join the blocks' files in order; return the counts of the run."""
    counts = dict.fromkeys(("tuples", *_COUNTS), 0)
    with pq.ParquetWriter(output, tuples.SCHEMA) as writer:
        for file in sorted(parts.glob("part-*.parquet")):
            table = pq.read_table(file)
            for name in _COUNTS:
                counts[name] += int(table.schema.metadata[name.encode()])
            counts["tuples"] += table.num_rows
            writer.write_table(table.cast(tuples.SCHEMA))
    return counts


def describe(settings: MineSettings) -> Iterator[str]:
    """Yield what a run would do, line by line; InputError as `prepare`."""
    inputs, step = prepare(settings)
    if (yield from output_state(step)):
        return
    index = inputs.index
    yield f"tuples: {sum(1 for _ in read(settings, inputs.records)):,} of {inputs.records}"
    yield f"index {index.version}: {index.facts.passages:,} passages, model {index.facts.model}"
    judge = "the index's encoder" if inputs.teacher is None else getattr(inputs.teacher, "model", inputs.teacher.kind)
    yield f"negatives: {settings.negatives} of {depth_of(settings)} passages per tuple, judged by {judge}"
