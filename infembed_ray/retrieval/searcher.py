"""Search one FAISS index, with or without a filter, to exact scores.

`calibrate` finds the effort of approximate types. A filtered search over-fetches, or compares the rows that pass if these are
fewer. Candidates of lossy types are reranked by the vectors.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from mmap import MADV_WILLNEED, PAGESIZE, mmap
from typing import Any

import numpy as np

from infembed_ray.retrieval.factory import BLOCK, EXACT_BELOW, blocks, holds_originals, is_lossy, on_gpus, storage
from infembed_ray.retrieval.faiss_import import faiss

AIM = 0.99
"""Recall@10 that calibration aims for."""
QUERIES = 256
"""Vectors that choose the parameters; as many others measure the recall."""
NEAR = 10
QUERY_COSINE = 0.5
"""Cosine of a synthetic query with its passage, which makes it about as hard as a real query. Over 200,000 passages,
efSearch 16, 64 and 256 found 85, 97 and 99.5 % of the neighbours of synthetic queries, 89, 97 and 99.6 % of real ones, and
99.5, 100 and 100 % of passages."""
LEAST_EF_SEARCH = 384
"""Lower values suffice for passages as queries but not for real ones: over 200,000 passages, 16 found 98.6 % for passages and
78 % for real queries, 256 found 98.0 % and 384 found 99.2 % (benchmarks/search.py). For the same reason, nprobe is at least the root of the lists."""
LEAST_RERANK, MAX_RERANK = 4, 64
MAX_ON_GPU = 2048
"""Most neighbours of one FAISS search on a GPU."""
_SYNTHETIC = -2
"""Row of a query that is not one of the vectors."""
_WIDEN = 4
"""Factor by which a search is widened when too few vectors pass the filter."""
_TIE = 1e-6
"""Difference below which scores are equal; float32 sums depend on their order."""
EF_SEARCH, NPROBE, RERANK = "efSearch", "nprobe", "rerank"
"""Search parameters: candidates of a graph, inverted lists, reranked candidates per hit."""


class Searcher:
    """Search over n vectors of d dimensions.

    Args:
        originals: (n, d) float16 or float32 vectors, possibly memory-mapped; None if the index stores them unchanged.
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
        everything = keep is None or bool(keep.all())
        if self.exact:
            return self._flat(vectors, k, None if everything else keep)
        if keep is None or everything:
            scores, rows = self._best(vectors, *self._nearest(vectors, k * self._rerank), k)
            short = (rows >= 0).sum(axis=1) < min(k, len(self))  # the visited lists held fewer
            if short.any():
                scores[short], rows[short] = self._filtered(vectors[short], k, np.ones(len(self), bool))
            return scores, rows
        return self._filtered(vectors, k, keep)

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
        at_end = (scores[:, k - 1] == scores[:, -1]) & (rows[:, -1] >= 0)
        best, tied = (scores[:, :k].copy(), rows[:, :k].copy()), np.flatnonzero(at_end)
        while tied.size and count < len(self):
            count = min(_WIDEN * count, len(self))
            scores, rows = _ordered(*self._nearest(vectors[tied], count, asked))
            best[0][tied], best[1][tied] = scores[:, :k], rows[:, :k]
            tied = tied[(scores[:, k - 1] == scores[:, -1]) & (rows[:, -1] >= 0)]
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
        on_gpus = self._on_gpus if asked is None and count <= MAX_ON_GPU else None
        if not self.exact and (harder := count / (NEAR * self._rerank)) > 1:
            if isinstance(self.index, faiss.IndexHNSW):
                asked = faiss.SearchParametersHNSW(efSearch=math.ceil(self.index.hnsw.efSearch * harder))
            else:
                lists = min(self.index.nlist, math.ceil(self.index.nprobe * harder))
                asked = faiss.SearchParametersIVF(nprobe=lists, **self._coarse(lists))
        if on_gpus is None:
            return self.index.search(vectors, count, params=asked)
        with self._one_at_a_time:
            return on_gpus.search(vectors, count, params=asked)

    def _best(self, vectors: np.ndarray, scores: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rerank candidates of lossy types and keep the best `k`; row -1 is padding."""
        if self.lossy:
            scores = np.full_like(scores, -np.inf)
            for query, candidates in enumerate(rows):
                found = candidates >= 0
                scores[query, found] = self.vectors(candidates[found]) @ vectors[query]
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
            near, found = self._nearest(vectors[left], count)
            dropped = (found < 0) | ~keep[found]
            near[dropped], found[dropped] = -np.inf, -1
            enough = (~dropped).sum(axis=1) >= wanted
            done = left[enough]
            scores[done], rows[done] = self._best(vectors[done], near[enough], found[enough], k)
            left = left[~enough]
            count *= _WIDEN
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
            both = (
                np.concatenate([scores, np.take_along_axis(products, best, axis=1)], axis=1),
                np.concatenate([rows, some[best]], axis=1),
            )
            scores, rows = (part[:, :k] for part in _ordered(*both))
        return scores, rows


def _stored(index: Any) -> np.ndarray:
    """A view of the (n, d) vectors that an index stores; valid as long as the index."""
    if not holds_originals(index, "float16"):
        raise ValueError("this index does not store its vectors; pass them as originals")
    flat = storage(index)
    half = not isinstance(flat, faiss.IndexFlat)
    if flat.ntotal == 0:
        return np.empty((0, flat.d), np.float16 if half else np.float32)
    if half:
        codes = faiss.rev_swig_ptr(flat.codes.data(), flat.ntotal * flat.code_size)
        return codes.view("<f2").reshape(flat.ntotal, flat.d)
    view = faiss.rev_swig_ptr(flat.get_xb(), flat.ntotal * flat.d)
    return view.reshape(flat.ntotal, flat.d)


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
        k = min(NEAR + 1, len(vectors))
        scores = np.empty((len(self.rows), 0), dtype=np.float32)
        found = np.empty((len(self.rows), 0), dtype=np.int64)
        start = 0
        for block in blocks(vectors):
            best, places = faiss.knn(self.queries, block, min(k, len(block)), faiss.METRIC_INNER_PRODUCT)
            both = np.concatenate([scores, best], axis=1), np.concatenate([found, places + start], axis=1)
            scores, found = (part[:, :k] for part in _ordered(*both))
            start += len(block)
        self._scores = _without(self.rows, scores, found)

    def recall(self, searcher: Searcher) -> float:
        """Recall@10 of a searcher: the lower of passages and synthetic queries. Hits tied with the tenth count."""
        k = self._scores.shape[1]
        scores = _without(self.rows, *searcher.search(self.queries, k + 1))[:, :k]
        found = (scores >= self._scores[:, -1:] - _TIE).reshape(2, -1)
        return float(found.mean(axis=1).min())


def _synthetic_queries(vectors: np.ndarray) -> np.ndarray:
    """Turn (n, d) unit vectors in a fixed random direction to a cosine of `QUERY_COSINE`."""
    aside = np.random.default_rng(0).standard_normal(vectors.shape, dtype=np.float32)
    aside -= (aside * vectors).sum(axis=1, keepdims=True) * vectors
    aside /= np.maximum(np.linalg.norm(aside, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return QUERY_COSINE * vectors + np.float32(math.sqrt(1 - QUERY_COSINE**2)) * aside


def _without(rows: np.ndarray, scores: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Drop the score of the query itself, or the last one if the query is not among the hits."""
    others = found != rows[:, None]
    others[others.all(axis=1), -1] = False
    return np.where(found >= 0, scores, -np.inf)[others].reshape(len(rows), -1)
