"""Coverage of the embedding space by several sets of texts (paper, Figure 3a), projected to a plane.

The projection is PCA instead of t-SNE: it is deterministic, and distances in the plane have a meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

GRID = 24
"""Grid cells along each axis."""


@dataclass(frozen=True)
class CoveredSet:
    """A set in the plane: its points, within [0, 1] on both axes, and the number of grid cells with a point."""

    label: str
    points: list[tuple[float, float]]
    cells: int


@dataclass(frozen=True)
class Coverage:
    """The texts of one kind in the plane of their two principal components.

    Attributes:
        explained: share of the variance along each axis.
        cells: number of grid cells with a point of any set.
    """

    kind: str
    explained: tuple[float, float]
    cells: int
    sets: list[CoveredSet]


def coverage(kind: str, embeddings: Mapping[str, np.ndarray]) -> Coverage:
    """Project the embeddings of all sets to one plane.

    Args:
        embeddings: label -> (n, d) vectors, with the same n for all sets.
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
            CoveredSet(label, [(round(float(x), 4), round(float(y), 4)) for x, y in of_set], len(occupied))
            for label, of_set, occupied in zip(embeddings, np.split(points, ends[:-1]), cells, strict=True)
        ],
    )


def principal_plane(vectors: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Return the (n, 2) coordinates of (n, d) vectors on their principal axes, and each axis's share of the variance.

    The sign of an axis is such that its largest component in absolute value is positive.
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
