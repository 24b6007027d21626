"""`infembed plan index`: memory, disk, build time and assumed recall of an index, for each FAISS type.

Memory is `retrieval.factory.memory`, FAISS's own layout. A shard of n vectors of d dimensions in L inverted lists builds in

    2 c (10 s L + n A) / GEMM_FLOPS + n (GRAPH_BUILD_READS log2(n) vectors of a graph)
    c dimensions after OPQ, s sampled vectors, A = L without a graph, d more for OPQ, 256 more for PQ
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from infembed_ray.config.planning import PlanIndexSettings
from infembed_ray.config.retrieval import IndexSettings, Precision
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.planning.backbones import load
from infembed_ray.planning.hardware import PlannedGpu
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
from infembed_ray.training.observability.flops import BackboneFlops

BUILD_THREADS = 16
LONGEST_BUILD_H = 24
"""Hours to build a shard with BUILD_THREADS threads, beyond which more shards are better."""
ENCODING_MFU = 0.4
"""Assumed share of a GPU's peak that encoding reaches."""
# Rates of one thread, measured on an AMD EPYC on 2026-11-23; GEMM_FLOPS and RANDOM_READ_S on 2026-11-22.
GRAPH_BUILD_READS = 260
"""Vectors compared to add one to a graph of n vectors (M 32, efConstruction 128), divided by log2(n)."""
RANDOM_READ_S = 160e-9
"""Seconds until the first byte of one of these vectors arrives."""
GRAPH_BYTES_PER_S = 25e9
"""Bytes of these vectors read per second."""
GEMM_FLOPS = 50e9
"""FLOP/s of fp32 matrix products: k-means."""
KMEANS_ITERATIONS = 10
"""Of FAISS's IVF."""
_FLOAT = 4
_TEXT_BYTES = 400 / 75
"""Bytes of a passage's text and metadata per token."""
_PASSAGE_OVERHEAD = 56
"""Approximate bytes of a passage's id, its offsets in Arrow columns and its entry in the sorted ids."""
_NUMBER = {"SQfp16": 2, "SQ8": 1}
"""Bytes of a number in FAISS's scalar quantisers."""
_PQ_CENTROIDS = 256
_MILLION = 10**6
_PQ_RECALL = ((2, 0.97), (4, 0.96), (8, 0.93), (16, 0.88))
"""Most dimensions per byte of code -> assumed recall@10 after reranking by the vectors."""
_MAX_GRAPH_VECTORS = 2**31 - 1


_MAX_SHARDS = 1024


@dataclass(frozen=True, kw_only=True)
class ShardEstimate:
    """One shard. Sizes in bytes.

    Attributes:
        recall: recall@10, assumed.
        peak: memory of the task that builds it.
        build_hours: with BUILD_THREADS threads.
        centroids: that k-means finds; at least as many vectors are needed.
    """

    dimension: int
    factory: str
    vectors: int
    memory: float
    disk: float
    recall: float
    peak: float
    build_hours: float
    centroids: int

    def obstacles(self, recall_floor: float, memory_gib: float | None = None) -> list[str]:
        """Return the reasons why an index cannot have such shards."""
        reasons = []
        if self.vectors < self.centroids:
            reasons.append(f"{self.vectors:,} vectors are too few for {self.centroids:,} centroids")
        if self.recall < recall_floor:
            reasons.append(f"recall of about {self.recall:g}")
        if self.factory.startswith("HNSW") and self.vectors > _MAX_GRAPH_VECTORS:
            reasons.append(
                f"{self.vectors:,} vectors are too many for one graph (FAISS numbers its nodes with 32-bit integers)"
            )
        if memory_gib is not None and self.memory > memory_gib * GIB:
            reasons.append(f"a shard takes {_gib(self.memory)} GiB of {memory_gib:g}")
        if self.build_hours > LONGEST_BUILD_H:
            reasons.append(f"a shard builds for {self.build_hours:,.0f} h of {LONGEST_BUILD_H}")
        return reasons


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
    rotated = re.search(r"(?:OPQ\d+_|PCAR?)(\d+)", factory)
    coded = int(rotated[1]) if rotated else dimension
    quantized, graph, nodes = "PQ" in factory, "HNSW" in factory, lists or vectors
    number = next((size for name, size in _NUMBER.items() if name in factory), _FLOAT)
    originals = 0 if holds_vectors else np.dtype(precision).itemsize * dimension
    centroids = max(lists, _PQ_CENTROIDS if quantized else 0)
    sample = min(vectors, factories.TRAINING_POINTS * max(centroids, _PQ_CENTROIDS)) if centroids else 0
    assignment = (0 if graph else lists) + (dimension if rotated else 0) + (_PQ_CENTROIDS if quantized else 0)
    seconds = 2 * coded * (KMEANS_ITERATIONS * sample * lists + vectors * assignment) / GEMM_FLOPS
    if graph:
        read = RANDOM_READ_S + number * coded / GRAPH_BYTES_PER_S
        seconds += vectors * GRAPH_BUILD_READS * math.log2(max(2, nodes)) * read
    return ShardEstimate(
        dimension=dimension,
        factory=factory,
        vectors=vectors,
        memory=memory,
        disk=memory + vectors * (passage_bytes + _PASSAGE_OVERHEAD + originals),
        recall=_recall(factory, dimension, each),
        peak=memory + sample * _FLOAT * (dimension + (coded if rotated else 0)),
        build_hours=seconds / BUILD_THREADS / 3600,
        centroids=centroids,
    )


