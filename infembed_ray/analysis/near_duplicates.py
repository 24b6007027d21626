"""Texts that are nearly equal to another: by the Jaccard similarity of their word trigrams, found by MinHash.

A text is compared with the earlier texts that share one of BANDS bands of ROWS minimal hashes with it, so time grows
with the number of texts and not with that of their pairs. Two texts of similarity s share a band with probability
1 - (1 - s^ROWS)^BANDS: 0.9998 at the THRESHOLD, 0.05 at 0.2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

THRESHOLD = 0.7
SHINGLE = 3
"""Words of a shingle."""
BANDS, ROWS = 32, 4

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class NearDuplicate:
    """A text, and an earlier one that is nearly equal to it."""

    text: str
    like: str
    similarity: float


def near_duplicates(texts: Sequence[str]) -> list[NearDuplicate]:
    """Of different texts, those that are nearly equal to an earlier one that is none itself, in their order."""
    shingles = [_shingles(text) for text in texts]
    tables: list[dict[bytes, list[int]]] = [{} for _ in range(BANDS)]
    found = []
    for number, signature in enumerate(_signatures(shingles)):
        bands = [band.tobytes() for band in signature.reshape(BANDS, ROWS)]
        earlier = {other for table, band in zip(tables, bands, strict=True) for other in table.get(band, ())}
        similarities = {other: _jaccard(shingles[number], shingles[other]) for other in sorted(earlier)}
        like = max(similarities, key=similarities.__getitem__, default=None)
        if like is not None and similarities[like] >= THRESHOLD:
            found.append(NearDuplicate(texts[number], texts[like], similarities[like]))
            continue
        for table, band in zip(tables, bands, strict=True):
            table.setdefault(band, []).append(number)
    return found


def _shingles(text: str) -> frozenset[int]:
    """Hashes of the runs of SHINGLE words; of the whole text where it is shorter."""
    words = _WORD.findall(text.casefold())
    runs = {" ".join(words[start : start + SHINGLE]) for start in range(max(1, len(words) - SHINGLE + 1))}
    return frozenset(int.from_bytes(blake2b(run.encode(), digest_size=8).digest(), "big") for run in runs)


def _jaccard(one: frozenset[int], other: frozenset[int]) -> float:
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


def _signatures(shingles: Sequence[frozenset[int]]) -> np.ndarray:
    """(texts, BANDS * ROWS) minimal hashes, by multiply-shift hashing with fixed random odd factors."""
    if not shingles:
        return np.empty((0, BANDS * ROWS), dtype=np.uint32)
    rng = np.random.default_rng(0)
    factors = rng.integers(0, 2**63, size=BANDS * ROWS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    every = np.fromiter((h for of_text in shingles for h in of_text), dtype=np.uint64)
    starts = np.cumsum([0, *(len(of_text) for of_text in shingles[:-1])])
    columns = [np.minimum.reduceat((every * factor) >> np.uint64(32), starts) for factor in factors]
    return np.stack(columns, axis=1).astype(np.uint32)
