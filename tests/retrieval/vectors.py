"""Vectors for the tests of this folder."""

import numpy as np


def unit_vectors(n: int, d: int, seed: int = 0) -> np.ndarray:
    """(n, d) float32, uniform on the sphere."""
    x = np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def clustered_vectors(n: int, d: int, clusters: int = 200) -> np.ndarray:
    """(n, d) float32 unit vectors near few centres, as embeddings of real text are and uniform noise is not."""
    rng = np.random.default_rng(0)
    x = unit_vectors(clusters, d)[rng.integers(clusters, size=n)] + 0.05 * rng.standard_normal((n, d))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
