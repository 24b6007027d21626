"""The learning rate of every step: a warm-up, then one of the field's three schedules."""

from __future__ import annotations

import math

from infembed_ray.config import TrainSettings


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """The rate of step `step` (0-based) of `steps`.

    Linear warm-up to the peak; then `linear` decay to 0 (the paper's, appendix: AdamW 5e-5), half a `cosine` to 0, or
    `constant`.
    """
    warmup = int(settings.warmup_fraction * steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    share = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}
    return settings.learning_rate * share[settings.schedule]
