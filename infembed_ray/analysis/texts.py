"""Sets of texts, by kind, and their comparison: diversity and coverage (paper, section 4.2 and Figure 3)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infembed_ray.analysis.coverage import Coverage, coverage
from infembed_ray.analysis.diversity import Diversity, diversity
from infembed_ray.analysis.inputs import KINDS
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.records.tables import ALIASES, Record
from infembed_ray.storage.places import Place

Embed = Callable[[Sequence[str]], np.ndarray]
"""n texts -> (n, d) unit vectors."""
SAMPLE = 10_000
"""Texts of each kind to draw from each set for diversity and coverage."""


@dataclass(frozen=True)
class TextSet:
    """A named set of texts: kind -> texts of all its columns, without empty kinds."""

    label: str
    texts: Mapping[str, Sequence[str]]


def from_records(label: str, rows: Sequence[Record]) -> TextSet:
    """Collect the positive and negative texts of InF-IR records."""
    texts = {kind: [getattr(row, column) for row in rows for column in columns] for kind, columns in KINDS.items()}
    return TextSet(label, {kind: of_kind for kind, of_kind in texts.items() if of_kind})


def read(label: str, path: Place, name: str) -> TextSet:
    """Read the texts of another set.

    Args:
        path: InF-IR records, or a file with columns named after the kinds of text.

    Raises:
        InputError: as `tables.raw_rows`, or no column has texts.
    """
    file = path if path.is_file() else path / tables.KEPT_FILE
    if not file.is_file():
        raise InputError(f"{name}={path}: no {tables.KEPT_FILE} in this directory; give a file or a synthesis output")
    texts: dict[str, list[str]] = {kind: [] for kind in KINDS}
    columns: dict[str, None] = {}
    for row in tables.raw_rows(file, name):
        columns.update(dict.fromkeys(row))
        for kind in KINDS:
            texts[kind] += _of_kind(kind, row)
    with_texts = {kind: of_kind for kind, of_kind in texts.items() if of_kind}
    if not with_texts:
        raise InputError(
            f"{name}={path}: no column with instructions, queries or passages (columns: {', '.join(map(str, columns))}); "
            "rename one to instruction, query or passage"
        )
    return TextSet(label, with_texts)


def _of_kind(kind: str, row: Mapping[str, Any]) -> list[str]:
    # An older name counts only if the newer one is absent.
    ours = (next((n for n in (c, *ALIASES.get(c, ())) if n in row), c) for c in KINDS[kind])
    values = (row.get(name) for name in dict.fromkeys([kind, *ours]))
    return [value for value in values if isinstance(value, str) and value.strip()]


def samples(sets: Sequence[TextSet], kind: str, most: int) -> dict[str, list[str]]:
    """Draw equally many texts of a kind from each set that has the kind; return label -> texts.

    Measures of diversity depend on the number of texts, so only equal samples are comparable.
    """
    having = [each for each in sets if kind in each.texts]
    size = min([most, *(len(each.texts[kind]) for each in having)])
    return {each.label: random.Random(f"0/{kind}").sample(list(each.texts[kind]), size) for each in having}


def compare(sets: Sequence[TextSet], most: int, embed: Embed | None) -> tuple[list[Diversity], list[Coverage]]:
    """Measure equal samples of all sets, kind by kind.

    Args:
        most: texts of each kind to draw from each set.
        embed: encoder; None omits what needs embeddings, APS and coverage.
    """
    diversities, coverages = [], []
    for kind in KINDS:
        drawn = samples(sets, kind, most)
        vectors = {label: embed(texts) for label, texts in drawn.items()} if embed is not None else {}
        every = {each.label: each.texts[kind] for each in sets if kind in each.texts}
        diversities += [diversity(label, kind, every[label], drawn[label], vectors.get(label)) for label in drawn]
        if vectors:
            coverages.append(coverage(kind, vectors))
    return diversities, coverages
