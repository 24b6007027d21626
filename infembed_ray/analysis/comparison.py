"""Several sets of texts side by side: how diverse each is, and what it covers (paper, section 4.2 and Figure 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from infembed_ray.analysis.coverage import Coverage, coverage
from infembed_ray.analysis.diversity import Diversity, diversity
from infembed_ray.analysis.material import KINDS
from infembed_ray.analysis.texts import TextSet, samples

Embed = Callable[[Sequence[str]], np.ndarray]
"""n texts -> (n, d) unit vectors."""


def compare(
    sets: Sequence[TextSet], most: int, seed: int, embed: Embed | None
) -> tuple[list[Diversity], list[Coverage]]:
    """Measure equal samples of all sets, kind by kind.

    Args:
        sets: each with the kinds of text it has.
        most: texts of a kind to draw from each set.
        seed: of the draws.
        embed: None leaves out what needs embeddings: APS and coverage.
    """
    diversities, coverages = [], []
    for kind in KINDS:
        drawn = samples(sets, kind, most, seed)
        vectors = {label: embed(texts) for label, texts in drawn.items()} if embed is not None else {}
        every = {each.label: each.texts[kind] for each in sets if kind in each.texts}
        diversities += [diversity(label, kind, every[label], drawn[label], vectors.get(label)) for label in drawn]
        if vectors:
            coverages.append(coverage(kind, vectors))
    return diversities, coverages
