"""Diversity and coverage of sets of texts (paper, section 4.2 and Figure 3).

Average pairwise sample similarity (APS) is the mean cosine of all pairs of embeddings; lower is more diverse.
Inter-sample n-gram frequency (INGF) is the mean of V_k / (1 + s_k) over k = 1, 2, 3: V_k distinct word k-grams, and s_k the
standard deviation of the number of texts that contain each. Higher is more diverse. The paper gives name and direction of both
but no formula. INGF grows with the number of texts, so all sets are measured on equally many.

Coverage projects the embeddings of all sets to one plane by PCA: unlike t-SNE it is deterministic, and distances have a meaning.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infembed_ray.analysis.figures import KINDS, Section
from infembed_ray.errors import InputError
from infembed_ray.records.files import raw_rows
from infembed_ray.records.tables import ALIASES, KEPT_FILE, Record
from infembed_ray.storage.places import Place

Embed = Callable[[Sequence[str]], np.ndarray]
"""n texts -> (n, d) unit vectors."""
SAMPLE = 10_000
"""Texts of each kind to draw from each set."""
ORDERS = (1, 2, 3)
"""Words per n-gram."""
GRID = 24
"""Grid cells along each axis of the plane."""
_WORD = re.compile(r"\w+")


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
    """Read the texts of InF-IR records, or of a file with columns named after the kinds of text.

    Raises:
        InputError: as `raw_rows`, or no column has texts.
    """
    file = path if path.is_file() else path / KEPT_FILE
    if not file.is_file():
        raise InputError.of(name, path, f"no {KEPT_FILE} in this directory", "give a file or a synthesis output")
    texts: dict[str, list[str]] = {kind: [] for kind in KINDS}
    columns: dict[str, None] = {}
    for row in raw_rows(file, name):
        columns.update(dict.fromkeys(row))
        for kind in KINDS:
            texts[kind] += _of_kind(kind, row)
    if not any(texts.values()):
        fault = f"no column with instructions, queries or passages (columns: {', '.join(map(str, columns))})"
        raise InputError.of(name, path, fault, "rename one to instruction, query or passage")
    return TextSet(label, {kind: of_kind for kind, of_kind in texts.items() if of_kind})


def _of_kind(kind: str, row: Mapping[str, Any]) -> list[str]:
    # An older name counts only if the newer one is absent.
    ours = (next((n for n in (c, *ALIASES.get(c, ())) if n in row), c) for c in KINDS[kind])
    values = (row.get(name) for name in dict.fromkeys([kind, *ours]))
    return [value for value in values if isinstance(value, str) and value.strip()]


def compare(sets: Sequence[TextSet], embed: Embed | None, most: int = SAMPLE) -> tuple[list[Section], list[Section]]:
    """Measure equal samples of all sets, kind by kind; return the diversity of each set, and the coverage of each kind.

    Args:
        embed: encoder; None omits what needs embeddings, APS and coverage.
        most: texts of each kind to draw from each set.
    """
    diversities, coverages = [], []
    for kind in KINDS:
        having = {each.label: each.texts[kind] for each in sets if kind in each.texts}
        size = min([most, *map(len, having.values())])
        drawn = {label: random.Random(f"0/{kind}").sample(list(texts), size) for label, texts in having.items()}
        vectors = {label: embed(texts) for label, texts in drawn.items()} if embed is not None else {}
        diversities += [diversity(label, kind, having[label], drawn[label], vectors.get(label)) for label in drawn]
        if vectors:
            coverages.append(coverage(kind, vectors))
    return diversities, coverages


def diversity(
    label: str, kind: str, texts: Sequence[str], sample: Sequence[str], embeddings: np.ndarray | None
) -> Section:
    """Measure a sample of a set's texts.

    Args:
        texts: all texts of the set, at least one.
        embeddings: (sample, d) unit vectors of the sample.

    Returns:
        Counts of the whole set; `aps` (None without an encoder, or for fewer than two texts), `ingf`, and `distinct_share`, the
        distinct n-grams / all n-grams for each of ORDERS, of the sample.
    """
    frequencies = [ngram_frequencies(sample, order) for order in ORDERS]
    return {
        "label": label,
        "kind": kind,
        "texts": len(texts),
        "distinct": len({" ".join(text.casefold().split()) for text in texts}),
        "mean_words": sum(len(text.split()) for text in texts) / len(texts),
        "sampled": len(sample),
        "aps": None if embeddings is None else average_pairwise_similarity(embeddings),
        "ingf": inter_sample_ngram_frequency([texts_with for texts_with, _ in frequencies]),
        "distinct_share": [len(texts_with) / total if total else 1.0 for texts_with, total in frequencies],
    }


def average_pairwise_similarity(embeddings: np.ndarray) -> float | None:
    """Return the mean inner product of all pairs of rows of (n, d), in linear time and float64; None for n < 2."""
    n = len(embeddings)
    if n < 2:
        return None
    vectors = embeddings.astype(np.float64)
    total = vectors.sum(axis=0)
    return float((total @ total - np.einsum("ij,ij->", vectors, vectors)) / (n * (n - 1)))


def ngram_frequencies(texts: Sequence[str], order: int) -> tuple[Mapping[tuple[str, ...], int], int]:
    """Return n-gram of `order` words -> number of texts that contain it, and the number of all n-grams."""
    texts_with: Counter[tuple[str, ...]] = Counter()
    total = 0
    for text in texts:
        words = _WORD.findall(text.casefold())
        ngrams = list(zip(*(words[start:] for start in range(order)), strict=False))
        total += len(ngrams)
        texts_with.update(set(ngrams))
    return texts_with, total


def inter_sample_ngram_frequency(frequencies: Sequence[Mapping[tuple[str, ...], int]]) -> float:
    """Return the INGF of the n-gram frequencies of every order."""
    ratios = [len(texts_with) / (1 + np.std(list(texts_with.values()))) for texts_with in frequencies if texts_with]
    return float(sum(ratios) / len(frequencies))


def coverage(kind: str, embeddings: Mapping[str, np.ndarray]) -> Section:
    """Project the embeddings of all sets to one plane, and count the grid cells that each set occupies.

    Args:
        embeddings: label -> (n, d) vectors, with the same n for all sets.

    Returns:
        `explained`: share of the variance along each axis; `cells`: occupied grid cells; `sets`: cells and `points` in [0, 1] of each set.
    """
    points, explained = principal_plane(np.concatenate(list(embeddings.values())))
    low, high = points.min(axis=0), points.max(axis=0)
    points = (points - low) / np.where(high > low, high - low, 1.0)
    cells = (np.minimum((points * GRID).astype(int), GRID - 1) @ (GRID, 1)).reshape(len(embeddings), -1)
    sets = [
        {"label": label, "cells": len(np.unique(of_set)), "points": part.round(4).tolist()}
        for label, of_set, part in zip(embeddings, cells, np.split(points, len(embeddings)), strict=True)
    ]
    return {"kind": kind, "explained": explained, "cells": len(np.unique(cells)), "sets": sets}


def principal_plane(vectors: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Return the (n, 2) coordinates of (n, d) vectors on their principal axes, and each axis's share of the variance.

    The sign of an axis is such that its largest component in absolute value is positive.
    """
    centred = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    variances, axes = np.linalg.eigh(centred.T @ centred)  # ascending
    top = axes[:, [-1, -2]]
    top = top * np.sign(top[np.abs(top).argmax(axis=0), [0, 1]])
    shares = variances.clip(min=0.0) / (variances.sum() or 1.0)
    return centred @ top, (float(shares[-1]), float(shares[-2]))
