"""What an index of vectors takes by its FAISS type: bytes in memory, seconds of a search and of a build, line by line.

Bytes are FAISS's own layout, which tests hold against indexes that FAISS wrote: a vector as it is takes 4 d bytes, an
edge of an HNSW graph 4, of which a vector has 2 M on the lowest level and M on each of those above, to which one in M
rises; an inverted list keeps an id of 8 bytes with each code; a product quantizer makes codes of a byte.
Seconds are a model of what is read, with the rates that hardware.yaml assumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from infembed_ray.planning import cost
from infembed_ray.planning.capacity import FLOAT
from infembed_ray.retrieval import factory as types
from infembed_ray.retrieval.faiss_import import faiss
from infembed_ray.retrieval.searcher import EF_SEARCH, NEAR, NPROBE, RERANK
from infembed_ray.retrieval.shards import ShardFacts

_LINK, _ID = 4, 8
_HNSW_NODE = 12
"""Bytes of a vector's level and of where its edges begin."""
_ROW = 56
"""Bytes of a passage's id, offsets in Arrow's columns, and entry in the sorted ids, about."""
_PQ_CENTROIDS = 256
_MOST_OF_A_GRAPH = 2**31 - 1
"""Vectors; edges are 32-bit numbers."""
_RECALL = {"Flat": 1.0, "HNSW": 0.98, "IVF": 0.97}
"""Assumed recall@10 of types that keep vectors as they are. A build measures it, and publishes nothing below its floor."""
_QUANTIZED_RECALL = ((2, 0.97), (4, 0.96), (8, 0.93), (16, 0.88))
"""Dimensions a byte of code, at most -> assumed recall@10 where candidates are ranked again by their own vectors."""

Place = Literal["cpu", "gpu"]


class Line(NamedTuple):
    """One line of arithmetic: what it gives, how, the value and its unit."""

    what: str
    how: str
    value: float
    unit: str


