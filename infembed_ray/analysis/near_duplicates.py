"""Repeated texts, and near-duplicates by MinHash.

A near-duplicate has a Jaccard similarity of its word trigrams of at least a threshold with an earlier text that is not a
near-duplicate itself. Texts that share a band of minimal hashes are candidates (Leskovec et al., Mining of Massive Datasets,
section 3.4), and the similarity of candidates is computed exactly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infembed_ray.analysis.figures import Section
from infembed_ray.analysis.inputs import KINDS
from infembed_ray.analysis.words import hashes, normalised, odd
from infembed_ray.records.tables import Record

THRESHOLD = 0.7
"""Jaccard similarity of word trigrams from which texts are near-duplicates."""
BANDS, ROWS = 32, 4
"""Two texts of similarity s share one of BANDS bands of ROWS minimal hashes with probability 1 - (1 - s^ROWS)^BANDS: 0.9998 at
0.7, 0.05 at 0.2."""
SHINGLE = 3
"""Words per shingle."""
MOST_COMPARED = 32
"""A text is compared with the first MOST_COMPARED texts of each of its bands, so that a large bucket costs linear time."""
EXAMPLES = 5
_AT_ONCE = 1024
"""Texts whose shingles are in memory at once."""


@dataclass(frozen=True)
class NearDuplicate:
    """The row of a text, the row of the earlier text that it resembles most, and their similarity."""

    row: int
    like: int
    similarity: float


def near_duplicates(texts: Sequence[str], threshold: float = THRESHOLD) -> list[NearDuplicate]:
    """Find the texts that are nearly equal to an earlier text which is not a near-duplicate itself, in order."""
    buckets = _buckets(texts)
    members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    shingles: dict[int, np.ndarray] = {}
    duplicates = []
    for row in np.flatnonzero((buckets >= 0).any(axis=1)).tolist():
        own = shingles_of(texts[row])
        keys = [(band, bucket) for band, bucket in enumerate(buckets[row].tolist()) if bucket >= 0]
        earlier = sorted({other for key in keys for other in members.get(key, ())})
        similarities = {other: jaccard(own, shingles[other]) for other in earlier}
        like = max(similarities, key=similarities.__getitem__, default=None)
        if like is not None and similarities[like] >= threshold:
            duplicates.append(NearDuplicate(row, like, similarities[like]))
            continue
        shingles[row] = own
        for key in keys:
            if len(members[key]) < MOST_COMPARED:
                members[key].append(row)
    return duplicates


def _buckets(texts: Sequence[str]) -> np.ndarray:
    """Return (texts, BANDS) numbers of buckets: texts with equal numbers share the band; -1: no other text has it."""
    bands = np.empty((len(texts), BANDS), dtype=np.uint64)
    for start in range(0, len(texts), _AT_ONCE):
        shingles = [shingles_of(text) for text in texts[start : start + _AT_ONCE]]
        minimal = signatures(shingles).reshape(-1, BANDS, ROWS)
        bands[start : start + _AT_ONCE] = (minimal * odd(2, ROWS)).sum(axis=2)
    buckets = np.full(bands.shape, -1, dtype=np.int64)
    for band in range(BANDS):
        _, numbers, counts = np.unique(bands[:, band], return_inverse=True, return_counts=True)
        buckets[:, band] = np.where(counts[numbers] > 1, numbers, -1)
    return buckets


def shingles_of(text: str) -> np.ndarray:
    """Return the distinct hashes of all runs of SHINGLE words; of the whole text if it is shorter."""
    return np.unique(hashes(normalised(text).split() or [""], SHINGLE))


def signatures(shingles: Sequence[np.ndarray]) -> np.ndarray:
    """Return (texts, BANDS * ROWS) minimal 32-bit hashes, by multiply-shift hashing; every text has a shingle."""
    every = np.concatenate(shingles)
    starts = np.cumsum([0, *map(len, shingles[:-1])])
    columns = [np.minimum.reduceat((every * factor) >> np.uint64(32), starts) for factor in odd(0, BANDS * ROWS)]
    return np.stack(columns, axis=1)


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Return the Jaccard similarity of two arrays of distinct hashes."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


def duplicates(records: Sequence[Record]) -> list[Section]:
    """Count the duplicates among all texts of each kind, positive and negative together.

    Returns:
        Per kind: all texts, the `distinct` ones (ignoring case and white space), and how many of these are `repeated` and `near`
        an earlier one; `examples`: the most frequent texts and how often they occur, then the most similar and their similarity.
    """
    sections = []
    for kind, columns in KINDS.items():
        texts = [getattr(record, column) for record in records for column in columns]
        counted = Counter(" ".join(text.casefold().split()) for text in texts)
        distinct = list(counted)
        repeated = [(text, times) for text, times in counted.most_common() if times > 1]
        near = sorted(near_duplicates(distinct), key=lambda duplicate: -duplicate.similarity)
        section = {"kind": kind, "texts": len(texts), "distinct": len(distinct), "repeated": len(repeated)}
        similar = [(distinct[duplicate.row], duplicate.similarity) for duplicate in near[:EXAMPLES]]
        sections.append(section | {"near": len(near), "examples": [*repeated[:EXAMPLES], *similar]})
    return sections
