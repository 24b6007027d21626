"""Lengths of the texts in words, beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infembed_ray.analysis.inputs import KINDS
from infembed_ray.records import Record

PAPER_MEANS = {"instruction": 35.57, "query": 8.06, "passage": 55.2}
"""Mean words of the published InF-IR set (paper, Table 1, columns Avg. I, Avg. Q, Avg. P)."""


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
    found = []
    for kind, columns in KINDS.items():
        words = {column: [len(getattr(record, column).split()) for record in records] for column in columns}
        found.append(_length(kind, None, [n for of_column in words.values() for n in of_column]))
        found += [_length(kind, column, of_column) for column, of_column in words.items()]
    return found


def _length(kind: str, column: str | None, words: list[int]) -> Length:
    p5, p50, p95 = (float(p) for p in np.percentile(words, (5, 50, 95)))
    return Length(kind, column, float(np.mean(words)), p5, p50, p95, PAPER_MEANS[kind])
