"""The FAISS index of a shard: which type, how it is built, calibrated and searched, with or without a filter, to exact scores.

`choose` decides by number of vectors, dimension and memory, as autofaiss does: exact search below ten thousand vectors, a graph
(HNSW) if memory holds it, inverted lists (IVF) if it holds the vectors, else quantised lists: SQ8, then RaBitQ of 4, 2 and 1 bits
per dimension. `calibrate` finds the effort of approximate types. Candidates of lossy types are reranked by the vectors.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from mmap import MADV_WILLNEED, PAGESIZE, mmap
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
"""FAISS's names for 4, 2 and 1 bits per dimension."""
TRAINING_POINTS = 40
"""Training vectors per centroid: FAISS requires 39, and more than 100 help little."""
BLOCK = 1 << 14
"""Vectors added or copied at once."""
GIB = 1 << 30
AIM = 0.99
"""Recall@10 that calibration aims for."""
QUERIES = 256
"""Vectors that choose the parameters; as many others measure the recall."""
NEAR = 10
QUERY_COSINE = 0.5
"""Cosine of a synthetic query with its passage, which makes it about as hard as a real query (benchmarks/search.py)."""
LEAST_EF_SEARCH = 384
"""Lower values suffice for passages as queries but not for real ones: over 200,000 passages, 16 found 98.6 % for passages and
78 % for real queries, 384 found 99.2 %. For the same reason, nprobe is at least the root of the lists."""
LEAST_RERANK, MAX_RERANK = 4, 64
MAX_ON_GPU = 2048
"""Most neighbours of one FAISS search on a GPU."""
_SYNTHETIC = -2
"""Row of a query that is not one of the vectors."""
WIDEN = 4
"""Factor by which a search is widened when too few vectors pass the filter, or they belong to too few passages."""
_TIE = 1e-6
"""Difference below which scores are equal; float32 sums depend on their order."""
EF_SEARCH, NPROBE, RERANK = "efSearch", "nprobe", "rerank"
"""Search parameters: candidates of a graph, inverted lists, reranked candidates per hit."""


def choose(
    vectors: int,
    dimension: int,
    memory_gib: float | None,
    shards: int = 1,
    given: str | None = None,
    precision: Precision = "float16",
) -> str:
    """Choose the best type that fits the memory; InputError if none does.

    Args:
        vectors: of the largest shard.
        memory_gib: most memory of a shard while it is searched; None: no limit.
        shards: of the index, for the error message.
        given: the only type to consider; None: all.
    """
    limit = math.inf if memory_gib is None else memory_gib * GIB
    sizes = {kind: memory(kind, dimension, vectors) for kind in ([given] if given else candidates(vectors, precision))}
    if best := next((kind for kind, size in sizes.items() if size <= limit), None):
        return best
    kind, size = min(sizes.items(), key=lambda item: item[1])
    fault = f"{given or f'the smallest type, {kind},'} takes {size / GIB:.3g} GiB per shard of {vectors} vectors of {dimension} dimensions"
    remedy = f"raise it, or set more than {shards} shards, fewer dimensions (of a model trained for it)"
    raise InputError.of("memory_gib", memory_gib, fault, remedy + ", another factory" * bool(given))


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
    """Create an empty inner-product index; InputError if FAISS knows no such type, or it is not supported."""
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        said = str(error).rsplit(": ", 1)[-1]
        fault = f"FAISS makes no such index of {dimension} dimensions ({said})"
        remedy = "give one like HNSW32 or IVF1024,Flat, or leave it out"
        raise InputError.of("factory", factory, fault, remedy) from error
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
    """Bytes of an index on disk, and in memory once all of it was read; InputError as `new`."""
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
    """Train an index on a sample of (n, d) vectors, possibly memory-mapped, and add all; InputError if the type needs more."""
    n, d = vectors.shape
    index = new(factory, d)
    if not index.is_trained:
        least = index.nlist if isinstance(index, faiss.IndexIVF) else 1
        if n < least:
            fault = f"training takes {least} vectors and a shard has {n}"
            remedy = "give a type with fewer lists, fewer shards, or leave factory out"
            raise InputError.of("factory", factory, fault, remedy)
        count = min(n, TRAINING_POINTS * max(least, 256))
        rows = np.sort(np.random.default_rng(0).choice(n, count, replace=False))  # the same ones every time
        index.train(np.ascontiguousarray(vectors[rows], dtype=np.float32))
    for block in blocks(vectors):
        index.add(block)
    return index


