"""Texts that repeat: equal texts, near-duplicates, and texts of evaluation sets.

A near-duplicate has a Jaccard similarity of its word trigrams of at least a threshold with an earlier text that is not a
near-duplicate itself. Texts that share a band of minimal hashes are candidates (Leskovec et al., Mining of Massive Datasets,
section 3.4), and the similarity of candidates is computed exactly.

A text matches an evaluation set (paper, section 6) if it shares a run of NGRAM words with a text of the set, or, if it is
shorter, equals one; case, punctuation and white space are ignored. The n-grams of an evaluation set are in memory as hashes, 8
bytes each.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from infembed_ray.analysis.figures import KINDS, Section
from infembed_ray.errors import InputError
from infembed_ray.records.files import raw_rows
from infembed_ray.records.tables import Record
from infembed_ray.storage.places import Place, expanded

_WORDS = 1 << 17
"""Words whose hashes are remembered."""
_MARKS = "".join(mark for mark in map(chr, range(0x10000)) if unicodedata.category(mark)[0] == "M")
"""Accents and vowel signs, which belong to words but not to Python's word characters."""
_NOT_WORDS = re.compile(rf"[^\w{_MARKS}]+")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]")
"""Characters of scripts without spaces (Chinese, Japanese, Thai, Lao, Burmese, Khmer): each counts as a word."""
THRESHOLD = 0.7
"""Jaccard similarity of word trigrams from which texts are near-duplicates."""
BANDS, ROWS = 32, 4
"""Two texts of similarity s share one of BANDS bands of ROWS minimal hashes with probability 1 - (1 - s^ROWS)^BANDS: 0.9998 at
0.7, 0.05 at 0.2."""
SHINGLE = 3
"""Words per shingle."""
MOST_COMPARED = 32
"""A text is compared with the first MOST_COMPARED texts of each of its bands, so that a large bucket costs linear time."""
_SHINGLED = 1024
"""Texts whose shingles are in memory at once."""
NGRAM = 13
"""Consecutive words that count as an overlap, as in the decontamination of GPT-3 (arXiv 2005.14165, appendix C)."""
_HASHED = 1 << 12
"""Texts of an evaluation set whose hashes are joined at once."""
_ID = re.compile(r"(^|[_-])id$", re.IGNORECASE)
EXAMPLES = 5
"""Examples of each kind in a report."""


# --------------------------------------------------------------------------------------------------------------- words


def normalised(text: str) -> str:
    """Return the words in lower case, separated by single spaces, with Unicode NFKC normalisation."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
        text = _UNSPACED.sub(r" \g<0> ", text)
    return " ".join(_NOT_WORDS.sub(" ", text.casefold().replace("_", " ")).split())


def hashes(words: Sequence[str], length: int) -> np.ndarray:
    """Return the uint64 hashes of all runs of `length` words, in order; of all words if they are fewer; none of no words."""
    length = min(length, len(words))
    every = np.fromiter(map(_hash, words), dtype=np.uint64, count=len(words))
    runs = max(0, len(words) - length + 1) if words else 0
    total = np.zeros(runs, dtype=np.uint64)
    for place, factor in enumerate(odd(1, length)):
        total += every[place : place + runs] * factor
    return total


@cache
def odd(seed: int, number: int) -> np.ndarray:
    """Return fixed random odd factors."""
    drawn = np.random.default_rng(seed).integers(0, 2**63, size=number, dtype=np.uint64)
    return drawn * np.uint64(2) + np.uint64(1)


@lru_cache(maxsize=_WORDS)
def _hash(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "big")


# ---------------------------------------------------------------------------------------------------- near-duplicates


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
    for start in range(0, len(texts), _SHINGLED):
        shingles = [shingles_of(text) for text in texts[start : start + _SHINGLED]]
        minimal = signatures(shingles).reshape(-1, BANDS, ROWS)
        bands[start : start + _SHINGLED] = (minimal * odd(2, ROWS)).sum(axis=2)
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


# ------------------------------------------------------------------------------------------------------ contamination


@dataclass(frozen=True)
class EvaluationTexts:
    """An evaluation set: its number of texts, and the sorted hashes of their n-grams."""

    texts: int
    grams: np.ndarray

    @classmethod
    def of(cls, texts: Iterable[str]) -> EvaluationTexts:
        """Hash the n-grams of texts, which are iterated once."""
        parts, waiting, number = [np.empty(0, dtype=np.uint64)], [], 0
        for text in texts:
            waiting.append(hashes(normalised(text).split(), NGRAM))
            number += 1
            if len(waiting) == _HASHED:
                parts.append(np.unique(np.concatenate(waiting)))
                waiting = []
        return cls(number, np.unique(np.concatenate([*parts, *waiting])))

    @classmethod
    def read(cls, path: Place, name: str) -> EvaluationTexts:
        """Hash the texts of a file or a directory; InputError as `read`."""
        return cls.of(read(path, name))

    def shared(self, text: str) -> str | None:
        """Return the first words that a text shares with the set; None if there are none."""
        words = normalised(text).split()
        own = hashes(words, NGRAM)
        if not len(own) or not len(self.grams):
            return None
        places = np.flatnonzero(self.grams[np.searchsorted(self.grams, own).clip(max=len(self.grams) - 1)] == own)
        return " ".join(words[places[0] : places[0] + NGRAM]) if len(places) else None


def read(path: Place, name: str) -> Iterator[str]:
    """Yield all strings except ids of a file, or of all files of a directory but hidden ones and README.md.

    Raises:
        InputError: as `raw_rows`, or the directory is empty.
    """
    files = [file for file in expanded(path) if file.name != "README.md"]
    if not files:
        raise InputError.of(name, path, "no files in this directory", "give those of an evaluation set")
    for file in files:
        for row in raw_rows(file, name):
            yield from _strings(row)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for column, inner in value.items():
            if not _ID.search(column):
                yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)


def contamination(
    label: str, evaluation: EvaluationTexts, records: Sequence[Record]
) -> tuple[list[Section], dict[int, str]]:
    """Compare records with an evaluation set.

    Returns:
        Per kind of text: the numbers of the records' texts, of the `compared` texts of the set and of the records' `matching`
        ones, and examples of shared words; and row -> shared words.
    """
    sections, rows = [], dict[int, str]()
    for kind, columns in KINDS.items():
        examples: dict[str, None] = {}
        matching = 0
        for row, record in enumerate(records):
            for column in columns:
                if (words := evaluation.shared(getattr(record, column))) is not None:
                    matching += 1
                    examples[words] = None
                    rows.setdefault(row, words)
        section = {"evaluation": label, "kind": kind, "texts": len(records) * len(columns), "matching": matching}
        sections.append(section | {"compared": evaluation.texts, "examples": list(examples)[:EXAMPLES]})
    return sections, rows
