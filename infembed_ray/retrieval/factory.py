"""Choose and build the FAISS index of a shard, by number of vectors, dimension and memory, as autofaiss does.

Exact search below ten thousand vectors, a graph (HNSW) if memory holds it, inverted lists (IVF) if it holds the vectors, else
quantised lists: SQ8, then RaBitQ of 4, 2 and 1 bits per dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from infembed_ray.config.retrieval import Precision
from infembed_ray.errors import InputError
from infembed_ray.retrieval.faiss_import import faiss

EXACT_BELOW = 10_000
"""Vectors below which exact search is as fast as a graph."""
HNSW_LINKS = 32
LINK_BYTES = 8 * HNSW_LINKS + 16
"""Bytes of a vector's links, level and offset in a graph."""
HALF = "SQfp16"
"""FAISS's name for vectors stored in float16."""
EF_CONSTRUCTION = 128
"""Candidates during the construction of a graph."""
RABITQ = ("RaBitQ4", "RaBitQ2", "RaBitQ")
"""FAISS's names for 4, 2 and 1 bits per dimension. They find as much as PQ of the same size and build ten times as fast,
because only centroids are trained (benchmarks/index_types.py)."""
TRAINING_POINTS = 40
"""Training vectors per centroid: FAISS requires 39, and more than 100 help little."""
BLOCK = 1 << 14
"""Vectors added or copied at once."""
GIB = 1 << 30


def choose(
    vectors: int,
    dimension: int,
    memory_gib: float | None,
    shards: int = 1,
    given: str | None = None,
    precision: Precision = "float16",
) -> str:
    """Choose the best type that fits the memory.

    Args:
        vectors: of the largest shard.
        memory_gib: most memory of a shard while it is searched; None: no limit.
        shards: of the index, for the error message.
        given: the only type to consider; None: all.

    Raises:
        InputError: nothing fits.
    """
    limit = math.inf if memory_gib is None else memory_gib * GIB
    sizes = {kind: memory(kind, dimension, vectors) for kind in [given] if kind} or {
        kind: memory(kind, dimension, vectors) for kind in candidates(vectors, precision)
    }
    for kind, size in sizes.items():
        if size <= limit:
            return kind
    kind, size = min(sizes.items(), key=lambda item: item[1])
    more = f"more than {shards} shards, fewer dimensions (of a model trained for it)" + ", another factory" * bool(
        given
    )
    raise InputError.of(
        "memory_gib",
        memory_gib,
        f"{given or f'the smallest type, {kind},'} takes {size / GIB:.3g} GiB per shard of {vectors} vectors of {dimension} "
        "dimensions",
        f"raise it, or set {more}",
    )


def candidates(vectors: int, precision: Precision = "float16") -> list[str]:
    """Index types for a number of vectors of a precision, the best first, with decreasing memory."""
    if vectors < EXACT_BELOW:
        return ["Flat"]
    lists = centroids(vectors)
    coarse = f"IVF{lists}_HNSW32" if lists >= 1 << 16 else f"IVF{lists}"
    whole = [f"HNSW{HNSW_LINKS}_{HALF}", f"{coarse},{HALF}"]
    if precision == "float32":
        whole = [f"HNSW{HNSW_LINKS}", f"{coarse},Flat"]
    return [*whole, *(f"{coarse},{code}" for code in ("SQ8", *RABITQ))]


def centroids(vectors: int) -> int:
    """Number of inverted lists, after autofaiss."""
    if vectors < 1_000_000:
        return int(4 * math.sqrt(vectors))
    if vectors < 10_000_000:
        return 1 << 14
    return 1 << 16 if vectors < 300_000_000 else 1 << 17


def new(factory: str, dimension: int) -> Any:
    """Create an empty inner-product index.

    Raises:
        InputError: FAISS knows no such type, or it is not supported.
    """
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        said = str(error).rsplit(": ", 1)[-1]
        fault = f"FAISS makes no such index of {dimension} dimensions ({said})"
        raise InputError.of(
            "factory", factory, fault, "give one like HNSW32 or IVF1024,Flat, or leave it out"
        ) from error
    kinds = (faiss.IndexFlat, faiss.IndexHNSW, faiss.IndexIVF)
    metric = index.metric_type == faiss.METRIC_INNER_PRODUCT
    if not isinstance(index, kinds) or not metric or hasattr(index, "pq"):
        fault = f"makes a {type(index).__name__}, which is not supported"
        raise InputError.of("factory", factory, fault, "give Flat, or an HNSW or IVF type with Flat, SQ or RaBitQ")
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efConstruction = EF_CONSTRUCTION
    if isinstance(index, faiss.IndexIVF) and _is_half(index):
        index.by_residual = False  # store the vectors themselves
    return index


