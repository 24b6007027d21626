"""Choice of seeds that cover the set: greedy facility location over embeddings.

The seeds are divided at random into as many groups as seeds are wanted. Of each group in turn, the seed is chosen that most
increases the sum, over all seeds, of the similarity to the nearest chosen one. Large sets are represented in that sum by a
sample. Embeddings go through a file, so memory does not grow with the seeds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

Embed = Callable[[Sequence[str]], np.ndarray]
"""n texts -> (n, d) unit vectors."""

REPRESENTED_BY = 8192
"""Most seeds that represent all of them in the sum."""
AT_ONCE = 1024
"""Texts that are embedded, and seeds of a group that are compared, at once."""


def select(texts: Iterable[str], wanted: int, embed: Embed, seed: int) -> np.ndarray:
    """Choose texts that cover all of them; equal embeddings give an equal choice.

    Args:
        texts: iterated once.
        seed: of the groups and the sample.

    Returns:
        Positions of the chosen texts, in order: `wanted` of them, or all if there are fewer.
    """
    with tempfile.TemporaryFile() as file:
        total, dimension, rest = 0, 0, iter(texts)
        while block := list(islice(rest, AT_ONCE)):
            vectors = embed(block).astype(np.float32)
            vectors.tofile(file)
            total, dimension = total + len(vectors), vectors.shape[1]
        if total <= wanted:
            return np.arange(total)
        file.flush()
        every = np.memmap(file, dtype=np.float32, mode="r", shape=(total, dimension))
        rng = np.random.default_rng(seed)
        sample = every[np.sort(rng.choice(total, min(total, REPRESENTED_BY), replace=False))]
        nearest = np.full(len(sample), -1.0, dtype=np.float32)
        chosen = []
        for group in np.array_split(rng.permutation(total), wanted):
            parts = [group[start : start + AT_ONCE] for start in range(0, len(group), AT_ONCE)]
            gains = [np.maximum(every[part] @ sample.T - nearest, 0).sum(axis=1) for part in parts]
            chosen.append(group[np.concatenate(gains).argmax()])
            nearest = np.maximum(nearest, sample @ every[chosen[-1]])
        return np.sort(chosen)
