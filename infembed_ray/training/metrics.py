"""What is measured in a step, and the log of a training run: one JSON line a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infembed_ray.training.objectives import Objective, marginal_loss
from infembed_ray.training.scores import Scores

METRICS = "metrics.jsonl"
_DIGITS = 7  # significant ones: what fp32 has


@torch.no_grad()
def measure(scores: Scores, temperature: float | Tensor) -> dict[str, Tensor]:
    """How well a batch is told apart, as means over its rows.

    For every contrasted variable, of the positive among its negatives: `loss_V`, the cross-entropy of that variable
    alone; `rank_V`, the rank, 1 for the first (of equals, the last); `accuracy_V`, the share of rows where it is 1.
    """
    measured = {"positive_similarity": scores.positive.mean()}
    for variable, negatives in scores.negatives.items():
        alone = Objective("uni", (variable,))
        harder = (negatives.mask & (negatives.similarities >= scores.positive.unsqueeze(1))).sum(dim=1)
        measured[f"loss_{variable}"] = marginal_loss(alone, scores.positive, {variable: negatives}, temperature)
        measured[f"rank_{variable}"] = 1.0 + harder.float().mean()
        measured[f"accuracy_{variable}"] = (harder == 0).float().mean()
    return measured


class MetricsLog:
    """Writes the log; lines of steps that a resumed run does again are cut first.

    Args:
        directory: of the run.
        start: steps already done in the state the run resumes from.
    """

    def __init__(self, directory: Path, start: int) -> None:
        path = directory / METRICS
        kept = path.read_text(encoding="utf-8").splitlines()[:start] if path.exists() else []
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._stream = path.open("a", encoding="utf-8", buffering=1)

    def write(self, **values: Any) -> None:
        """Append one step; on disk at once, because the driver shows progress from it."""
        rounded = {k: float(f"{v:.{_DIGITS}g}") if isinstance(v, float) else v for k, v in values.items()}
        self._stream.write(json.dumps(rounded) + "\n")


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """All whole lines so far; empty before the first step."""
    path = directory / METRICS
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
