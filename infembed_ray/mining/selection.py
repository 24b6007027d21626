"""Which of the passages that a search found are hard negatives: pure functions of texts and scores."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infembed_ray.config.mining import MineSettings


@dataclass(frozen=True)
class Selected:
    """Negatives of a tuple.

    Attributes:
        places: Their places among the candidates, ascending.
        too_similar: Number of candidates that are left out as false negatives.
    """

    places: list[int]
    too_similar: int


def bound(positive: float, settings: MineSettings) -> float:
    """Return the score from which a passage is a false negative (positive-aware mining, arXiv 2407.15831).

    Args:
        positive: Score of the positive: a cosine, or a probability.
        settings: Share and margin; the stricter one decides. Below 0, the share counts from the positive downwards, too.
    """
    return positive - max(settings.margin, (1 - settings.max_share) * abs(positive))


def select(settings: MineSettings, identity: str, positives: Sequence[float], candidates: Sequence[float]) -> Selected:
    """Select the negatives of a tuple.

    Args:
        identity: Id of the tuple, which seeds `sample=random`.
        positives: Scores of its positives; the lowest one sets the bound.
    """
    allowed = np.flatnonzero(np.asarray(candidates) < bound(min(positives), settings)).tolist()
    if settings.sample == "random":
        chosen = random.Random(f"{settings.seed}/{identity}").sample(allowed, min(settings.negatives, len(allowed)))
    else:
        chosen = allowed[: settings.negatives]
    return Selected(sorted(chosen), len(candidates) - len(allowed))
