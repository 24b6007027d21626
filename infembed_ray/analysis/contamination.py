"""Contamination: texts of evaluation sets in the records, by string matching (paper, section 6).

A text matches an evaluation set if it shares a run of NGRAM words with a text of the set, or, if it is shorter, equals one; case,
punctuation and white space are ignored. The n-grams of an evaluation set are in memory as hashes, 8 bytes each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from infembed_ray.analysis.figures import Section
from infembed_ray.analysis.inputs import KINDS
from infembed_ray.analysis.words import hashes, normalised
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.records.tables import Record
from infembed_ray.storage.places import Place, listing

NGRAM = 13
"""Consecutive words that count as an overlap, as in the decontamination of GPT-3 (arXiv 2005.14165, appendix C)."""
EXAMPLES = 5
_AT_ONCE = 1 << 12
"""Texts of an evaluation set whose hashes are joined at once."""
_ID = re.compile(r"(^|[_-])id$", re.IGNORECASE)


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
            if len(waiting) == _AT_ONCE:
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
        InputError: as `tables.raw_rows`, or the directory is empty.
    """
    names = [n for n in sorted(listing(path)) if not tables.hidden(PurePosixPath(n)) and not n.endswith("README.md")]
    if not names:
        raise InputError.of(name, path, "no files in this directory", "give those of an evaluation set")
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
