"""`infembed plan index` and `infembed index --dry-run`: memory and disk of an index, by FAISS's own layout (`retrieval.faiss_index`)."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from infembed_ray.config.planning import PlanIndexSettings
from infembed_ray.config.retrieval import IndexSettings, Precision
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.planning.backbones import load
from infembed_ray.progress import aligned
from infembed_ray.records.files import BadRows, data_files
from infembed_ray.retrieval import faiss_index
from infembed_ray.retrieval.build import check_model, choose_build, prepare, prepare_engine, work_root
from infembed_ray.retrieval.chunks import Cutter
from infembed_ray.retrieval.corpus import count_passages, rows
from infembed_ray.retrieval.milvus import is_address
from infembed_ray.retrieval.versions import compacted_from
from infembed_ray.storage.places import address, listing
from infembed_ray.storage.steps import gib, output_state, require_space

_TEXT_BYTES = 400 / 75
"""Bytes of a passage's text and metadata per token."""
_PASSAGE_OVERHEAD = 56
"""Approximate bytes of a passage's id, its offsets in Arrow columns and its entry in the sorted ids."""
_UNFILLED = 12
"""Assumed tokens by which a chunk misses `chunk_tokens`: it ends after a sentence. On prose, 0.97 to 1.16 times the real chunks are planned."""
_CUT = 256  # passages of a corpus that are cut to estimate the chunks of all


def shard_size(
    factory: str, dimension: int, vectors: int, passage_bytes: float, precision: Precision = "float16"
) -> tuple[float, float]:
    """Estimate the bytes of memory and of disk of a shard; `passage_bytes` is the mean of text and metadata of a vector."""
    index = faiss_index.new(factory, dimension)
    memory = faiss_index.index_bytes(index, vectors)
    originals = 0 if faiss_index.holds_originals(index, precision) else np.dtype(precision).itemsize * dimension
    return memory, memory + vectors * (passage_bytes + _PASSAGE_OVERHEAD + originals)


@dataclass(frozen=True)
class TypeSizes:
    """Bytes of an index of one FAISS type, all shards together: in memory, one copy, while searched; and on disk."""

    factory: str
    memory: float
    disk: float


@dataclass(frozen=True)
class IndexPlan:
    """An index: all types in the order in which `infembed index` prefers them, then exact search; and the one it chooses."""

    model: str
    dimension: int
    passages: int
    shards: int
    types: tuple[TypeSizes, ...]
    chosen: str
    vectors: int
    assumed: str = ""


def plan(settings: PlanIndexSettings) -> IndexPlan:
    """Estimate every type; nothing is built.

    Raises:
        InputError: the settings do not fit each other or the model, or no type fits `memory_gib`.
    """
    of_model = load(TrainSettings(model=settings.model, records="", output="")).dimension
    dimension = settings.dimensions or of_model
    if dimension > of_model:
        raise InputError.of("dimensions", dimension, f"the model has {of_model}", "give as many or fewer")
    filled = (settings.chunk_tokens or math.inf) - _UNFILLED
    shared = min(settings.chunk_overlap, filled / 2)
    chunks = max(1.0, (settings.passage_tokens - shared) / (filled - shared) + 0.5)  # the last one is half empty
    vectors, precision = math.ceil(settings.passages * chunks / settings.shards), settings.vectors
    chosen = faiss_index.choose(vectors, dimension, settings.memory_gib, settings.shards, settings.factory, precision)
    types = [] if settings.factory else faiss_index.candidates(vectors, precision)
    sizes, text = [], settings.passage_tokens * _TEXT_BYTES / chunks
    for factory in dict.fromkeys([*types, chosen, "Flat"]):
        memory, disk = shard_size(factory, dimension, vectors, text, precision)
        sizes.append(TypeSizes(factory, memory * settings.shards, disk * settings.shards))
    assumed = f"{chunks:.2f} chunks a passage of {settings.passage_tokens} tokens, each {_UNFILLED} below chunk_tokens"
    about = (settings.model, dimension, settings.passages, settings.shards, tuple(sizes), chosen)
    return IndexPlan(*about, math.ceil(settings.passages * chunks), assumed if settings.chunk_tokens else "")


def as_text(planned: IndexPlan) -> str:
    """Format the plan for people."""
    rows = [["", "type", "bytes a vector", "memory", "disk"]]
    for sizes in planned.types:
        mark, each = ">" * (sizes.factory == planned.chosen), f"{sizes.memory / planned.vectors:,.0f}"
        rows.append([mark, sizes.factory, each, gib(sizes.memory), gib(sizes.disk)])
    head = f"{planned.model}: {planned.dimension} dimensions; {planned.passages:,} passages in shards={planned.shards}"
    head += f"; {planned.vectors:,} vectors, assumed: {planned.assumed}" * bool(planned.assumed)
    legend = "> what `infembed index` chooses. Memory is that of one copy, while searched."
    return "\n".join([head, "", *aligned(rows), "", legend])


def as_json(planned: IndexPlan) -> str:
    """Format the plan as JSON; sizes are bytes."""
    return json.dumps(asdict(planned), indent=2)


def describe(settings: IndexSettings) -> Iterator[str]:
    """Yield what a build would do, line by line; InputError as the build."""
    if is_address(settings.output):
        engine, local = prepare_engine(settings)
        corpus, _, step = prepare(local)
        yield f"passages: {count_passages(settings, corpus):,} of {corpus}"
        there = any(version.id == step.identity for version in engine.versions())
        yield f"output {engine.address}: version {step.identity} {'exists already' if there else 'would be built'}"
        return
    corpus, model, step = prepare(settings)
    work = work_root(step, settings)
    if newest := compacted_from(step)[:1]:
        yield f"output {address(newest[0])}: compacted from a build of this corpus, so there is nothing to do"
        return
    if (yield from output_state(step, work)):
        yield f"its files are not read; `infembed index verify {address(step.remote or step.path)}` does"
        return
    passages, encoder = check_all(lambda: count_passages(settings, corpus), lambda: check_model(settings, model))
    yield f"passages: {passages:,} of {corpus}"
    each, chunks, files = math.ceil(passages / settings.shards), 1.0, data_files(corpus, "corpus")
    if (cutter := Cutter.of(encoder.texts, settings)) is not None:
        of_files = (rows(file, settings.columns, {}, set(), BadRows("corpus", True), cutter) for file in files)
        cut = [len(row[-1]) // 2 for row in islice(chain.from_iterable(of_files), _CUT)]
        yield f"chunks: about {passages * (chunks := float(np.mean(cut or 1))):,.0f}, by the first {len(cut):,} passages"
    build = choose_build(settings, [vectors := math.ceil(each * chunks)], encoder.dimension)
    yield f"shards: {settings.shards} of {build.factory}, {each:,} passages each on average, {encoder.dimension} dimensions"
    assert build.factory is not None  # it was chosen, or given
    text = sum(size for file in files for size in listing(file).values())
    memory, disk = shard_size(build.factory, encoder.dimension, vectors, text / passages / chunks, settings.vectors)
    yield f"memory: about {gib(settings.shards * memory)} of all shards, one copy, while searched"
    encoded = passages * chunks * encoder.dimension * (2 if settings.vectors == "float16" else 4)
    if isinstance(work, Path):
        yield require_space(step, settings.shards * disk + encoded + 2 * text, work)