def _is_half(index: Any) -> bool:
    """Whether the codes of an index are numbers in float16."""
    kinds = (faiss.IndexScalarQuantizer, faiss.IndexIVFScalarQuantizer)
    return isinstance(index, kinds) and bool(index.sq.qtype == faiss.ScalarQuantizer.QT_fp16)


def storage(index: Any) -> Any:
    """The index in which a graph stores its vectors; another index itself."""
    return faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSW) else index


def holds_originals(index: Any, precision: str) -> bool:
    """Whether the index stores vectors of this precision unchanged and contiguously."""
    inner = storage(index)
    flat_half = isinstance(inner, faiss.IndexScalarQuantizer) and _is_half(inner)
    return isinstance(inner, faiss.IndexFlat) or (flat_half and precision == "float16")


def is_lossy(index: Any, precision: str) -> bool:
    """Whether scores of vectors of this precision are approximate, so that candidates are reranked by the vectors."""
    if holds_originals(index, precision) or isinstance(index, faiss.IndexIVFFlat):
        return False
    return not (isinstance(index, faiss.IndexIVF) and _is_half(index) and precision == "float16")


def memory(factory: str, dimension: int, vectors: int) -> int:
    """Bytes of an index on disk, and in memory once all of it was read.

    Raises:
        InputError: see `new`.
    """
    return index_bytes(new(factory, dimension), vectors)


def index_bytes(index: Any, vectors: int) -> int:
    """Bytes of an empty index once it holds `vectors` vectors."""
    if isinstance(index, faiss.IndexHNSW):
        lowest, above = index.hnsw.nb_neighbors(0), index.hnsw.nb_neighbors(1)
        levels = above / (above - 1) if above > 1 else 0  # each level has 1/above of the one below
        links = int(vectors * (4 * (lowest + levels) + 12))  # with level and offset
        return index_bytes(faiss.downcast_index(index.storage), vectors) + links
    if isinstance(index, faiss.IndexIVF):
        return index_bytes(faiss.downcast_index(index.quantizer), index.nlist) + vectors * (index.code_size + 8)
    return vectors * int(index.sa_code_size())


def build(factory: str, vectors: np.ndarray) -> Any:
    """Train an index on a sample and add all vectors in blocks.

    Args:
        vectors: (n, d) unit vectors, possibly memory-mapped.

    Raises:
        InputError: the type needs more vectors.
    """
    n, d = vectors.shape
    index = new(factory, d)
    if not index.is_trained:
        least = index.nlist if isinstance(index, faiss.IndexIVF) else 1
        if n < least:
            fault = f"training takes {least} vectors and a shard has {n}"
            raise InputError.of(
                "factory", factory, fault, "give a type with fewer lists, fewer shards, or leave factory out"
            )
        index.train(sample(vectors, TRAINING_POINTS * max(least, 256)))
    for block in blocks(vectors):
        index.add(block)
    return index


def sample(vectors: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Draw at most `count` vectors without replacement; the same ones every time, in row order."""
    if len(vectors) <= count:
        return np.ascontiguousarray(vectors, dtype=np.float32)
    rows = np.sort(np.random.default_rng(seed).choice(len(vectors), count, replace=False))
    return np.ascontiguousarray(vectors[rows], dtype=np.float32)


def blocks(vectors: np.ndarray) -> Iterator[np.ndarray]:
    """Yield all vectors in contiguous float32 blocks."""
    for start in range(0, len(vectors), BLOCK):
        yield np.ascontiguousarray(vectors[start : start + BLOCK], dtype=np.float32)


def require_gpu_faiss() -> None:
    """Raise InputError unless FAISS has GPU support."""
    if not hasattr(faiss, "StandardGpuResources"):
        remedy = "pip uninstall -y faiss-cpu, then pip install 'infembed-ray[gpu]', or set 0"
        raise InputError.of("gpus_per_shard", None, "this FAISS runs on CPUs only", remedy)


def on_gpus(index: Any) -> Any:
    """Copy an index to the GPUs of this process."""
    require_gpu_faiss()
    return faiss.index_cpu_to_all_gpus(index)