@dataclass(frozen=True)
class IndexType:
    """A FAISS index type over vectors of d dimensions.

    Attributes:
        factory: as `faiss.index_factory` spells it.
        dimension: d, of the vectors that are put in.
        coded: dimensions of what is stored; fewer, or rotated, where a matrix comes before it.
        code: bytes of a stored vector.
        rotated: is there such a matrix?
        lists: inverted lists; 0: none.
        quantizer_m: M of the graph over the lists' centroids; 0: they are scanned.
        graph_m: M of the graph over the vectors; 0: none.
        quantized: is a code made by a product quantizer?
        lossy: is the code less than the vector, so that candidates are ranked again?
        beside: are the vectors kept on disk besides, for that, and for the next version?
        recall: recall@10: an assumption, until a build measures it.
        explored, probes, reranked: candidates of a graph's search, lists that one reads, and candidates of a lossy type
            that are ranked again: assumptions, until a build finds what is enough.
    """

    factory: str
    dimension: int
    coded: int
    code: int
    rotated: bool
    lists: int
    quantizer_m: int
    graph_m: int
    quantized: bool
    lossy: bool
    beside: bool
    recall: float
    explored: int = 128
    probes: int = 64
    reranked: int = 100

    @classmethod
    @cache  # FAISS lays out the lists of each
    def of(cls, factory: str, dimension: int) -> IndexType:
        """As FAISS makes it; InputError if it makes none."""
        index = types.new(factory, dimension)
        inner = types.leaf(index)
        lists = getattr(inner, "nlist", 0)
        coarse = faiss.downcast_index(inner.quantizer) if lists else None
        stored = inner if lists or not hasattr(inner, "storage") else faiss.downcast_index(inner.storage)
        return cls(
            factory=factory,
            dimension=dimension,
            coded=inner.d,
            code=inner.code_size if lists else stored.sa_code_size(),
            rotated=inner is not index,
            lists=lists,
            quantizer_m=_m(coarse) if lists else 0,
            graph_m=_m(inner),
            quantized=hasattr(stored, "pq"),
            lossy=types.is_lossy(index),
            beside=not types.holds_originals(index),
            recall=_assumed_recall(index, inner, lists, dimension),
        )

    def as_built(self, shard: ShardFacts) -> IndexType:
        """With what a build found."""
        found = shard.search
        return replace(
            self,
            recall=shard.recall_at_10,
            explored=found.get(EF_SEARCH, self.explored),
            probes=found.get(NPROBE, self.probes),
            reranked=NEAR * found[RERANK] if RERANK in found else self.reranked,
        )

    def memory(self, vectors: int) -> list[Line]:
        """Bytes of a shard while it is searched; the last line is all of it, as `retrieval.factory.memory` says it."""
        parts, each = [], float(self.code)
        parts.append(f"{self.code} of PQ codes" if self.quantized else f"{self.code / self.coded:g} x {self.coded}")
        if self.lists:
            parts.append(f"{_ID} of the id")
            each += _ID
        if self.graph_m:
            parts.append(
                f"{2 * _LINK} x {self.graph_m} + {_edges(self.graph_m) - 2 * _LINK * self.graph_m:.0f} of the graph"
            )
            each += _edges(self.graph_m)
        lines = [
            Line("a vector", " + ".join(parts), each, "B"),
            Line("all vectors of a shard", f"{vectors:,} x {each:,.0f}", vectors * each, "B"),
        ]
        if self.lists:
            edges = _edges(self.quantizer_m) if self.quantizer_m else 0.0
            how = f"{self.lists:,} x ({FLOAT} x {self.coded}{f' + {edges:.0f}' if edges else ''})"
            lines.append(Line("centroids of its lists", how, self.lists * (FLOAT * self.coded + edges), "B"))
        if self.quantized:
            books = float(_PQ_CENTROIDS * FLOAT * self.coded)
            lines.append(Line("code books", f"{_PQ_CENTROIDS} x {FLOAT} x {self.coded}", books, "B"))
        if self.rotated:
            matrix = float(FLOAT * self.dimension * self.coded)
            lines.append(Line("rotation", f"{FLOAT} x {self.dimension} x {self.coded}", matrix, "B"))
        total = sum(line.value for line in lines[1:])
        return [*lines, Line("memory of a shard", "the sum", total, "B")]

    def obstacle(self, vectors: int) -> str | None:
        """Why a shard of so many vectors cannot be of this type; None: it can."""
        if self.graph_m and vectors > _MOST_OF_A_GRAPH:
            return f"a graph holds {_MOST_OF_A_GRAPH:,} vectors at most"
        centroids = max(self.lists, _PQ_CENTROIDS if self.quantized else 0)
        return f"{vectors:,} vectors are too few for {centroids:,} centroids" if vectors < centroids else None

    def disk(self, vectors: int, passage_bytes: int) -> list[Line]:
        """Bytes of a shard's files; the last line is all of them."""
        lines = [Line("the FAISS index", "as in memory", self.memory(vectors)[-1].value, "B")]
        if self.beside:
            how = f"{vectors:,} x {FLOAT} x {self.dimension}"
            lines.append(Line("vectors as they are", how, vectors * FLOAT * self.dimension, "B"))
        how = f"{vectors:,} x ({passage_bytes} + {_ROW})"
        lines.append(Line("texts, metadata and ids", how, vectors * (passage_bytes + _ROW), "B"))
        return [*lines, Line("disk of a shard", "the sum", sum(line.value for line in lines), "B")]

    def training(self, vectors: int) -> int:
        """Vectors of a shard that centroids and rotation are trained on; 0: there are none."""
        if not (self.lists or self.lossy):
            return 0
        return min(vectors, types.TRAINING_POINTS * max(self.lists, _PQ_CENTROIDS))

    def search(self, vectors: int, place: Place, gpu_bytes_s: float = 0.0) -> list[Line]:
        """Seconds that a shard's replica computes for one search, on one thread or a GPU; the last line is all of it."""
        if place == "gpu":
            scanned = self._scanned(vectors)
            share = cost.assumed("gpu_bandwidth_share")
            seconds = scanned / (gpu_bytes_s * share)
            how = f"{scanned / 1e9:,.3f} GB / ({share:g} x {gpu_bytes_s / 1e9:,.0f} GB/s)"
            return [Line("a scan", how, seconds, "s")]
        lines = []
        if self.graph_m:
            lines.append(_graph("vectors along the graph", self.graph_m, self.explored, vectors, self.code))
        elif self.lists:
            if self.quantizer_m:
                lines.append(_graph("nearest lists", self.quantizer_m, 2 * self.probes, self.lists, FLOAT * self.coded))
            else:
                lines.append(_scan("nearest lists", self.lists * FLOAT * self.coded))
            lines.append(_scan("codes of the lists", self._scanned(vectors), self.quantized))
        else:
            lines.append(_scan("all vectors", self._scanned(vectors), self.quantized))
        total = sum(line.value for line in lines)
        return [*lines, Line("computing a search", "the sum", total, "s")]

    def build(self, vectors: int) -> list[Line]:
        """Seconds of one thread that build a shard; the last line is all of it."""
        flops = cost.assumed("gemm_gflop_s") * 1e9
        lines = []
        sample = self.training(vectors)
        if self.lists:
            rounds = cost.assumed("kmeans_iterations")
            work = rounds * sample * self.lists * 2 * self.coded
            how = f"{rounds:g} x {sample:,} x {self.lists:,} x 2 x {self.coded} FLOP / {flops / 1e9:g} GFLOP/s"
            lines.append(Line("k-means", how, work / flops, "s"))
            if self.quantizer_m:
                seconds = _graph("", self.quantizer_m, types.EF_CONSTRUCTION, self.lists, FLOAT * self.coded).value
                lines.append(Line("lists of all vectors", f"{vectors:,} x {seconds:.2g} s", vectors * seconds, "s"))
            else:
                work = vectors * self.lists * 2 * self.coded
                how = f"{vectors:,} x {self.lists:,} x 2 x {self.coded} FLOP / {flops / 1e9:g} GFLOP/s"
                lines.append(Line("lists of all vectors", how, work / flops, "s"))
        if self.rotated:
            work = vectors * 2 * self.dimension * self.coded
            how = f"{vectors:,} x 2 x {self.dimension} x {self.coded} FLOP / {flops / 1e9:g} GFLOP/s"
            lines.append(Line("rotating", how, work / flops, "s"))
        if self.quantized:
            work = vectors * 2 * _PQ_CENTROIDS * self.coded
            how = f"{vectors:,} x 2 x {_PQ_CENTROIDS} x {self.coded} FLOP / {flops / 1e9:g} GFLOP/s"
            lines.append(Line("PQ codes", how, work / flops, "s"))
        if self.graph_m:
            seconds = _graph("", self.graph_m, types.EF_CONSTRUCTION, vectors, self.code).value
            lines.append(Line("edges", f"{vectors:,} x {seconds:.2g} s, a search each", vectors * seconds, "s"))
        return [*lines, Line("building a shard, one thread", "the sum", sum(line.value for line in lines), "s")]

    def _scanned(self, vectors: int) -> float:
        """Bytes of codes that a search reads where there is no graph."""
        share = min(1.0, self.probes / self.lists) if self.lists else 1.0
        return vectors * self.code * share


