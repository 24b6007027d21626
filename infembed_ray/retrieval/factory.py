"""Which FAISS index holds a shard's vectors: chosen by their count, their dimension and the memory there is.

A factory is a FAISS index as `faiss.index_factory` spells it. The choice follows autofaiss: exact below ten thousand
vectors, a graph while memory holds it, inverted lists while it holds the vectors alone, product-quantised lists beyond
that. Quantised types are ranked again by the vectors themselves, which stay on disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from infembed_ray.errors import InputError
from infembed_ray.retrieval.faiss_import import faiss

EXACT_BELOW = 10_000
"""Vectors from which a shard is searched by a graph; below, exact search is as fast and exact."""
HNSW_LINKS = 32
EF_CONSTRUCTION = 128
"""Candidates kept while a graph is built."""
DIMENSIONS_PER_CODE = (2, 4, 8, 16)
"""Of product quantisers, one byte a code: 8 to 64 times smaller than the vectors."""
MOST_PER_CODE = 4
"""Dimensions that a code really holds; OPQ reduces what is more (FAISS's guidelines)."""
TRAINING_POINTS = 40
"""Vectors a centroid that training takes: FAISS wants 39 at least, and gains little beyond 100."""
BLOCK = 1 << 14
"""Vectors that are added, or gathered, at a time."""
GIB = 1 << 30


def choose(vectors: int, dimension: int, memory_gib: float | None, shards: int = 1, given: str | None = None) -> str:
    """The best type that memory holds, or the given one if it does.

    Args:
        vectors: of the largest shard.
        dimension: of them.
        memory_gib: most memory of a shard while it is searched; None: no limit.
        shards: of the index, for what is proposed if nothing fits.
        given: a type; None: all are considered.

    Raises:
        InputError: nothing fits.
    """
    if given is not None:
        size = memory(given, dimension, vectors)
        if memory_gib is None or size <= memory_gib * GIB:
            return given
        raise InputError(
            f"memory_gib={memory_gib:g}: factory={given} takes {_gib(size)} GiB a shard of {vectors} vectors of {dimension} "
            "dimensions; allow as much, give a smaller one, or leave it to be chosen"
        )
    types = candidates(vectors, dimension)
    if memory_gib is None:
        return types[0]
    sizes = {factory: memory(factory, dimension, vectors) for factory in types}
    for factory, size in sizes.items():
        if size <= memory_gib * GIB:
            return factory
    smallest = min(sizes, key=sizes.__getitem__)
    raise InputError(
        f"memory_gib={memory_gib:g}: the smallest index of {vectors} vectors of {dimension} dimensions is {smallest} with "
        f"{_gib(sizes[smallest])} GiB a shard; set {_what_would_fit(vectors, dimension, memory_gib, shards)}"
    )


def _what_would_fit(vectors: int, dimension: int, memory_gib: float, shards: int) -> str:
    """The settings that change least, each of them enough."""

    def least(vectors: int, dimension: int) -> int:
        return min(memory(factory, dimension, vectors) for factory in candidates(vectors, dimension))

    ways = [f"memory_gib={_gib(least(vectors, dimension))}"]
    fewer = dimension // 2
    while fewer >= 32:
        if least(vectors, fewer) <= memory_gib * GIB:
            ways.append(f"dimensions={fewer} of a model trained for it")
            break
        fewer //= 2
    total, more = vectors * shards, shards + 1
    while more < total and least(math.ceil(total / more), dimension) > memory_gib * GIB:
        more = max(more + 1, more * 5 // 4)
    ways.append(f"shards={more}")
    return ", or ".join(ways)


def _gib(size: int) -> str:
    """Rounded up, so that what is set to it is enough."""
    digits = 10 ** max(0, 3 - len(str(size // GIB)))
    return f"{math.ceil(size / GIB * digits * 10) / (digits * 10):g}"


def candidates(vectors: int, dimension: int) -> list[str]:
    """The types for so many vectors, the best first, each with less memory than the one before."""
    if vectors < EXACT_BELOW:
        return ["Flat"]
    lists = centroids(vectors)
    coarse = f"IVF{lists}_HNSW32" if lists >= 1 << 16 else f"IVF{lists}"
    quantised = []
    for per_code in DIMENSIONS_PER_CODE:
        codes = max(1, dimension // per_code)
        quantised.append(f"OPQ{codes}_{codes * min(per_code, MOST_PER_CODE, dimension)},{coarse},PQ{codes}")
    return [f"HNSW{HNSW_LINKS}", f"{coarse},Flat", *dict.fromkeys(quantised)]


def centroids(vectors: int) -> int:
    """Inverted lists for so many vectors, after autofaiss."""
    if vectors < 1_000_000:
        return int(4 * math.sqrt(vectors))
    if vectors < 10_000_000:
        return 1 << 14
    return 1 << 16 if vectors < 300_000_000 else 1 << 17


def new(factory: str, dimension: int) -> Any:
    """An empty index of inner products.

    Raises:
        InputError: FAISS does not know it, or it cannot do what a shard does.
    """
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        said = str(error).rsplit(": ", 1)[-1]
        raise InputError(
            f"factory={factory}: FAISS makes no such index of {dimension} dimensions ({said}); give one like HNSW32, "
            f"IVF1024,Flat or OPQ48_192,IVF1024,PQ48, or leave it to be chosen"
        ) from error
    inner = leaf(index)
    kinds = (faiss.IndexFlat, faiss.IndexHNSW, faiss.IndexIVF)
    if not isinstance(inner, kinds) or inner.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise InputError(
            f"factory={factory}: makes a {type(inner).__name__}, which cannot search by inner product among some of its "
            "vectors; give a Flat, HNSW or IVF type, with or without a transformation before it"
        )
    if isinstance(inner, faiss.IndexHNSW):
        inner.hnsw.efConstruction = EF_CONSTRUCTION
    return index


def leaf(index: Any) -> Any:
    """The index behind the transformations."""
    while isinstance(index, faiss.IndexPreTransform):
        index = faiss.downcast_index(index.index)
    return index


def _transformations(index: Any) -> list[Any]:
    return [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size())]


def holds_originals(index: Any) -> bool:
    """Can the vectors be read from it as they were added, at once?"""
    flat = isinstance(index, faiss.IndexFlat)
    return flat or (
        isinstance(index, faiss.IndexHNSW) and isinstance(faiss.downcast_index(index.storage), faiss.IndexFlat)
    )


def is_lossy(index: Any) -> bool:
    """Are its scores not those of the vectors, so that what it finds has to be ranked again?"""
    return not (holds_originals(index) or isinstance(index, faiss.IndexIVFFlat))


def memory(factory: str, dimension: int, vectors: int) -> int:
    """Bytes of the index of so many vectors: what it takes on disk, and in memory once all of it was touched.

    Raises:
        InputError: see `new`.
    """
    return _bytes(new(factory, dimension), vectors)


def _bytes(index: Any, vectors: int) -> int:
    if isinstance(index, faiss.IndexPreTransform):
        matrices = sum(4 * t.d_in * t.d_out for t in _transformations(index))
        matrices += sum(
            4 * t.d_in**2 for t in _transformations(index) if isinstance(t, faiss.PCAMatrix)
        )  # all of it stays
        return matrices + _bytes(faiss.downcast_index(index.index), vectors)
    if isinstance(index, faiss.IndexHNSW):
        lowest, above = index.hnsw.nb_neighbors(0), index.hnsw.nb_neighbors(1)
        links = 4 * (lowest + above / (above - 1)) if above > 1 else 4 * lowest  # a level has 1/above of that below it
        return _bytes(faiss.downcast_index(index.storage), vectors) + int(vectors * (links + 12))  # a level, an offset
    if isinstance(index, faiss.IndexIVF):
        tables = 4 * index.pq.ksub * index.pq.d if isinstance(index, faiss.IndexIVFPQ) else 0
        coarse = _bytes(faiss.downcast_index(index.quantizer), index.nlist)
        return coarse + tables + vectors * (index.code_size + 8)
    return vectors * int(index.sa_code_size())


# ------------------------------------------------------------------------------------------------------ building


def build(factory: str, vectors: np.ndarray, gpu: bool = False) -> Any:
    """Train an index on a sample and add all vectors, some at a time.

    Args:
        factory: see above.
        vectors: (n, d) float32 unit vectors, which may be mapped from a file.
        gpu: find centroids and assign vectors to them on this process' GPUs; graphs are built by the CPU all the same.

    Raises:
        InputError: it is made for more vectors than there are, or `gpu` where FAISS has none.
    """
    n, d = vectors.shape
    index = new(factory, d)
    if not index.is_trained:
        least, wanted = _training_points(index)
        if n < least:
            raise InputError(
                f"factory={factory}: training takes {least} vectors and a shard has {n}; give a smaller one, fewer shards, "
                "or leave it to be chosen"
            )
        coarse = leaf(index)
        if gpu and isinstance(coarse, faiss.IndexIVF):
            coarse.clustering_index = on_gpus(faiss.IndexFlatIP(coarse.d))
        index.train(sample(vectors, wanted))
    assign = on_gpus(_coarse_vectors(leaf(index))) if gpu and isinstance(leaf(index), faiss.IndexIVF) else None
    for block in blocks(vectors):
        if assign is None:
            index.add(block)
        else:
            _add_assigned(index, block, assign)
    return index


def _training_points(index: Any) -> tuple[int, int]:
    """How many vectors training takes at least, and how many are enough."""
    inner = leaf(index)
    least = inner.nlist if isinstance(inner, faiss.IndexIVF) else 1
    product = getattr(inner, "pq", None) or getattr(faiss.downcast_index(getattr(inner, "storage", inner)), "pq", None)
    if product is not None:
        least = max(least, int(product.ksub))
    return least, TRAINING_POINTS * max(least, 256)


def sample(vectors: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """At most `count` of the vectors, drawn without replacement; the same every time, in the order of the rows."""
    if len(vectors) <= count:
        return np.ascontiguousarray(vectors, dtype=np.float32)
    rows = np.sort(np.random.default_rng(seed).choice(len(vectors), count, replace=False))
    return np.ascontiguousarray(vectors[rows], dtype=np.float32)


def blocks(vectors: np.ndarray) -> Iterator[np.ndarray]:
    """All vectors, some at a time, as FAISS takes them."""
    for start in range(0, len(vectors), BLOCK):
        yield np.ascontiguousarray(vectors[start : start + BLOCK], dtype=np.float32)


def require_gpu_faiss() -> None:
    """InputError unless this FAISS runs on GPUs."""
    if not hasattr(faiss, "StandardGpuResources"):
        raise InputError(
            "gpus_per_shard: this FAISS runs on CPUs only; pip uninstall -y faiss-cpu, then pip install 'infembed-ray[gpu]', "
            "or set 0"
        )


def on_gpus(index: Any) -> Any:
    """A copy of an index on the GPUs that this process sees."""
    require_gpu_faiss()
    return faiss.index_cpu_to_all_gpus(index)


def _coarse_vectors(inverted: Any) -> Any:
    """The centroids of inverted lists, for exact search."""
    centres = faiss.IndexFlatIP(inverted.d)
    centres.add(inverted.quantizer.reconstruct_n(0, inverted.nlist))
    return centres


def _add_assigned(index: Any, block: np.ndarray, centres: Any) -> None:
    """Add vectors to inverted lists that another index of the centroids finds for them."""
    inner = leaf(index)
    if inner is not index:
        for transformation in _transformations(index):
            block = transformation.apply(block)
    _, lists = centres.search(block, 1)
    inner.add_core(len(block), faiss.swig_ptr(block), None, faiss.swig_ptr(lists.ravel()))
    index.ntotal = inner.ntotal
