"""Combine the scores of a search's channels into one: query, unwanted part of the instruction, words.

The channels are fused after the candidates of all shards are merged, so a score does not depend on how passages are distributed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

DEPTH = 100
"""Candidates of each channel and shard."""


class Candidates(NamedTuple):
    """Scores of m passages for one query.

    Attributes:
        dense: (m,) inner products of the query's vector with the passages.
        unwanted: (m,) inner products of the vector of what the instruction excludes; 0: it excludes nothing.
        lexical: (m,) BM25, 0 or more.
    """

    dense: np.ndarray
    unwanted: np.ndarray
    lexical: np.ndarray


@dataclass(frozen=True)
class Fusion:
    """How to score candidates.

    Attributes:
        exclusion: weight of the unwanted part; 0: none.
        hybrid: share of BM25 in the score; 0: none, 1: words alone.
    """

    exclusion: float = 0.0
    hybrid: float = 0.0

    def __call__(self, found: Candidates) -> np.ndarray:
        """Score candidates: (m,) float32."""
        raise NotImplementedError
