"""Diversity of a set of texts (paper, section 4.2 and Figure 3b).

Average pairwise sample similarity (APS) is the mean cosine of all pairs of embeddings; lower is more diverse.
Inter-sample n-gram frequency (INGF) measures how n-grams are spread over the texts; higher is more diverse. The paper
gives name, direction and origin of both (Mishra et al., 2020) but no formula, so the formulas are ours.

APS of n unit vectors e_i is the mean of e_i . e_j over the n (n - 1) / 2 pairs i < j, computed in linear time by
|sum_i e_i|^2 = n + 2 sum_{i<j} e_i . e_j.

INGF is the mean of V_k / (1 + s_k) over k = 1, 2, 3. V_k is the number of distinct word k-grams, and s_k the standard
deviation, over these k-grams, of the number of texts that contain each. Many distinct k-grams make INGF large; k-grams
that many texts repeat make it small. INGF grows with the number of texts, so compare it at equal numbers only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

ORDERS = (1, 2, 3)
"""Words per n-gram."""

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Diversity:
    """Diversity of the texts of one kind in one set.

    Attributes:
        texts, distinct, mean_words: of the whole set.
        sampled: number of sampled texts, the same for all sets of a report.
        aps: None without an encoder, or for fewer than two texts.
        distinct_share: distinct n-grams / all n-grams, for each of ORDERS.
    """

    label: str
    kind: str
    texts: int
    distinct: int
    mean_words: float
    sampled: int
    aps: float | None
    ingf: float
    distinct_share: list[float]


def diversity(
    label: str, kind: str, texts: Sequence[str], sample: Sequence[str], embeddings: np.ndarray | None
) -> Diversity:
    """Measure a sample of a set's texts.

    Args:
        texts: all texts of the set, at least one.
        embeddings: (sample, d) unit vectors of the sample.
    """
    frequencies = [ngram_frequencies(sample, order) for order in ORDERS]
    return Diversity(
        label=label,
        kind=kind,
        texts=len(texts),
        distinct=len({" ".join(text.casefold().split()) for text in texts}),
        mean_words=sum(len(text.split()) for text in texts) / len(texts),
        sampled=len(sample),
        aps=None if embeddings is None else average_pairwise_similarity(embeddings),
        ingf=inter_sample_ngram_frequency([texts_with for texts_with, _ in frequencies]),
        distinct_share=[len(texts_with) / total if total else 1.0 for texts_with, total in frequencies],
    )


def average_pairwise_similarity(embeddings: np.ndarray) -> float | None:
    """Return the mean inner product of all pairs of rows of (n, d), in float64; None for n < 2."""
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
