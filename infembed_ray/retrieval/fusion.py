"""The vectors and scores of a search with further channels: what its instructions exclude, and words."""

from __future__ import annotations

import numpy as np


def away(wanted: np.ndarray, unwanted: np.ndarray, weight: float) -> np.ndarray:
    """Move queries away from what they exclude; the score of a passage p becomes wanted·p - weight · unwanted·p, scaled.

    Args:
        wanted: (n, d) unit vectors of the queries under the wanted parts of their instructions.
        unwanted: (n, d) unit vectors of the unwanted parts.

    Returns:
        (n, d) float32 unit vectors.
    """
    moved = wanted - weight * unwanted
    norms = np.linalg.norm(moved, axis=1, keepdims=True)
    return np.asarray(np.where(norms > 0, moved / np.maximum(norms, np.finfo(np.float32).tiny), wanted), np.float32)


def fuse(dense: np.ndarray, lexical: np.ndarray, weight: float) -> np.ndarray:
    """Score candidates by the weighted mean of their cosine and their BM25, which is divided by the largest of all candidates.

    Args:
        dense: (m,) cosines of the query with all candidates.
        lexical: (m,) BM25, 0 or more.
        weight: share of BM25 in the score, 0 to 1.

    Returns:
        (m,) float32.
    """
    largest = lexical.max(initial=0)
    relative = lexical / largest if largest > 0 else lexical
    return ((1 - weight) * dense + weight * relative).astype(np.float32)