@cache  # FAISS allocates every list of an empty index
def _sizes(factory: str, dimension: int, precision: Precision) -> tuple[int, float, bool]:
    """Return the bytes without vectors, the bytes per vector, and whether it holds the vectors as they are."""
    index = factories.new(factory, dimension)
    fixed, million = (factories.index_bytes(index, count) for count in (0, _MILLION))
    return fixed, (million - fixed) / _MILLION, factories.holds_originals(index, precision)


def _recall(factory: str, dimension: int, vector_bytes: float) -> float:
    """Assumed recall@10; a build measures it and publishes nothing below its floor."""
    if "PQ" in factory:
        code = vector_bytes - 8  # without the id
        return next((recall for limit, recall in _PQ_RECALL if dimension / code <= limit), 0.8)
    return 0.97 if "IVF" in factory or "SQ8" in factory else 0.98 if "HNSW" in factory else 1.0


@dataclass(frozen=True)
class EncodingPlan:
    """Tokens of the corpus, tokens per second of a GPU, and GPU hours and USD to encode all passages."""

    tokens: int
    tokens_per_s: float
    assumed: bool
    gpu_hours: float
    usd: float


@dataclass(frozen=True)
class IndexLayout:
    """An index of `shards` shards; `obstacles` are the reasons why it does not fit, empty if it does."""

    shards: int
    shard: ShardEstimate
    obstacles: tuple[str, ...]

    @property
    def overrides(self) -> str:
        """The layout as settings on a command line."""
        return f"shards={self.shards} dimensions={self.shard.dimension} factory={self.shard.factory}"


@dataclass(frozen=True)
class IndexPlan:
    """The layouts of an index, one per kind of FAISS type, in the order in which `infembed index` prefers them.

    Attributes:
        parameters, dimension: of the encoder.
        chosen: position of the first layout that fits; None: none fits.
    """

    model: str
    parameters: int
    dimension: int
    passages: int
    encoding: EncodingPlan
    layouts: tuple[IndexLayout, ...]
    chosen: int | None


def plan(settings: PlanIndexSettings) -> IndexPlan:
    """Compute all layouts, each with the fewest shards that fit, at least `shards`; nothing is built.

    Raises:
        InputError: the settings do not fit each other or the model.
    """
    encoder = load(TrainSettings(model=settings.model, records="", output=""))
    backbone = encoder.backbone_of("passage")
    flops = BackboneFlops.count(backbone, encoder.causal)
    pairs = settings.passage_tokens / (2 if encoder.causal else 1) * len(flops.windows)
    forward = (flops.token + flops.pair * pairs) / 3  # the backward pass is the other two thirds
    if settings.dimensions is not None and settings.dimensions > encoder.dimension:
        raise InputError(f"dimensions={settings.dimensions}: the model has {encoder.dimension}; give as many or fewer")
    layouts = list(_layouts(settings, settings.dimensions or encoder.dimension))
    fitting = [number for number, layout in enumerate(layouts) if not layout.obstacles]
    return IndexPlan(
        settings.model,
        sum(p.numel() for p in backbone.parameters()),
        encoder.dimension,
        settings.passages,
        _encoding(settings, forward),
        tuple(layouts),
        chosen=fitting[0] if fitting else None,
    )


def _layouts(settings: PlanIndexSettings, dimension: int) -> Iterator[IndexLayout]:
    """Yield a layout per kind of type: the types that `infembed index` chooses from, then exact search."""
    best: dict[str, IndexLayout] = {}
    shards = settings.shards
    while shards <= max(settings.shards, _MAX_SHARDS):
        vectors = math.ceil(settings.passages / shards)
        types = [*factories.candidates(vectors, dimension, settings.vectors), "Flat"]
        for factory in [settings.factory] if settings.factory else dict.fromkeys(types):
            shard = estimate(factory, dimension, vectors, settings.passage_tokens * _TEXT_BYTES, settings.vectors)
            layout = IndexLayout(shards, shard, tuple(shard.obstacles(settings.recall_floor, settings.memory_gib)))
            kind = re.sub(r"IVF\d+(_HNSW\d+)?", "IVF", factory)
            if kind not in best or len(layout.obstacles) < len(best[kind].obstacles):
                best[kind] = layout
        shards *= 2
        if settings.passages / shards < factories.EXACT_BELOW:
            break
    yield from best.values()


