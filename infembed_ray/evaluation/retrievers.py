"""Exact search over embeddings in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DEPTH = 1000
"""Documents a ranking holds, as in TREC."""

QUERY_BLOCK = 256
CORPUS_BLOCK = 1 << 14  # 256 x 16,384 scores, keys and their copies: some 0.15 GB at a time

_SIGN = np.uint32(1 << 31)
_LOW = np.uint64((1 << 32) - 1)


def exact_search(
    queries: np.ndarray, corpus: np.ndarray, document_ids: Sequence[str], depth: int = DEPTH
) -> list[dict[str, float]]:
    """The best documents of every query by inner product, ties broken by document id, descending.

    Args:
        queries: (n, d) float32, finite.
        corpus: (m, d) float32, finite, m < 2**32.
        document_ids: m unique ids.
        depth: most documents a query.

    Returns:
        n rankings: document id -> score, best first.
    """
    by_id = sorted(range(len(document_ids)), key=document_ids.__getitem__)
    id_rank = np.empty(len(by_id), dtype=np.uint64)
    id_rank[by_id] = np.arange(len(by_id), dtype=np.uint64)
    rankings: list[dict[str, float]] = []
    for q in range(0, len(queries), QUERY_BLOCK):
        block = queries[q : q + QUERY_BLOCK]
        best = np.empty((len(block), 0), dtype=np.uint64)
        for c in range(0, len(corpus), CORPUS_BLOCK):
            keys = _keys(block @ corpus[c : c + CORPUS_BLOCK].T, id_rank[c : c + CORPUS_BLOCK])
            best = np.concatenate([best, keys], axis=1)
            if best.shape[1] > depth:
                best = np.partition(best, -depth, axis=1)[:, -depth:]
        best = np.sort(best, axis=1)[:, ::-1]
        for documents, scores in zip((best & _LOW).tolist(), _scores(best).tolist(), strict=True):
            rankings.append({document_ids[by_id[d]]: s for d, s in zip(documents, scores, strict=True)})
    return rankings


def _keys(scores: np.ndarray, id_rank: np.ndarray) -> np.ndarray:
    """One integer a document that orders as (score, id) do: no two are equal, so any selection by key is exact.

    The high 32 bits are the score's, turned so that they order as unsigned integers; the low 32 the rank of the id.
    """
    bits = (scores + np.float32(0)).view(np.uint32)  # + 0: -0.0 and 0.0 are one score
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    return (ordered.astype(np.uint64) << np.uint64(32)) | id_rank


def _scores(keys: np.ndarray) -> np.ndarray:
    """The float32 scores inside keys."""
    ordered = (keys >> np.uint64(32)).astype(np.uint32)
    return np.where(ordered & _SIGN, ordered ^ _SIGN, ~ordered).view(np.float32)
