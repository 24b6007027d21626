"""Search of one FAISS index: among all of its vectors or some of them, to exact scores.

Graphs and inverted lists find what is near and not all of it; how hard they look is set by parameters that `calibrate`
finds, and grows with how much is asked for. Among some vectors, the nearest of all are found, enough of them that `k` are
left when the others are dropped: what is left is the nearest then, however the others lie around the query. Where that
takes more than to compare the query with all that is kept, this is done, exactly. Lossy types find candidates, which the
vectors themselves rank again. Of vectors that share the k-th place, exact search of all returns those with the highest rows;
the other types return some of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from infembed_ray.retrieval.factory import BLOCK, EXACT_BELOW, blocks, holds_originals, is_lossy, leaf, on_gpus
from infembed_ray.retrieval.faiss_import import faiss

AIM = 0.99
"""recall@10 that parameters are chosen for."""
QUERIES = 256
"""Vectors that parameters are chosen by; as many others measure what they give."""
NEAR = 10
QUERY_COSINE = 0.5
"""Of a made query with the passage that it is made of: what it finds is about as far from it as from a real query. Of 200,000
passages, efSearch 16, 64 and 256 found 85, 97 and 99.5 % of the nearest to made queries, 89, 97 and 99.6 % of those to real
ones, and 99.5, 100 and 100 % of those to passages."""
LEAST_EF_SEARCH = 256
"""Passages find passages with far less, but queries lie farther off: of 200,000 passages, 16 found 98.6 % of the nearest to
passages and 78 % of those to real queries, 256 found 97 % (benchmarks/search.py). For the same reason, no fewer lists are
visited than the root of all."""
LEAST_RERANK, MOST_RERANK = 4, 64
MOST_ON_GPU = 2048
"""Neighbours that FAISS finds at once on a GPU."""
_MADE = -2
"""Row of a query that is none of the vectors."""
_MORE = 4
"""Times as many are looked for where too few were left."""
_TIE = 1e-6
"""Scores this close are equal: float32 sums in another order."""
EF_SEARCH, NPROBE, RERANK = "efSearch", "nprobe", "rerank"
"""Parameters: candidates kept in a graph; lists visited; candidates a hit that are ranked again."""


class Searcher:
    """n vectors to be searched.

    Args:
        index: FAISS index of them, under the inner product.
        originals: (n, d) float32, the vectors; may be mapped. None: the index holds them as they are.
        parameters: see `calibrate`; those that the index has no use for are left out.
        gpu: search on this process' GPUs, one call at a time, where nothing is left out and the type allows it.
    """

    def __init__(
        self,
        index: Any,
        originals: np.ndarray | None = None,
        parameters: Mapping[str, int] | None = None,
        gpu: bool = False,
    ) -> None:
        self.index = index
        self._leaf = leaf(index)
        self._lossy = is_lossy(index)
        self.originals = _stored(index) if originals is None else originals
        self.parameters: dict[str, int] = {}
        self.use(parameters or {})
        self._on_gpus = on_gpus(index) if gpu and not isinstance(self._leaf, faiss.IndexHNSW) else None
        self._one_at_a_time = threading.Lock()  # what FAISS keeps on a GPU besides the vectors serves one call

    def __len__(self) -> int:
        return int(self.index.ntotal)

    @property
    def exact(self) -> bool:
        """Does it find the nearest vectors always?"""
        return isinstance(self.index, faiss.IndexFlat)

    def use(self, parameters: Mapping[str, int]) -> None:
        """Search with these from now on."""
        self.parameters = dict(parameters)
        if EF_SEARCH in parameters:
            self._leaf.hnsw.efSearch = parameters[EF_SEARCH]
        if NPROBE in parameters:
            self._visit(parameters[NPROBE])

    def _visit(self, lists: int) -> None:
        self._leaf.nprobe = lists
        if finding := self._finding(lists):
            faiss.downcast_index(self._leaf.quantizer).hnsw.efSearch = finding["quantizer_params"].efSearch

    def _finding(self, lists: int) -> dict[str, Any]:
        """How hard to look for the nearest lists, where they are found by a graph themselves."""
        if isinstance(faiss.downcast_index(self._leaf.quantizer), faiss.IndexHNSW):
            return {"quantizer_params": faiss.SearchParametersHNSW(efSearch=2 * lists)}
        return {}

    def search(self, vectors: np.ndarray, k: int, keep: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The nearest rows of each query.

        Args:
            vectors: (q, d) float32.
            k: how many.
            keep: (n,) bool: rows that may be found; None: all.

        Returns:
            (q, k) float32 scores and (q, k) int64 rows by (score, row), descending; -1 where there are no more.
        """
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        everything = keep is None or bool(keep.all())
        if self.exact:
            return self._first(vectors, k, None if everything else keep)
        if keep is None or everything:
            scores, rows = self._best(vectors, *self._nearest(vectors, k * self._again), k)
            short = (rows >= 0).sum(axis=1) < min(k, len(self))  # the lists that were visited held no more
            if short.any():
                scores[short], rows[short] = self._among(vectors[short], k, np.ones(len(self), bool))
            return scores, rows
        return self._among(vectors, k, keep)

    def _first(self, vectors: np.ndarray, k: int, keep: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The nearest by (score, row), exactly. Of equal scores FAISS keeps the rows that it sees first, so that where the
        next place's is equal to the k-th, more are looked at."""
        asked = None
        if keep is not None:
            bits = np.packbits(keep, bitorder="little")
            asked = faiss.SearchParameters(sel=faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits)))
        count = min(k + 1, max(k, len(self)))
        scores, rows = _ordered(*self._nearest(vectors, count, asked))
        best = scores[:, :k].copy(), rows[:, :k].copy()
        tied = np.flatnonzero((scores[:, k - 1] == scores[:, -1]) & (rows[:, -1] >= 0))
        while tied.size and count < len(self):
            count = min(_MORE * count, len(self))
            scores, rows = _ordered(*self._nearest(vectors[tied], count, asked))
            best[0][tied], best[1][tied] = scores[:, :k], rows[:, :k]
            tied = tied[(scores[:, k - 1] == scores[:, -1]) & (rows[:, -1] >= 0)]
        return best

    def vectors(self, rows: np.ndarray | slice) -> np.ndarray:
        """(rows, d) float32 vectors as they were added."""
        return np.array(self.originals[rows], dtype=np.float32)

    @property
    def _again(self) -> int:
        return self.parameters.get(RERANK, 1)

    def _nearest(self, vectors: np.ndarray, count: int, asked: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """The nearest by the index' own scores. It looks as hard for each as it was calibrated to for ten."""
        on_gpus = self._on_gpus if asked is None and count <= MOST_ON_GPU else None
        harder = count / (NEAR * self._again)
        if harder > 1 and not isinstance(self._leaf, faiss.IndexFlat):
            if isinstance(self._leaf, faiss.IndexHNSW):
                asked = faiss.SearchParametersHNSW(efSearch=math.ceil(self._leaf.hnsw.efSearch * harder))
            else:
                lists = min(self._leaf.nlist, math.ceil(self._leaf.nprobe * harder))
                asked = faiss.SearchParametersIVF(nprobe=lists, **self._finding(lists))
            if self._leaf is not self.index:
                asked = faiss.SearchParametersPreTransform(index_params=asked)
        if on_gpus is None:
            return self.index.search(vectors, count, params=asked)
        with self._one_at_a_time:
            return on_gpus.search(vectors, count, params=asked)

    def _best(self, vectors: np.ndarray, scores: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The best `k` of candidates; those whose row is -1 are none."""
        if self._lossy:
            scores = np.full_like(scores, -np.inf)
            for query, candidates in enumerate(rows):
                found = candidates >= 0
                scores[query, found] = self.originals[candidates[found]] @ vectors[query]
        scores, rows = _ordered(scores, rows)
        return scores[:, :k], rows[:, :k]

    def _among(self, vectors: np.ndarray, k: int, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kept = int(np.count_nonzero(keep))
        scores = np.full((len(vectors), k), -np.inf, dtype=np.float32)
        rows = np.full((len(vectors), k), -1, dtype=np.int64)
        left = np.arange(len(vectors))
        wanted = min(k * self._again, kept)
        share = kept / len(self)
        # As many as leave enough if what is kept lies everywhere alike; three standard deviations more.
        count = math.ceil((wanted + 3 * math.sqrt(wanted * (1 - share))) / share) if kept else 0
        while left.size and max(EXACT_BELOW, self._compared(count)) < kept:
            near, found = self._nearest(vectors[left], count)
            dropped = (found < 0) | ~keep[found]
            near[dropped], found[dropped] = -np.inf, -1
            enough = (~dropped).sum(axis=1) >= wanted
            done = left[enough]
            scores[done], rows[done] = self._best(vectors[done], near[enough], found[enough], k)
            left = left[~enough]
            count *= _MORE
        if left.size and kept:
            scores[left], rows[left] = self._exact(vectors[left], k, keep)
        return scores, rows

    def _compared(self, count: int) -> float:
        """About how many vectors a search for the nearest `count` compares with the query."""
        harder = max(1.0, count / (NEAR * self._again))
        if isinstance(self._leaf, faiss.IndexHNSW):
            return float(self._leaf.hnsw.efSearch * harder * self._leaf.hnsw.nb_neighbors(0))
        if isinstance(self._leaf, faiss.IndexFlat):
            return float(len(self))
        return float(self._leaf.nprobe * harder * len(self) / self._leaf.nlist)

    def _exact(self, vectors: np.ndarray, k: int, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """By comparing the queries with everything that is kept, some at a time."""
        scores = np.full((len(vectors), k), -np.inf, dtype=np.float32)
        rows = np.full((len(vectors), k), -1, dtype=np.int64)
        for start in range(0, len(self), BLOCK):
            some = start + np.flatnonzero(keep[start : start + BLOCK])
            if not some.size:
                continue
            dense = 2 * len(some) > len(keep[start : start + BLOCK])  # then a copy takes longer than the others do
            block = self.originals[start : start + BLOCK] if dense else self.originals[some]
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
    """(n, d) The vectors that an index holds, without a copy; they live as long as the index."""
    if not holds_originals(index):
        raise ValueError("this index does not hold its vectors; give them beside it")
    flat = index if isinstance(index, faiss.IndexFlat) else faiss.downcast_index(index.storage)
    if flat.ntotal == 0:
        return np.empty((0, flat.d), dtype=np.float32)
    view = faiss.rev_swig_ptr(flat.get_xb(), flat.ntotal * flat.d)
    return view.reshape(flat.ntotal, flat.d)


def _ordered(scores: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By (score, row), descending."""
    rising = scores[:, 1:] >= scores[:, :-1]
    if rising.any():
        order = np.lexsort((-rows, -scores))
        scores, rows = np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)
    return scores, rows


# ------------------------------------------------------------------------------------------------------- recall


def calibrate(searcher: Searcher, aim: float = AIM) -> tuple[dict[str, int], float]:
    """The cheapest parameters that reach `aim`, or those that come closest; and the recall they give.

    Queries are vectors of the index itself, without themselves among their neighbours, and as many made ones, turned from
    them in a random direction: real queries lie beside the passages, where a graph or its lists find less. What both kinds
    reach counts, that is the lower figure. Some queries choose the parameters, others measure: the figure is not of those
    that it was fitted to.

    Args:
        searcher: is left with these parameters.

    Returns:
        parameters, and recall@10 against exact search; 1 by definition where the search is exact.
    """
    n = len(searcher)
    if searcher.exact or n < 2:
        searcher.use({})
        return {}, 1.0
    drawn = np.random.default_rng(0).permutation(n)[: 2 * QUERIES]
    choosing, measuring = (drawn, drawn) if n < 2 * QUERIES else (drawn[:QUERIES], drawn[QUERIES:])
    near = Neighbours(searcher.originals, choosing)
    inner = leaf(searcher.index)
    ladders: dict[str, list[int]] = {}
    if isinstance(inner, faiss.IndexHNSW):
        ladders[EF_SEARCH] = _ladder(LEAST_EF_SEARCH, n)
    elif isinstance(inner, faiss.IndexIVF):
        ladders[NPROBE] = _ladder(math.isqrt(inner.nlist), int(inner.nlist))
    if is_lossy(searcher.index):
        ladders[RERANK] = _ladder(LEAST_RERANK, min(MOST_RERANK, max(1, n // NEAR)))
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
    """The exact nearest neighbours of some vectors among all the others, and those of made queries (`_turned`).

    Args:
        vectors: (n, d) float32, n > 1; may be mapped.
        rows: of those that are queries, and that queries are made of.
    """

    def __init__(self, vectors: np.ndarray, rows: np.ndarray) -> None:
        rows = np.sort(rows)
        passages = np.ascontiguousarray(vectors[rows], dtype=np.float32)
        self.queries = np.concatenate([passages, _turned(passages)])
        self.rows = np.concatenate([rows, np.full_like(rows, _MADE)])
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
        """Share of the 10 nearest neighbours that a searcher finds, of passages or of made queries, whichever is lower.

        One that is as near as the tenth counts as it.
        """
        k = self._scores.shape[1]
        scores = _without(self.rows, *searcher.search(self.queries, k + 1))[:, :k]
        found = (scores >= self._scores[:, -1:] - _TIE).reshape(2, -1)
        return float(found.mean(axis=1).min())


def _turned(vectors: np.ndarray) -> np.ndarray:
    """(n, d) float32: unit vectors turned in a random direction, the same every time, until the cosine is `QUERY_COSINE`."""
    aside = np.random.default_rng(0).standard_normal(vectors.shape, dtype=np.float32)
    aside -= (aside * vectors).sum(axis=1, keepdims=True) * vectors
    aside /= np.maximum(np.linalg.norm(aside, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return QUERY_COSINE * vectors + np.float32(math.sqrt(1 - QUERY_COSINE**2)) * aside


def _without(rows: np.ndarray, scores: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The scores of all but the query itself, or of all but the last where it was not found or is none of the rows."""
    others = found != rows[:, None]
    others[others.all(axis=1), -1] = False
    return np.where(found >= 0, scores, -np.inf)[others].reshape(len(rows), -1)
