"""Which part of the embedding space the texts of several sets cover (paper, Figure 3a): a projection to the plane.

Principal components instead of t-SNE: linear, so equal for equal data, and distances in the plane mean something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

GRID = 24
"""Cells of the plane along each axis, for counting."""


@dataclass(frozen=True)
class Covered:
    """One set in the plane."""

    label: str
    points: list[tuple[float, float]]
    """Within [0, 1] on both axes."""
    cells: int
    """Cells of the grid that hold a point of this set."""


@dataclass(frozen=True)
class Coverage:
    """The texts of one kind in all sets, in the plane of their two principal components."""

    kind: str
    explained: tuple[float, float]
    """Share of the variance of all embeddings along each axis."""
    cells: int
    """Cells of the grid that hold a point of any set."""
    sets: list[Covered]


def coverage(kind: str, embeddings: Mapping[str, np.ndarray]) -> Coverage:
    """Project the embeddings of all sets together; equally many of each should be given.

    Args:
        kind: of the texts.
        embeddings: label -> (n, d) vectors.
    """
    points, explained = principal_plane(np.concatenate(list(embeddings.values())))
    low, high = points.min(axis=0), points.max(axis=0)
    points = (points - low) / np.where(high > low, high - low, 1.0)
    ends = np.cumsum([len(vectors) for vectors in embeddings.values()])
    cells = [_cells(of_set) for of_set in np.split(points, ends[:-1])]
    return Coverage(
        kind=kind,
        explained=explained,
        cells=len(set().union(*cells)),
        sets=[
            Covered(label, [(round(float(x), 4), round(float(y), 4)) for x, y in of_set], len(occupied))
            for label, of_set, occupied in zip(embeddings, np.split(points, ends[:-1]), cells, strict=True)
        ],
    )


def principal_plane(vectors: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """(n, 2) coordinates of (n, d) vectors along their two principal axes, and each axis's share of the variance.

    An axis points to where its largest component in absolute value is positive, so that equal data give equal plots.
    """
    centred = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    variances, axes = np.linalg.eigh(centred.T @ centred)  # ascending
    top = axes[:, [-1, -2]]
    top = top * np.sign(top[np.abs(top).argmax(axis=0), [0, 1]])
    total = float(variances.sum()) or 1.0
    return centred @ top, (float(variances[-1]) / total, max(float(variances[-2]), 0.0) / total)


def _cells(points: np.ndarray) -> set[int]:
    columns, rows = np.minimum((points * GRID).astype(int), GRID - 1).T
    return set((columns * GRID + rows).tolist())
