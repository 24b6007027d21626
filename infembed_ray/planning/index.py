"""What `infembed index --dry-run` says: the types, memory and disk of an index."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from infembed_ray.config.retrieval import IndexSettings, Precision
from infembed_ray.errors import check_all
from infembed_ray.records.tables import data_files
from infembed_ray.retrieval import faiss_index
from infembed_ray.retrieval.build import check_model, choose_build, prepare, prepare_engine, work_root
from infembed_ray.retrieval.corpus import count_passages
from infembed_ray.retrieval.milvus import is_address
from infembed_ray.retrieval.versions import compacted_from
from infembed_ray.storage.dry_run import gib, require_space, state
from infembed_ray.storage.places import address, listing

_PASSAGE_OVERHEAD = 56
"""Approximate bytes of a passage's id, its offsets in Arrow columns and its entry in the sorted ids."""


def shard_size(
    factory: str, dimension: int, vectors: int, passage_bytes: float, precision: Precision = "float16"
) -> tuple[float, float]:
    """Estimate the bytes of memory and of disk of a shard; `passage_bytes` is the mean of text and metadata."""
    index = faiss_index.new(factory, dimension)
    memory = faiss_index.index_bytes(index, vectors)
    originals = 0 if faiss_index.holds_originals(index, precision) else np.dtype(precision).itemsize * dimension
    return memory, memory + vectors * (passage_bytes + _PASSAGE_OVERHEAD + originals)


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
    memory, disk = shard_size(build.factory, encoder.dimension, each, text / passages, settings.vectors)
    yield f"memory: about {gib(settings.shards * memory)} of all shards, one copy, while searched"
    encoded = passages * encoder.dimension * (2 if settings.vectors == "float16" else 4)
    if isinstance(work, Path):
        yield require_space(step, settings.shards * disk + encoded + 2 * text, work)


def _describe_in_engine(settings: IndexSettings) -> Iterator[str]:
    engine, local = prepare_engine(settings)
    corpus, _, step = prepare(local)
    passages = count_passages(corpus, settings.columns, settings.metadata)
    yield f"passages: {passages:,} of {corpus}"
    there = any(version.id == step.identity for version in engine.versions())
    yield f"output {engine.address}: version {step.identity} {'exists already' if there else 'would be built'}"
