"""Are texts of an evaluation in the records (paper, section 6: string matching)?

Two texts match if they are equal, or share some words in a row, once case, punctuation and white space are gone. Hashes
of the records' n-grams are held in memory; an evaluation of any size streams past them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from infembed_ray import records

EXAMPLES = 5
_ID = re.compile(r"(^|[_-])id$", re.IGNORECASE)
_NOT_WORDS = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class Match:
    """One text of the records and what it shares with the evaluation."""

    text: str
    shared: str
    """All of it, or the first n-gram they share; normalised."""


@dataclass(frozen=True)
class Contamination:
    """Of the records' texts of one kind by one evaluation."""

    evaluation: str
    kind: str
    texts: int
    """Of the records."""
    compared: int
    """Of the evaluation, of whatever kind."""
    equal: int
    """Texts of the records that are equal to one of the evaluation's."""
    overlapping: int
    """Others that share an n-gram with one."""
    examples: list[Match]
    """Each with something else in common."""


def read(path: Path, name: str) -> Iterator[str]:
    """All strings of an evaluation's file but ids, whatever their columns; the files of a directory one after another.

    Raises:
        InputError: as `records.raw_rows`.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        for row in records.raw_rows(file, name):
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
    """Compare the texts of an evaluation with those of the records.

    Args:
        evaluation: its name.
        theirs: its texts, read once.
        ours: kind -> the records' texts.
        length: of the n-grams, in words.
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


def normalised(text: str) -> str:
    """Words in lower case with single blanks between; compatibility forms of characters are one."""
    return _NOT_WORDS.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip()


def ngrams(text: str, length: int) -> Iterator[str]:
    """All runs of `length` words of a normalised text; none where it is shorter."""
    words = text.split()
    for start in range(len(words) - length + 1):
        yield " ".join(words[start : start + length])


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
