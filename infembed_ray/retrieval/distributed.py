"""`infembed index` and `infembed index compact` on Ray.

Tasks read the corpus, sort and build shards; Ray Data actors encode blocks, each to a file of its own. For an output in an
object store, tasks and actors write there; nothing passes through the driver.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import ray
from ray.data import ActorPoolStrategy

from infembed_ray import ray_compat
from infembed_ray.config.retrieval import CompactSettings, IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.progress import counted, say, track
from infembed_ray.ray_cluster import connect, errors_of_tasks, require_resources
from infembed_ray.records.files import write_bad_rows
from infembed_ray.retrieval import build, compaction
from infembed_ray.retrieval.build import Block, Work, blocks_of, work_directory
from infembed_ray.retrieval.faiss_import import faiss
from infembed_ray.retrieval.milvus import Milvus, MilvusAddress, is_address
from infembed_ray.retrieval.versions import finished
from infembed_ray.storage.steps import Published, Staging

_MAX_BLOCKS = 4096
"""Blocks of a Ray dataset; the driver holds metadata of each."""


def run(settings: IndexSettings) -> Published:
    """Encode the corpus and publish its index, unless it is there; InputError as `build.prepare` and `build.build_index`."""
    if is_address(settings.output):
        return _run_in_engine(settings)
    corpus, model, step = build.prepare(settings)
    if done := finished(step):
        return done
    encoder = build.check_model(settings, model)
    build.build_index(step, corpus, model, encoder, settings, OnRay(settings, model))
    return step.published()


def compact(settings: CompactSettings) -> Published:
    """Fold the changes of an index into its next version, one task per shard; see `compaction.compact`."""
    return compaction.compact(settings, OnRay())


class OnRay(build.Tasks):
    """Runs the steps of a build as tasks of a Ray cluster, which it joins or starts first."""

    def __init__(self, settings: IndexSettings | None = None, model: str = "") -> None:
        super().__init__()
        self._settings = settings
        self._model = model

    def run(self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], cpus: float = 1) -> Iterator[Any]:
        """As `Tasks.run`, in the order of completion. If a task fails, the others are cancelled.

        Args:
            cpus: CPUs per task, and threads of FAISS.

        Raises:
            InputError: a task failed with it, or this machine has fewer CPUs or GPUs than a task or actor takes.
        """
        connect()
        given = self._settings  # all that it will take, before hours of encoding
        gpus, per_shard = (given.gpus_per_actor, given.cpus_per_shard) if given else (0.0, cpus)
        require_resources(gpus_per_actor=("GPU", gpus), cpus_per_shard=("CPU", per_shard))
        task = _task.options(num_cpus=cpus, max_retries=0 if function is _insert else 3)  # twice would insert twice
        pending = [task.remote(function, max(1, int(cpus)), *arguments) for arguments in calls]
        try:
            while pending:
                (done,), pending = ray.wait(pending)
                with errors_of_tasks():
                    result = ray.get(done)
                yield result
        finally:
            for left in pending:
                ray.cancel(left)

    def encode(self, blocks: Sequence[Block], work: Work) -> Iterator[tuple[int, int]]:
        """As `Tasks.encode`, on an actor pool of Ray Data."""
        items = [asdict(block) for block in blocks]
        encoded = ray.data.from_items(items, override_num_blocks=min(len(items), _MAX_BLOCKS)).map(
            EncodeBlock,
            fn_constructor_args=(work, self._model),
            compute=ActorPoolStrategy(size=work.settings.actors),
            num_gpus=work.settings.gpus_per_actor,
            ray_remote_args_fn=ray_compat.retries,
        )
        for row in encoded.iter_rows():
            if row["fault"] is not None:
                raise InputError(row["fault"])
            yield row["passages"], row["new"]


@ray.remote
def _task(function: Callable[..., Any], threads: int, *arguments: Any) -> Any:
    faiss.omp_set_num_threads(threads)
    return function(*arguments)


class EncodeBlock:
    """A Ray Data actor that loads the model once and encodes blocks, each to its file."""

    def __init__(self, work: Work, model: str) -> None:
        # Late: other tasks of this module need no torch.
        from infembed_ray.modeling.encoder import InstructionEncoder

        self._work, settings = work, work.settings
        self._fault: str | None = None
        device = "cuda" if settings.gpus_per_actor else "cpu"
        try:
            self._encoder = InstructionEncoder.from_pretrained(model, dimensions=settings.dimensions, device=device)
        except InputError as error:  # Ray restarts an actor that raises, without end
            self._fault = str(error)

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """Encode one block; returns its `passages`, how many are `new`, and the `fault` for which they cannot be encoded, or None."""
        new = 0
        try:
            if self._fault is None:
                with build.output_errors(self._work.settings.output):
                    new = build.encode_block(self._encoder, self._work, Block(**block))
        except InputError as error:
            self._fault = str(error)
        return {"passages": int(block["count"]), "new": new, "fault": self._fault}


# --------------------------------------------------------------------------------------------- an external engine


def _run_in_engine(settings: IndexSettings) -> Published:
    """As `run`, into a new collection of an external engine, which its alias names in the end."""
    engine, local = build.prepare_engine(settings)
    corpus, model, step = build.prepare(local)
    if done := next((version for version in engine.versions() if version.id == step.identity), None):
        engine.use(step.identity)
        return Published(step.path, done.manifest, fresh=False, uri=settings.output)
    started = time.monotonic()
    encoder = build.check_model(settings, model)
    tasks = OnRay(local, model)
    with build.output_errors(local.output), work_directory(step, local, encoder.dimension) as work:
        engine.begin(step.identity, settings.metadata, encoder.dimension, settings.factory)  # first: it may refuse
        sizes, bad = build.partition_corpus(corpus, work, tasks)
        build.sort_shards(corpus, sizes, work, tasks, None)
        say(f"index: {counted(sum(sizes), 'passage')} to {settings.output}, {model}")
        build.encode_passages(sizes, work, tasks)
        parts: dict[int, list[Block]] = {}  # one task per shard, or one task if the engine takes one writer
        for block in blocks_of(sizes):
            parts.setdefault(0 if engine.one_writer else block.shard, []).append(block)
        with track("insert", sum(sizes)) as advance:
            for count in tasks.run(_insert, [(engine.address, step.identity, part, work) for part in parts.values()]):
                advance(count)
        facts = build.facts_of(step, encoder, model, settings, [], sum(sizes))
        made = Staging(step.partial, counts={"passages": facts.passages}, facts={"index": facts.as_json()})
        manifest = step.manifest(made, time.monotonic() - started)
        engine.finish(step.identity, manifest)
        write_bad_rows(step.root, bad)
        work.delete()
    say(f"index: {engine.address} names this version; `infembed index use` names another")
    return Published(step.path, manifest, fresh=True, uri=settings.output)


def _insert(address: MilvusAddress, identity: str, blocks: Sequence[Block], work: Work) -> int:
    engine = Milvus(address)
    for block in blocks:
        engine.insert(identity, work.passages(block), work.vectors(block))
    return sum(block.count for block in blocks)
