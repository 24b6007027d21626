"""Contamination: texts of evaluation sets in the records, by string matching (paper, section 6).

Two texts match if they are equal or share an n-gram of words, after case, punctuation and white space are normalised.
The hashes of the records' n-grams are in memory; evaluation sets of any size are streamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import Any

from infembed_ray.analysis.shingles import normalised
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.storage.places import Place, listing

EXAMPLES = 5
_ID = re.compile(r"(^|[_-])id$", re.IGNORECASE)


@dataclass(frozen=True)
class Match:
    """A text of the records, and what it shares with the evaluation set: all of it, or the first n-gram, normalised."""

    text: str
    shared: str


@dataclass(frozen=True)
class Contamination:
    """Matches of the records' texts of one kind with one evaluation set.

    Attributes:
        texts: number of the records' texts.
        compared: number of the evaluation set's texts, of all kinds.
        equal: number of the records' texts that equal one of the evaluation set.
        overlapping: number of other texts that share an n-gram with one.
        examples: matches with different shared texts.
    """

    evaluation: str
    kind: str
    texts: int
    compared: int
    equal: int
    overlapping: int
    examples: list[Match]


def read(path: Place, name: str) -> Iterator[str]:
    """Yield all strings except ids of a file, or of all files of a directory but hidden ones and README.md.

    Raises:
        InputError: as `tables.raw_rows`, or the directory is empty.
    """
    names = [n for n in sorted(listing(path)) if not tables.hidden(PurePosixPath(n)) and not n.endswith("README.md")]
    if not names:
        raise InputError(f"{name}={path}: no files in this directory; give those of an evaluation set")
    for file in names:
        for row in tables.raw_rows(path / file, name):
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
    evaluation: str, theirs: Iterable[str], ours: Mapping[str, Sequence[str]], length: int
) -> list[Contamination]:
    """Compare the texts of an evaluation set with those of the records.

    Args:
        theirs: its texts, iterated once.
        ours: kind -> the records' texts.
    """
    known = {_hash(text) for texts in ours.values() for text in map(normalised, texts) if text}
    grams = {_hash(gram) for texts in ours.values() for text in map(normalised, texts) for gram in ngrams(text, length)}
    equal: set[int] = set()
    shared: set[int] = set()
    compared = 0
    for text in map(normalised, theirs):
        compared += 1
        whole = _hash(text)
        if whole in known:
            equal.add(whole)
        shared.update(gram for gram in map(_hash, ngrams(text, length)) if gram in grams)
    return [_of_kind(evaluation, kind, texts, compared, equal, shared, length) for kind, texts in ours.items()]


def _of_kind(
    evaluation: str, kind: str, texts: Sequence[str], compared: int, equal: set[int], shared: set[int], length: int
) -> Contamination:
    same: list[Match] = []
    overlapping: list[Match] = []
    for text in texts:
        plain = normalised(text)
        if plain and _hash(plain) in equal:
            same.append(Match(text, plain))
        else:
            found = next((gram for gram in ngrams(plain, length) if _hash(gram) in shared), None)
            if found is not None:
                overlapping.append(Match(text, found))
    examples = list({match.shared: match for match in same + overlapping}.values())
    return Contamination(evaluation, kind, len(texts), compared, len(same), len(overlapping), examples[:EXAMPLES])


def ngrams(text: str, length: int) -> Iterator[str]:
    """Yield all runs of `length` words of a normalised text."""
    words = text.split()
    for start in range(len(words) - length + 1):
        yield " ".join(words[start : start + length])


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