def blocks(vectors: np.ndarray) -> Iterator[np.ndarray]:
    """Yield all vectors in contiguous float32 blocks."""
    for start in range(0, len(vectors), BLOCK):
        yield np.ascontiguousarray(vectors[start : start + BLOCK], dtype=np.float32)


def require_gpu_faiss() -> None:
    """Raise InputError unless FAISS has GPU support."""
    if not hasattr(faiss, "StandardGpuResources"):
        remedy = "pip uninstall -y faiss-cpu, then pip install 'faiss-gpu<2', or set 0"
        raise InputError.of("gpus_per_shard", None, "this FAISS runs on CPUs only", remedy)


def on_gpus(index: Any) -> Any:
    """Copy an index to the GPUs of this process."""
    require_gpu_faiss()
    return faiss.index_cpu_to_all_gpus(index)


class Searcher:
    """Search over n vectors of d dimensions.

    Args:
        originals: (n, d) float16 or float32 vectors, possibly memory-mapped; None if the index stores them unchanged.
        parameters: as `calibrate` found them.
        gpu: run unfiltered searches on the GPUs of this process, one call at a time; graphs stay on CPUs.
    """

    def __init__(
        self,
        index: Any,
        originals: np.ndarray | None = None,
        parameters: Mapping[str, int] | None = None,
        gpu: bool = False,
    ) -> None:
        self.index = index
        self._size = int(index.ntotal)
        self.exact = isinstance(index, faiss.IndexFlat)
        self.originals = _stored(index) if originals is None else originals
        self.lossy = is_lossy(index, str(self.originals.dtype))
        self.parameters: dict[str, int] = {}
        self.use(parameters or {})
        self._on_gpus = on_gpus(index) if gpu and not isinstance(index, faiss.IndexHNSW) else None
        self._one_at_a_time = threading.Lock()  # FAISS's scratch memory on a GPU serves one call

    def __len__(self) -> int:
        return self._size

    def use(self, parameters: Mapping[str, int]) -> None:
        """Set the search parameters."""
        self.parameters = dict(parameters)
        if EF_SEARCH in parameters:
            self.index.hnsw.efSearch = parameters[EF_SEARCH]
        if NPROBE in parameters:
            self.index.nprobe = parameters[NPROBE]
            if coarse := self._coarse(parameters[NPROBE]):
                faiss.downcast_index(self.index.quantizer).hnsw.efSearch = coarse["quantizer_params"].efSearch

    def _coarse(self, lists: int) -> dict[str, Any]:
        """Search parameters of the graph that finds the nearest `lists` lists, if there is one."""
        if isinstance(faiss.downcast_index(self.index.quantizer), faiss.IndexHNSW):
            return {"quantizer_params": faiss.SearchParametersHNSW(efSearch=2 * lists)}
        return {}

    def search(self, vectors: np.ndarray, k: int, keep: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Find the nearest rows of each query.

        Args:
            vectors: (q, d) float32.
            keep: (n,) bool mask of the rows to search; None: all.

        Returns:
            (q, k) float32 scores and (q, k) int64 rows by (score, row), descending; padded with row -1.
        """
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        if keep is not None and keep.all():
            keep = None
        if self.exact:
            return self._flat(vectors, k, keep)
        if keep is not None:
            return self._filtered(vectors, k, keep)
        scores, rows = self._best(vectors, *self._nearest(vectors, k * self._rerank), k)
        short = (rows >= 0).sum(axis=1) < min(k, len(self))  # the visited lists held fewer
        if short.any():
            scores[short], rows[short] = self._filtered(vectors[short], k, np.ones(len(self), bool))
        return scores, rows

    def _flat(self, vectors: np.ndarray, k: int, keep: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Exact search with ties by row. FAISS keeps the first rows of equal scores, so it is asked for more if the next score
        equals the k-th."""
        asked = None
        if keep is not None:
            bits = np.packbits(keep, bitorder="little")
            asked = faiss.SearchParameters(sel=faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits)))
        count = min(k + 1, max(k, self._size))
        scores, rows = self._nearest(vectors, count, asked)
        descents = scores[:, 1:] < scores[:, :-1]
        if np.count_nonzero(descents) == descents.size:  # in order, and no tie; half the time of all()
            return scores[:, :k], rows[:, :k]
        scores, rows = _ordered(scores, rows)
        best, tied = (scores[:, :k].copy(), rows[:, :k].copy()), np.arange(len(vectors))
        while (tied := tied[(scores[:, k - 1] == scores[:, -1]) & (rows[:, -1] >= 0)]).size and count < len(self):
            count = min(WIDEN * count, len(self))
            scores, rows = _ordered(*self._nearest(vectors[tied], count, asked))
            best[0][tied], best[1][tied] = scores[:, :k], rows[:, :k]
        return best

    def vectors(self, rows: np.ndarray | slice) -> np.ndarray:
        """The vectors of some rows, (rows, d) float32."""
        if not isinstance(rows, slice):
            self._read_ahead(rows)
        return np.array(self.originals[rows], dtype=np.float32)

    def _read_ahead(self, rows: np.ndarray) -> None:
        """Start to read the rows of a mapped file together. Page faults would read them one by one, each with up to megabytes
        around it."""
        file = self.originals.base
        if isinstance(self.originals, np.memmap) and isinstance(file, mmap):
            starts = self.originals.offset + rows * self.originals.strides[0]
            pages = starts - starts % PAGESIZE
            lengths = starts + self.originals.strides[0] - pages
            for page, length in zip(pages.tolist(), lengths.tolist(), strict=True):
                file.madvise(MADV_WILLNEED, page, length)

    @property
    def _rerank(self) -> int:
        return self.parameters.get(RERANK, 1)

    def _nearest(self, vectors: np.ndarray, count: int, asked: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Search the index itself; the effort grows with `count` beyond the ten hits of the calibration."""
        index = self._on_gpus if self._on_gpus is not None and asked is None and count <= MAX_ON_GPU else self.index
        if not self.exact and (harder := count / (NEAR * self._rerank)) > 1:
            if isinstance(self.index, faiss.IndexHNSW):
                asked = faiss.SearchParametersHNSW(efSearch=math.ceil(self.index.hnsw.efSearch * harder))
            else:
                lists = min(self.index.nlist, math.ceil(self.index.nprobe * harder))
                asked = faiss.SearchParametersIVF(nprobe=lists, **self._coarse(lists))
        if index is self.index:
            scores, rows = index.search(vectors, count, params=asked)
        else:
            with self._one_at_a_time:
                scores, rows = index.search(vectors, count, params=asked)
        return scores, rows

    def _best(self, vectors: np.ndarray, scores: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rerank candidates of lossy types and keep the best `k`; row -1 is padding."""
        if self.lossy:
            scores = np.full_like(scores, -np.inf)
            for query, candidates in enumerate(rows):
                filled = candidates >= 0
                scores[query, filled] = self.vectors(candidates[filled]) @ vectors[query]
        scores, rows = _ordered(scores, rows)
        return scores[:, :k], rows[:, :k]

    def _filtered(self, vectors: np.ndarray, k: int, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Over-fetch and drop what does not pass; fall back to exact search over the rows that pass."""
        kept = int(np.count_nonzero(keep))
        scores = np.full((len(vectors), k), -np.inf, dtype=np.float32)
        rows = np.full((len(vectors), k), -1, dtype=np.int64)
        left = np.arange(len(vectors))
        wanted = min(k * self._rerank, kept)
        share = kept / len(self)
        # Enough if the kept rows are spread evenly, plus three standard deviations.
        count = math.ceil((wanted + 3 * math.sqrt(wanted * (1 - share))) / share) if kept else 0
        while left.size and max(EXACT_BELOW, self._compared(count)) < kept:
            near, candidates = self._nearest(vectors[left], count)
            dropped = (candidates < 0) | ~keep[candidates]
            near[dropped], candidates[dropped] = -np.inf, -1
            enough = (~dropped).sum(axis=1) >= wanted
            done = left[enough]
            scores[done], rows[done] = self._best(vectors[done], near[enough], candidates[enough], k)
            left = left[~enough]
            count *= WIDEN
        if left.size and kept:
            scores[left], rows[left] = self._exact(vectors[left], k, keep)
        return scores, rows

    def _compared(self, count: int) -> float:
        """Approximate number of vectors that a search for `count` neighbours compares."""
        harder = max(1.0, count / (NEAR * self._rerank))
        if isinstance(self.index, faiss.IndexHNSW):
            return float(self.index.hnsw.efSearch * harder * self.index.hnsw.nb_neighbors(0))
        return float(self.index.nprobe * harder * len(self) / self.index.nlist)

    def _exact(self, vectors: np.ndarray, k: int, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compare the queries with all kept rows, block by block."""
        scores = np.full((len(vectors), k), -np.inf, dtype=np.float32)
        rows = np.full((len(vectors), k), -1, dtype=np.int64)
        for start in range(0, len(self), BLOCK):
            some = start + np.flatnonzero(keep[start : start + BLOCK])
            if not some.size:
                continue
            # Of a dense block, copying the kept rows would cost more than computing the others.
            dense = 2 * len(some) > len(keep[start : start + BLOCK])
            block = np.asarray(self.originals[start : start + BLOCK] if dense else self.vectors(some), dtype=np.float32)
            products = vectors @ block.T
            products = products[:, some - start] if dense else products
            best = np.argpartition(products, -k, axis=1)[:, -k:] if k < len(some) else np.arange(len(some))[None]
            best = np.broadcast_to(best, (len(vectors), best.shape[1]))
            nearest = np.take_along_axis(products, best, axis=1)
            both = np.concatenate([scores, nearest], axis=1), np.concatenate([rows, some[best]], axis=1)
            scores, rows = (part[:, :k] for part in _ordered(*both))
        return scores, rows


def _stored(index: Any) -> np.ndarray:
    """A view of the (n, d) vectors that an index stores; valid as long as the index."""
    if not holds_originals(index, "float16"):
        raise ValueError("this index does not store its vectors; pass them as originals")
    flat = storage(index)
    precision = "<f4" if isinstance(flat, faiss.IndexFlat) else "<f2"
    if flat.ntotal == 0:
        return np.empty((0, flat.d), precision)
    codes = faiss.rev_swig_ptr(flat.codes.data(), flat.ntotal * flat.code_size)
    return codes.view(precision).reshape(flat.ntotal, flat.d)


def _ordered(scores: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort by (score, row), descending."""
    rising = scores[:, 1:] >= scores[:, :-1]
    if rising.any():
        order = np.lexsort((-rows, -scores))
        scores, rows = np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)
    return scores, rows


def calibrate(searcher: Searcher, aim: float = AIM) -> tuple[dict[str, int], float]:
    """Find the cheapest search parameters that reach a recall@10 of `aim`, or the closest to it.

    Queries are vectors of the index, without themselves as hits, and synthetic queries beside them (`_synthetic_queries`),
    because real queries do not coincide with passages. The recall is the lower of both. One half of the queries chooses the
    parameters, the other half measures the recall.

    Args:
        searcher: keeps the parameters found.

    Returns:
        The parameters, and recall@10 against exact search; 1 if the search is exact.
    """
    n = len(searcher)
    if searcher.exact or n < 2:
        searcher.use({})
        return {}, 1.0
    drawn = np.random.default_rng(0).permutation(n)[: 2 * QUERIES]
    choosing, measuring = (drawn, drawn) if n < 2 * QUERIES else (drawn[:QUERIES], drawn[QUERIES:])
    near = Neighbours(searcher.originals, choosing)
    ladders: dict[str, list[int]] = {}
    if isinstance(searcher.index, faiss.IndexHNSW):
        ladders[EF_SEARCH] = _ladder(LEAST_EF_SEARCH, n)
    elif isinstance(searcher.index, faiss.IndexIVF):
        ladders[NPROBE] = _ladder(math.isqrt(searcher.index.nlist), int(searcher.index.nlist))
    if searcher.lossy:
        ladders[RERANK] = _ladder(LEAST_RERANK, min(MAX_RERANK, max(1, n // NEAR)))
    parameters = {name: ladder[-1] for name, ladder in ladders.items()}
    for name, ladder in ladders.items():
        for value in ladder:
            parameters[name] = value
            searcher.use(parameters)
            if near.recall(searcher) >= aim:
                break
    searcher.use(parameters)
    return parameters, round(Neighbours(searcher.originals, measuring).recall(searcher), 4)


def _ladder(first: int, last: int) -> list[int]:
    steps = [min(first, last)]
    while steps[-1] < last:
        steps.append(min(2 * steps[-1], last))
    return steps


class Neighbours:
    """Exact nearest neighbours of some vectors, and of synthetic queries made from them.

    Args:
        vectors: (n, d), n > 1, possibly memory-mapped.
        rows: vectors to use as queries.
    """

    def __init__(self, vectors: np.ndarray, rows: np.ndarray) -> None:
        rows = np.sort(rows)
        passages = np.ascontiguousarray(vectors[rows], dtype=np.float32)
        self.queries = np.concatenate([passages, _synthetic_queries(passages)])
        self.rows = np.concatenate([rows, np.full_like(rows, _SYNTHETIC)])
        best = faiss.ResultHeap(len(self.rows), min(NEAR + 1, len(vectors)), keep_max=True)
        for number, block in enumerate(blocks(vectors)):
            scores, places = faiss.knn(self.queries, block, min(best.k, len(block)), faiss.METRIC_INNER_PRODUCT)
            best.add_result(scores, places + number * BLOCK)
        best.finalize()
        self._scores = _without(self.rows, best.D, best.I)

    def recall(self, searcher: Searcher) -> float:
        """Recall@10 of a searcher: the lower of passages and synthetic queries. Hits tied with the tenth count."""
        k = self._scores.shape[1]
        scores = _without(self.rows, *searcher.search(self.queries, k + 1))[:, :k]
        as_near = (scores >= self._scores[:, -1:] - _TIE).reshape(2, -1)
        return float(as_near.mean(axis=1).min())


def _synthetic_queries(vectors: np.ndarray) -> np.ndarray:
    """Turn (n, d) unit vectors in a fixed random direction to a cosine of `QUERY_COSINE`."""
    aside = np.random.default_rng(0).standard_normal(vectors.shape, dtype=np.float32)
    aside -= (aside * vectors).sum(axis=1, keepdims=True) * vectors
    aside /= np.maximum(np.linalg.norm(aside, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return QUERY_COSINE * vectors + np.float32(math.sqrt(1 - QUERY_COSINE**2)) * aside


def _without(rows: np.ndarray, scores: np.ndarray, nearest: np.ndarray) -> np.ndarray:
    """Drop the score of the query itself, or the last one if the query is not among its nearest rows."""
    others = nearest != rows[:, None]
    others[others.all(axis=1), -1] = False
    return np.where(nearest >= 0, scores, -np.inf)[others].reshape(len(rows), -1)
