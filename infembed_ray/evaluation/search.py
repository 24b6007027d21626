"""Exact search over embeddings in bounded memory, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

DEPTH = 1000
"""Documents a ranking holds, as in TREC."""

QUERY_BLOCK = 256
CORPUS_BLOCK = 1 << 14  # 256 x 16,384 scores, keys and their copies: some 0.15 GB at a time

_NOTHING = -(1 << 63)
"""A key below those of all finite scores."""
_LOW = (1 << 32) - 1
_MAGNITUDE = (1 << 31) - 1


def exact_search(
    queries: np.ndarray,
    corpus: np.ndarray | Iterable[np.ndarray],
    document_ids: Sequence[str] | pa.ChunkedArray,
    depth: int = DEPTH,
    *,
    candidates: Sequence[Collection[str]] | None = None,
    excluded: Sequence[Collection[str]] | None = None,
    device: str = "cpu",
) -> list[dict[str, float]]:
    """The best documents of every query by inner product, ties broken by document id, descending.

    The corpus is gone through once, block by block. What is held of it besides a block are 8 bytes a document; of every
    query, the best so far.

    Args:
        queries: (n, d) float32, finite.
        corpus: (m, d) float32, finite, m < 2**32; or its rows in their order, as arrays of any heights.
        document_ids: m unique ids.
        depth: most documents a query.
        candidates: of every query, the documents that are ranked for it; None: all. Those not in the corpus are passed over.
        excluded: of every query, documents that are not ranked for it.
        device: where the products are computed and selected from.

    Returns:
        n rankings: document id -> score, best first.
    """
    ids = document_ids if isinstance(document_ids, pa.ChunkedArray) else pa.chunked_array([document_ids], pa.string())
    by_id = pc.sort_indices(ids).to_numpy().astype(np.uint32)
    id_rank = np.empty(len(by_id), dtype=np.uint32)
    id_rank[by_id] = np.arange(len(by_id), dtype=np.uint32)
    among = None if candidates is None else rows_of(ids, candidates)
    without = None if excluded is None else rows_of(ids, excluded)

    blocks = range(0, len(queries), QUERY_BLOCK)
    asked = [torch.from_numpy(np.array(queries[q : q + QUERY_BLOCK])).to(device) for q in blocks]
    best = [torch.empty((len(block), 0), dtype=torch.int64, device=device) for block in asked]
    start = 0
    for passages in _blocks(corpus):
        stop = start + len(passages)
        there = torch.from_numpy(passages).to(device)
        ranks = torch.from_numpy(id_rank[start:stop].astype(np.int64)).to(device)
        for number, (q, block) in enumerate(zip(blocks, asked, strict=True)):
            keys = _keys(block @ there.T, ranks)
            for row in range(len(block)):
                if without is not None:
                    keys[row, _inside(without[q + row], start, stop)] = _NOTHING
                if among is not None:
                    inside = _inside(among[q + row], start, stop)
                    kept = keys[row, inside]
                    keys[row] = _NOTHING
                    keys[row, inside] = kept
            both = torch.cat([best[number], keys], dim=1)
            best[number] = both.topk(min(depth, both.shape[1]), dim=1, sorted=False).values
        start = stop
    assert start == len(ids), f"{start} embeddings of {len(ids)} documents"

    rankings: list[dict[str, float]] = []
    for keys in best:
        found = keys.sort(dim=1, descending=True).values.cpu()
        lengths = (found != _NOTHING).sum(dim=1).tolist()
        names = iter(ids.take(pa.array(by_id[(found & _LOW).numpy()[(found != _NOTHING).numpy()]])).to_pylist())
        for length, scores in zip(lengths, _scores(found).tolist(), strict=True):
            rankings.append({next(names): score for score in scores[:length]})
    return rankings


def rows_of(ids: pa.ChunkedArray, named: Sequence[Collection[str]]) -> list[np.ndarray]:
    """The rows, ascending, of the documents that are named for each query; those not in the corpus are passed over."""
    wanted = pa.array(sorted({name for names in named for name in names}), pa.string())
    places = pc.index_in(ids, value_set=wanted)  # not the other way round: that would make a table of all ids
    rows = pc.indices_nonzero(places.is_valid()).to_pylist()
    found = wanted.take(places.drop_null().combine_chunks()).to_pylist()
    row_of = dict(zip(found, rows, strict=True))
    return [np.array(sorted(row_of[n] for n in set(names) if n in row_of), dtype=np.int64) for names in named]


def _blocks(corpus: np.ndarray | Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The same rows in arrays of their own, large enough that the products take most of the time."""
    if isinstance(corpus, np.ndarray):
        corpus = [corpus[start : start + CORPUS_BLOCK] for start in range(0, len(corpus), CORPUS_BLOCK)]
    held: list[np.ndarray] = []
    for part in corpus:
        held.append(part)
        if sum(map(len, held)) >= CORPUS_BLOCK:
            yield np.concatenate(held)
            held = []
    if held:
        yield np.concatenate(held)


def _inside(rows: np.ndarray, start: int, stop: int) -> Tensor:
    """Those of ascending rows that are in a block, counted from its first."""
    first, last = np.searchsorted(rows, (start, stop))
    return torch.from_numpy(rows[first:last] - start)


def _keys(scores: Tensor, id_rank: Tensor) -> Tensor:
    """One integer a document that orders as (score, id) do: no two are equal, so any selection by key is exact.

    The high 32 bits are the score's, turned so that they order as signed integers; the low 32 the rank of the id.
    """
    bits = (scores + 0).view(torch.int32)  # + 0: -0.0 and 0.0 are one score
    ordered = bits ^ ((bits >> 31) & _MAGNITUDE)
    return (ordered.to(torch.int64) << 32) | id_rank


def _scores(keys: Tensor) -> Tensor:
    """The float32 scores inside keys."""
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & _MAGNITUDE)).view(torch.float32)
