"""`infembed plan index`: memory and disk of an index for each FAISS type, by FAISS's own layout (`retrieval.factory`)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from infembed_ray.config.planning import PlanIndexSettings
from infembed_ray.config.retrieval import IndexSettings, Precision
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.planning.backbones import load
from infembed_ray.planning.memory import GIB
from infembed_ray.progress import aligned
from infembed_ray.records.tables import data_files
from infembed_ray.retrieval import factory as factories
from infembed_ray.retrieval.build import check_model, choose_build, prepare, prepare_engine
from infembed_ray.retrieval.corpus import count_passages
from infembed_ray.retrieval.milvus import is_address
from infembed_ray.retrieval.versions import compacted_from
from infembed_ray.retrieval.work import work_root
from infembed_ray.storage.dry_run import require_space, state
from infembed_ray.storage.places import address, listing

_FLOAT = 4
_TEXT_BYTES = 400 / 75
"""Bytes of a passage's text and metadata per token."""
_PASSAGE_OVERHEAD = 56
"""Approximate bytes of a passage's id, its offsets in Arrow columns and its entry in the sorted ids."""
_MILLION = 10**6


@dataclass(frozen=True, kw_only=True)
class ShardEstimate:
    """One shard: bytes of memory and disk, and `peak` bytes of the task that builds it."""

    factory: str
    vectors: int
    memory: float
    disk: float
    peak: float


def estimate(
    factory: str, dimension: int, vectors: int, passage_bytes: float, precision: Precision = "float16"
) -> ShardEstimate:
    """Estimate a shard.

    Args:
        passage_bytes: mean bytes of text and metadata.

    Raises:
        InputError: FAISS makes no such type.
    """
    fixed, each, holds_vectors = _sizes(factory, dimension, precision)
    memory = fixed + vectors * each
    lists = int(match[1]) if (match := re.search(r"IVF(\d+)", factory)) else 0
    originals = 0 if holds_vectors else np.dtype(precision).itemsize * dimension
    sample = min(vectors, factories.TRAINING_POINTS * max(lists, 256)) if lists else 0
    return ShardEstimate(
        factory=factory,
        vectors=vectors,
        memory=memory,
        disk=memory + vectors * (passage_bytes + _PASSAGE_OVERHEAD + originals),
        peak=memory + sample * _FLOAT * dimension,
    )


@cache  # FAISS allocates every list of an empty index
def _sizes(factory: str, dimension: int, precision: Precision) -> tuple[int, float, bool]:
    """Return the bytes without vectors, the bytes per vector, and whether it holds the vectors as they are."""
    index = factories.new(factory, dimension)
    fixed, million = (factories.index_bytes(index, count) for count in (0, _MILLION))
    return fixed, (million - fixed) / _MILLION, factories.holds_originals(index, precision)


@dataclass(frozen=True)
class IndexPlan:
    """An index of `shards` shards.

    Attributes:
        types: a shard of each FAISS type, in the order in which `infembed index` prefers them, then exact search.
        chosen: the type that `infembed index` chooses.
    """

    model: str
    dimension: int
    passages: int
    shards: int
    types: tuple[ShardEstimate, ...]
    chosen: str


def plan(settings: PlanIndexSettings) -> IndexPlan:
    """Estimate every type; nothing is built.

    Raises:
        InputError: the settings do not fit each other or the model, or no type fits `memory_gib`.
    """
    most = load(TrainSettings(model=settings.model, records="", output="")).dimension
    dimension = settings.dimensions or most
    if dimension > most:
        raise InputError.of("dimensions", dimension, f"the model has {most}", "give as many or fewer")
    vectors = math.ceil(settings.passages / settings.shards)
    chosen = factories.choose(
        vectors, dimension, settings.memory_gib, settings.shards, settings.factory, settings.vectors
    )
    types = [] if settings.factory else factories.candidates(vectors, settings.vectors)
    return IndexPlan(
        model=settings.model,
        dimension=dimension,
        passages=settings.passages,
        shards=settings.shards,
        types=tuple(
            estimate(factory, dimension, vectors, settings.passage_tokens * _TEXT_BYTES, settings.vectors)
            for factory in dict.fromkeys([*types, chosen, "Flat"])
        ),
        chosen=chosen,
    )


def as_text(made: IndexPlan) -> str:
    """Format the plan for people."""
    rows = [["", "type", "B/vector", "GiB", "disk", "peak"]]
    for shard in made.types:
        sizes = [_gib(size) for size in (shard.memory * made.shards, shard.disk * made.shards, shard.peak)]
        mark, each = ">" * (shard.factory == made.chosen), f"{shard.memory / shard.vectors:,.0f}"
        rows.append([mark, shard.factory, each, *sizes])
    return "\n".join(
        [
            f"{made.model}: {made.dimension} dimensions; {made.passages:,} passages in shards={made.shards}",
            "",
            *aligned(rows),
            "",
            "> what `infembed index` chooses. GiB: memory of all shards, one copy, while searched; disk: GiB of all shards;",
            "peak: GiB to build a shard.",
        ]
    )


def as_json(made: IndexPlan) -> str:
    """Format the plan as JSON: bytes, hours."""
    return json.dumps(asdict(made), indent=2)


def _gib(nbytes: float) -> str:
    """Format bytes as GiB: one decimal from 1 GiB on, three below."""
    return f"{nbytes / GIB:,.{1 if nbytes >= GIB else 3}f}"


def describe(settings: IndexSettings) -> Iterator[str]:
    """Yield what a build would do, line by line; InputError as the build."""
    if is_address(settings.output):
        yield from _describe_in_engine(settings)
        return
    corpus, model, step = prepare(settings)
    work = work_root(step, settings)
    if newest := compacted_from(step)[:1]:
        yield f"output {address(newest[0])}: compacted from a build of this corpus, so there is nothing to do"
        return
    if (yield from state(step, work)):
        yield f"its files are not read; `infembed index verify {address(step.remote or step.path)}` does"
        return
    passages, encoder = check_all(
        lambda: count_passages(corpus, settings.columns, settings.metadata), lambda: check_model(settings, model)
    )
    yield f"passages: {passages:,} of {corpus}"
    each = math.ceil(passages / settings.shards)
    build = choose_build(settings, [each], encoder.dimension)
    yield f"shards: {settings.shards} of {build.factory}, {each:,} passages each on average, {encoder.dimension} dimensions"
    assert build.factory is not None  # it was chosen, or given
    text = sum(size for file in data_files(corpus, "corpus") for size in listing(file).values())
    shard = estimate(build.factory, encoder.dimension, each, -(-text // passages), precision=settings.vectors)
    encoded = passages * encoder.dimension * (2 if settings.vectors == "float16" else 4)
    if isinstance(work, Path):
        yield require_space(step, settings.shards * shard.disk + encoded + 2 * text, work)


def _describe_in_engine(settings: IndexSettings) -> Iterator[str]:
    engine, local = prepare_engine(settings)
    corpus, _, step = prepare(local)
    passages = count_passages(corpus, settings.columns, settings.metadata)
    yield f"passages: {passages:,} of {corpus}"
    there = any(version.id == step.identity for version in engine.versions())
    yield f"output {engine.address}: version {step.identity} {'exists already' if there else 'would be built'}"
