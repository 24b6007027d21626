"""Numbers of texts and their lengths in words, beside the paper's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infembed_ray.analysis.inputs import KINDS
from infembed_ray.records.tables import Record

PAPER_MEANS = {"instruction": 35.57, "query": 8.06, "passage": 55.2}
"""Mean words of the published InF-IR set (paper, Table 1, columns Avg. I, Avg. Q, Avg. P)."""


@dataclass(frozen=True)
class TextSizes:
    """A row of the paper's Table 1: distinct texts and mean words per text, by kind; `source` None: of all sources."""

    source: str | None
    texts: dict[str, int]
    mean_words: dict[str, float]


PAPER_SIZE = TextSizes(None, {"instruction": 77_500, "query": 77_500, "passage": 116_200}, PAPER_MEANS)
"""The published InF-IR set (paper, Table 1); its counts are rounded."""


@dataclass(frozen=True)
class Length:
    """Words per text (split at white space), in one column or in all columns of a kind (`column` None).

    `paper_mean` is the mean of the kind in the paper's set.
    """

    kind: str
    column: str | None
    mean: float
    p5: float
    p50: float
    p95: float
    paper_mean: float


def lengths(records: Sequence[Record]) -> list[Length]:
    """Measure each kind of text, all its columns together and then each column; empty without records."""
    if not records:
        return []
    measured = []
    for kind, columns in KINDS.items():
        words = {column: [len(getattr(record, column).split()) for record in records] for column in columns}
        measured.append(_length(kind, None, [n for of_column in words.values() for n in of_column]))
        measured += [_length(kind, column, of_column) for column, of_column in words.items()]
    return measured


def sizes(records: Sequence[Record]) -> list[TextSizes]:
    """Return the size of all records and, if they have several, of each source, the largest first."""
    by_source: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_source[record.source].append(record)
    several = sorted(by_source, key=lambda source: -len(by_source[source])) if len(by_source) > 1 else []
    parts = [(None, records), *((source, by_source[source]) for source in several)]
    return [_size(source, part) for source, part in parts if part]


def _size(source: str | None, records: Sequence[Record]) -> TextSizes:
    texts = {kind: [getattr(record, column) for record in records for column in KINDS[kind]] for kind in KINDS}
    means = {kind: float(np.mean([len(text.split()) for text in of_kind])) for kind, of_kind in texts.items()}
    return TextSizes(source, {kind: len(set(of_kind)) for kind, of_kind in texts.items()}, means)


def _length(kind: str, column: str | None, words: list[int]) -> Length:
    p5, p50, p95 = (float(p) for p in np.percentile(words, (5, 50, 95)))
    return Length(kind, column, float(np.mean(words)), p5, p50, p95, PAPER_MEANS[kind])