def _scan(what: str, nbytes: float, quantized: bool = False) -> Line:
    rate = cost.assumed("pq_scan_gb_s" if quantized else "loaded_scan_gb_s")
    return Line(what, f"{nbytes / 1e9:,.3f} GB / {rate:g} GB/s", nbytes / (rate * 1e9), "s")


def _graph(what: str, m: int, candidates: int, vectors: int, code: float) -> Line:
    share, latency = cost.assumed("hnsw_distances"), cost.assumed("random_read_ns")
    depth = math.log2(max(vectors, 2))
    read = min(float(vectors), share * m * candidates * depth)
    each = latency + code / cost.assumed("scan_gb_s")
    how = f"{share:g} x {m} x {candidates} x log2({vectors:,}) = {read:,.0f} x ({latency:g} + {code:,.0f} / {cost.assumed('scan_gb_s'):g}) ns"
    return Line(what, how, read * each * 1e-9, "s")


def _assumed_recall(index: Any, inner: Any, lists: int, dimension: int) -> float:
    if not types.is_lossy(index):
        return _RECALL["HNSW" if _m(inner) else "IVF" if lists else "Flat"]
    ratio = dimension / inner.code_size if lists else _QUANTIZED_RECALL[0][0]
    return next((recall for most, recall in _QUANTIZED_RECALL if ratio <= most), 0.8)


def _m(index: Any) -> int:
    """M of a graph; 0: there is none."""
    graph = getattr(index, "hnsw", None)
    return 0 if graph is None else int(graph.nb_neighbors(1))


def _edges(m: int) -> float:
    """Bytes of a vector in a graph, beside the vector."""
    return _LINK * (2 * m + m / (m - 1)) + _HNSW_NODE