def _encoding(settings: PlanIndexSettings, token_flops: float) -> EncodingPlan:
    gpu = PlannedGpu.of(settings, torch.bfloat16)
    tokens = settings.passages * settings.passage_tokens
    rate = settings.tokens_per_s or ENCODING_MFU * gpu.peak / token_flops
    hours = tokens / rate / 3600
    return EncodingPlan(tokens, rate, settings.tokens_per_s is None, hours, hours * gpu.usd_per_hour)


def as_text(index_plan: IndexPlan) -> str:
    """Format the plan for people."""
    marks = [">" * (n == index_plan.chosen) for n in range(len(index_plan.layouts))]
    rows = [{"": mark, **_columns(layout)} for mark, layout in zip(marks, index_plan.layouts, strict=True)]
    encoding = index_plan.encoding
    lines = [
        f"{index_plan.model}: {index_plan.parameters / 1e9:.3f} B parameters, {index_plan.dimension} dimensions; "
        f"{index_plan.passages:,} passages",
        f"Encoding: {encoding.tokens:,} tokens at {encoding.tokens_per_s:,.0f} per second and GPU "
        f"({'assumed' if encoding.assumed else 'measured'}): {encoding.gpu_hours:,.1f} GPU hours, {encoding.usd:,.0f} USD",
        "",
        *aligned([list(rows[0]), *(list(row.values()) for row in rows)]),
        "",
        "> first that fits, in the order in which `infembed index` chooses. GiB: memory of all shards, one copy, while searched;",
        f"disk: GiB of all shards; peak: GiB to build a shard; h: to build a shard with {BUILD_THREADS} threads.",
        "Recall and times are assumptions; a build measures its recall.",
    ]
    if index_plan.chosen is None:
        nearest = min(index_plan.layouts, key=lambda layout: (len(layout.obstacles), layout.shard.memory))
        lines.append(
            f"Nothing fits. Nearest: {nearest.overrides}: {'; '.join(nearest.obstacles)}. Set more shards, a lower "
            "recall_floor, more memory_gib, or dimensions of a model trained to be cut to them."
        )
    else:
        best = index_plan.layouts[index_plan.chosen]
        lines.append(
            f"First that fits: {best.overrides}: {_gib(best.shard.memory * best.shards)} GiB of memory, "
            f"{_gib(best.shard.disk * best.shards)} GiB on disk"
        )
    return "\n".join(lines)


def _columns(layout: IndexLayout) -> dict[str, str]:
    """Return the cells of a layout's row by their headings."""
    shard = layout.shard
    return {
        "type": shard.factory,
        "shards": str(layout.shards),
        "B/vector": f"{shard.memory / shard.vectors:,.0f}",
        "GiB": _gib(shard.memory * layout.shards),
        "disk": _gib(shard.disk * layout.shards),
        "peak": _gib(shard.peak),
        "h": f"{shard.build_hours:,.2f}",
        "recall": f"{shard.recall:.2f}",
        "fits": "; ".join(layout.obstacles) or "yes",
    }


def as_json(index_plan: IndexPlan) -> str:
    """Format the plan as JSON."""
    return json.dumps(asdict(index_plan), indent=2)


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
    (passages, more), encoder = check_all(
        lambda: count_passages(corpus, settings.columns, settings.metadata), lambda: check_model(settings, model)
    )
    yield f"passages: {'at least ' if more else ''}{passages:,} of {corpus}"
    each = math.ceil(passages / settings.shards)
    build = choose_build(settings, [each], encoder.dimension)
    yield f"shards: {settings.shards} of {build.factory}, {each:,} passages each on average, {encoder.dimension} dimensions"
    assert build.factory is not None  # it was chosen, or given
    text = sum(size for file in data_files(corpus, "corpus") for size in listing(file).values())
    shard = estimate(build.factory, encoder.dimension, each, -(-text // passages), precision=settings.vectors)
    encoded = passages * encoder.dimension * (2 if settings.vectors == "float16" else 4)
    if not more and isinstance(work, Path):
        yield require_space(step, settings.shards * shard.disk + encoded + 2 * text, work)


def _describe_in_engine(settings: IndexSettings) -> Iterator[str]:
    engine, local = prepare_engine(settings)
    corpus, _, step = prepare(local)
    passages, more = count_passages(corpus, settings.columns, settings.metadata)
    yield f"passages: {'at least ' if more else ''}{passages:,} of {corpus}"
    there = any(version.id == step.identity for version in engine.versions())
    yield f"output {engine.address}: version {step.identity} {'exists already' if there else 'would be built'}"
