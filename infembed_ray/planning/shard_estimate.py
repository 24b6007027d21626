"""Memory, disk, recall, search time and build time of one index shard, from its FAISS type and the rates of hardware.yaml.

Memory is `retrieval.factory.memory`, FAISS's own layout. With n vectors of d dimensions in L inverted lists (one thread):

    search = bytes read / rate, or R log2(n) efSearch / 384 vectors of a graph (at most n), one after the other
             Flat reads all codes; IVF reads those of nprobe lists, and the centroids, or searches a graph of them
    build  = 2 c (10 s L + n A) / gemm + n (B log2(n) vectors of a graph)
             c dimensions after OPQ, s sampled vectors, A = L without a graph, d more for OPQ, 256 more for PQ
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from infembed_ray.config.retrieval import Precision
from infembed_ray.planning.cost import assumed
from infembed_ray.retrieval import factory as factories
from infembed_ray.retrieval.searcher import EF_SEARCH, LEAST_EF_SEARCH, NEAR, NPROBE, RERANK

BUILD_THREADS = 16
_FLOAT = 4
_PASSAGE_OVERHEAD = 56
"""Approximate bytes of a passage's id, its offsets in Arrow columns and its entry in the sorted ids."""
_NUMBER = {"SQfp16": 2, "SQ8": 1}
"""Bytes of a number in FAISS's scalar quantisers."""
_PQ_CENTROIDS = 256
_MILLION = 10**6
_PQ_RECALL = ((2, 0.97), (4, 0.96), (8, 0.93), (16, 0.88))
"""Most dimensions per byte of code -> assumed recall@10 after reranking by the vectors."""
_MAX_GRAPH_VECTORS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ShardEstimate:
    """One shard. Sizes in bytes.

    Attributes:
        recall: recall@10, assumed or measured by a build.
        peak: memory of the task that builds it.
        build_hours: with `BUILD_THREADS` threads.
        search_seconds: of one thread for one search, without reranking.
        reranked: vectors that a search reads from disk to rerank candidates.
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
    search_seconds: float
    reranked: int
    centroids: int

    def obstacles(self, recall_floor: float) -> list[str]:
        """Reasons why an index cannot have such shards."""
        found = []
        if self.vectors < self.centroids:
            found.append(f"{self.vectors:,} vectors are too few for {self.centroids:,} centroids")
        if self.recall < recall_floor:
            found.append(f"recall of about {self.recall:g}")
        if self.factory.startswith("HNSW") and self.vectors > _MAX_GRAPH_VECTORS:
            found.append(
                f"{self.vectors:,} vectors are too many for one graph (FAISS numbers its nodes with 32-bit integers)"
            )
        return found


def estimate(
    factory: str,
    dimension: int,
    vectors: int,
    passage_bytes: int,
    measured: Mapping[str, float] | None = None,
    precision: Precision = "float16",
) -> ShardEstimate:
    """Estimate a shard.

    Args:
        passage_bytes: mean bytes of text and metadata.
        measured: `recall` and search parameters that a build found; they replace the assumptions.

    Raises:
        InputError: FAISS makes no such type.
    """
    found = measured or {}
    fixed, each, has_originals, lossy = _sizes(factory, dimension, precision)
    memory = fixed + vectors * each
    lists = int(match[1]) if (match := re.search(r"IVF(\d+)", factory)) else 0
    rotated = re.search(r"(?:OPQ\d+_|PCAR?)(\d+)", factory)
    coded = int(rotated[1]) if rotated else dimension
    quantized, graph, nodes = "PQ" in factory, "HNSW" in factory, lists or vectors
    number = next((size for name, size in _NUMBER.items() if name in factory), _FLOAT)
    one_read = assumed("random_read_ns") + number * coded / assumed("graph_gb_s")
    probed = found.get(NPROBE, max(1, math.isqrt(lists)))  # the least that calibration sets, as of efSearch
    effort = (2 * probed if lists else found.get(EF_SEARCH, LEAST_EF_SEARCH)) / LEAST_EF_SEARCH
    reads = min(nodes, assumed("graph_reads") * math.log2(max(2, nodes)) * effort) if graph else 0.0
    scanned = 0.0 if graph and not lists else vectors * each * min(1.0, probed / (lists or 1))
    coded_scan = quantized or "RaBitQ" in factory
    scan = scanned / assumed("code_scan_gb_s" if coded_scan else "scan_gb_s")
    scan += (0 if graph else fixed) / assumed("scan_gb_s")
    originals = 0 if has_originals else np.dtype(precision).itemsize * dimension
    centroids = max(lists, _PQ_CENTROIDS if quantized else 0)
    sample = min(vectors, factories.TRAINING_POINTS * max(centroids, _PQ_CENTROIDS)) if centroids else 0
    assignment = (0 if graph else lists) + (dimension if rotated else 0) + (_PQ_CENTROIDS if quantized else 0)
    flops = 2 * coded * (assumed("kmeans_iterations") * sample * lists + vectors * assignment)
    linked = vectors * assumed("graph_build_reads") * math.log2(max(2, nodes)) * one_read if graph else 0.0
    build = flops / assumed("gemm_gflop_s") + linked
    return ShardEstimate(
        dimension=dimension,
        factory=factory,
        vectors=vectors,
        memory=memory,
        disk=memory + vectors * (passage_bytes + _PASSAGE_OVERHEAD + originals),
        recall=found.get("recall", _recall(factory, dimension, each)),
        peak=memory + sample * _FLOAT * (dimension + (coded if rotated else 0)),
        build_hours=1e-9 * build / BUILD_THREADS / 3600,
        search_seconds=1e-9 * (reads * one_read + scan),
        reranked=int(NEAR * found.get(RERANK, 10)) if lossy else 0,
        centroids=centroids,
    )


@cache  # FAISS allocates every list of an empty index
def _sizes(factory: str, dimension: int, precision: Precision) -> tuple[int, float, bool, bool]:
    """Bytes without vectors, bytes per vector, whether it holds the vectors as they are, whether it is lossy."""
    index = factories.new(factory, dimension)
    fixed, million = (factories.index_bytes(index, count) for count in (0, _MILLION))
    holds = factories.holds_originals(index, precision)
    return fixed, (million - fixed) / _MILLION, holds, factories.is_lossy(index, precision)


def _recall(factory: str, dimension: int, vector_bytes: float) -> float:
    """Assumed recall@10; a build measures it and publishes nothing below its floor."""
    if "PQ" in factory:
        code = vector_bytes - 8  # without the id
        return next((recall for most, recall in _PQ_RECALL if dimension / code <= most), 0.8)
    return 0.97 if "IVF" in factory or "SQ8" in factory else 0.98 if "HNSW" in factory else 1.0
