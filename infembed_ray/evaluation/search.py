"""Exact search over embeddings in bounded memory, on the CPU or on a GPU."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

DEPTH = 1000
"""Documents per ranking, as in TREC."""

QUERY_BLOCK = 256
CORPUS_BLOCK = 1 << 14  # 256 x 16,384 scores, keys and copies take about 0.15 GB

_NOTHING = -(1 << 63)
"""A key below the keys of all finite scores."""
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
    """Rank the top documents of every query by inner product; ties by document id, descending.

    The corpus is read once. Memory holds one block, 8 bytes per document and the top documents so far.

    Args:
        queries: (n, d) float32, finite.
        corpus: (m, d) float32, finite, m < 2**32; or arrays of any number of its rows, in order.
        document_ids: m unique ids.
        depth: documents per query.
        candidates: the documents to rank for each query; None: all. Documents missing from the corpus are ignored.
        excluded: the documents not to rank for each query.
        device: torch device of the products.

    Returns:
        n rankings: document id -> score, best first.
    """
    ids = document_ids if isinstance(document_ids, pa.ChunkedArray) else pa.chunked_array([document_ids], pa.string())
    by_id = pc.sort_indices(ids).to_numpy().astype(np.uint32)
    id_rank = np.empty(len(by_id), dtype=np.uint32)
    id_rank[by_id] = np.arange(len(by_id), dtype=np.uint32)
    candidate_rows = None if candidates is None else rows_of(ids, candidates)
    excluded_rows = None if excluded is None else rows_of(ids, excluded)

    blocks = range(0, len(queries), QUERY_BLOCK)
    query_blocks = [torch.from_numpy(np.array(queries[q : q + QUERY_BLOCK])).to(device) for q in blocks]
    best = [torch.empty((len(block), 0), dtype=torch.int64, device=device) for block in query_blocks]
    start = 0
    for passages in _blocks(corpus):
        stop = start + len(passages)
        passage_block = torch.from_numpy(passages).to(device)
        ranks = torch.from_numpy(id_rank[start:stop].astype(np.int64)).to(device)
        for number, (q, block) in enumerate(zip(blocks, query_blocks, strict=True)):
            keys = _keys(block @ passage_block.T, ranks)
            for row in range(len(block)):
                if excluded_rows is not None:
                    keys[row, _inside(excluded_rows[q + row], start, stop)] = _NOTHING
                if candidate_rows is not None:
                    inside = _inside(candidate_rows[q + row], start, stop)
                    kept = keys[row, inside]
                    keys[row] = _NOTHING
                    keys[row, inside] = kept
            both = torch.cat([best[number], keys], dim=1)
            best[number] = both.topk(min(depth, both.shape[1]), dim=1, sorted=False).values
        start = stop
    assert start == len(ids), f"{start} embeddings of {len(ids)} documents"

    return [ranking for keys in best for ranking in _rankings(keys, ids, by_id)]


def rows_of(ids: pa.ChunkedArray, id_lists: Sequence[Collection[str]]) -> list[np.ndarray]:
    """Return the rows, ascending, of the documents named for each query; documents not in the corpus are ignored."""
    wanted = pa.array(sorted({name for names in id_lists for name in names}), pa.string())
    places = pc.index_in(ids, value_set=wanted)  # the reverse would build a table of all ids
    rows = pc.indices_nonzero(places.is_valid()).to_pylist()
    present = wanted.take(places.drop_null().combine_chunks()).to_pylist()
    row_of = dict(zip(present, rows, strict=True))
    return [np.array(sorted(row_of[n] for n in set(names) if n in row_of), dtype=np.int64) for names in id_lists]


def _blocks(corpus: np.ndarray | Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the rows in arrays large enough that the products take most of the time."""
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
    """Select the ascending rows that are in a block, relative to its first row."""
    first, last = np.searchsorted(rows, (start, stop))
    return torch.from_numpy(rows[first:last] - start)


def _keys(scores: Tensor, id_rank: Tensor) -> Tensor:
    """Pack (score, id) into one integer per document. All keys differ, so any selection by key is exact.

    The high 32 bits are the score's, mapped so that they order as signed integers; the low 32 the rank of the id.
    """
    bits = (scores + 0).view(torch.int32)  # + 0: -0.0 and 0.0 are one score
    ordered = bits ^ ((bits >> 31) & _MAGNITUDE)
    return (ordered.to(torch.int64) << 32) | id_rank


def _rankings(keys: Tensor, ids: pa.ChunkedArray, by_id: np.ndarray) -> Iterator[dict[str, float]]:
    """Unpack the keys of the top documents of some queries: document id -> score, best first."""
    best = keys.sort(dim=1, descending=True).values.cpu()
    lengths = (best != _NOTHING).sum(dim=1).tolist()
    names = iter(ids.take(pa.array(by_id[(best & _LOW).numpy()[(best != _NOTHING).numpy()]])).to_pylist())
    ordered = (best >> 32).to(torch.int32)
    scores_of = (ordered ^ ((ordered >> 31) & _MAGNITUDE)).view(torch.float32)
    for length, scores in zip(lengths, scores_of.tolist(), strict=True):
        yield {next(names): score for score in scores[:length]}
