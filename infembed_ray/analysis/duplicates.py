"""Repeated texts, and texts that are nearly equal to an earlier one.

Near-duplicates have a Jaccard similarity of their word trigrams of at least THRESHOLD, and are found by MinHash: a text is
compared with the earlier texts that share a band of minimal hashes with it (module `shingles`). All texts are in memory;
`infembed clean` removes near-duplicates from sets of any size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infembed_ray.analysis.inputs import KINDS
from infembed_ray.analysis.shingles import BANDS, ROWS, hashes, jaccard, normalised, signatures
from infembed_ray.records.tables import Record

EXAMPLES = 5
THRESHOLD = 0.7
SHINGLE = 3
"""Words per shingle."""


@dataclass(frozen=True)
class Repeated:
    """A text and its number of occurrences."""

    text: str
    times: int


@dataclass(frozen=True)
class NearDuplicate:
    """A text, the earlier text that it resembles most, and their similarity."""

    text: str
    like: str
    similarity: float


@dataclass(frozen=True)
class Duplicates:
    """Duplicates among all texts of a kind.

    Attributes:
        distinct: number of distinct texts, ignoring case and white space.
        repeated: number of distinct texts that occur more than once.
        examples: the most frequent of them.
        near: number of distinct texts that are nearly equal to an earlier one.
        near_examples: the most similar of them.
    """

    kind: str
    texts: int
    distinct: int
    repeated: int
    examples: list[Repeated]
    near: int
    near_examples: list[NearDuplicate]


def duplicates(records: Sequence[Record]) -> list[Duplicates]:
    """Count duplicates per kind of text, over positive and negative texts together."""
    return [_of_kind(kind, [getattr(r, c) for r in records for c in columns]) for kind, columns in KINDS.items()]


def _of_kind(kind: str, texts: list[str]) -> Duplicates:
    counted = Counter(" ".join(text.casefold().split()) for text in texts)
    repeated = [Repeated(text, times) for text, times in counted.most_common() if times > 1]
    near = sorted(near_duplicates(list(counted)), key=lambda pair: -pair.similarity)
    return Duplicates(kind, len(texts), len(counted), len(repeated), repeated[:EXAMPLES], len(near), near[:EXAMPLES])


def near_duplicates(texts: Sequence[str]) -> list[NearDuplicate]:
    """Find the texts that are nearly equal to an earlier text which is not a near-duplicate itself, in order."""
    shingles = [shingles_of(text) for text in texts]
    tables: list[dict[bytes, list[int]]] = [{} for _ in range(BANDS)]
    found = []
    for number, signature in enumerate(signatures(shingles)):
        bands = [band.tobytes() for band in signature.reshape(BANDS, ROWS)]
        earlier = {other for table, band in zip(tables, bands, strict=True) for other in table.get(band, ())}
        similarities = {other: jaccard(shingles[number], shingles[other]) for other in sorted(earlier)}
        like = max(similarities, key=similarities.__getitem__, default=None)
        if like is not None and similarities[like] >= THRESHOLD:
            found.append(NearDuplicate(texts[number], texts[like], similarities[like]))
            continue
        for table, band in zip(tables, bands, strict=True):
            table.setdefault(band, []).append(number)
    return found


def shingles_of(text: str) -> np.ndarray:
    """Return the distinct hashes of all runs of SHINGLE words; of the whole text if it is shorter."""
    return np.unique(hashes(normalised(text).split() or [""], SHINGLE))
