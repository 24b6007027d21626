"""What is measured in a step, and the log of a training run: one JSON line a step.

    step                  steps done with this one
    time                  when it ended, in seconds since 1970
    learning_rate         of this step
    temperature           that similarities were divided by
    loss                  of the objective, the mean over all rows of the step
    loss_V, rank_V, ...   see `measure`
    grad_norm             before clipping; null where it was no finite number, and so no update was made
    tokens                that the passes of all workers read, without padding, a shared prefix once
    tokens_per_second     of all workers together
    padding               share of the places in the passes that held no token; 0 where all is packed
    seconds               of the step, without saving states and in-training evaluation
    data_seconds          of these, until the step's texts were there as tokens
    mfu                   model FLOPs (see `flops`) / (seconds x workers x peak of the device); null: the peak is unknown
    memory_gib            most that was allocated on the device so far; on a CPU, most resident memory of the process

Clock and memory are worker 0's; workers wait for one another in every step, and ZeRO divides memory evenly.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infembed_ray.training import json_lines
from infembed_ray.training.collectives import world
from infembed_ray.training.flops import peak_flops
from infembed_ray.training.objectives import Objective, marginal_loss
from infembed_ray.training.scores import Scores

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
"""Ids of every step's records, of all workers in rank order: what was seen when."""
_DIGITS = 7  # significant ones: what fp32 has
_RSS_UNIT = 1 if sys.platform == "darwin" else 1 << 10
_GIB = 1 << 30


@torch.no_grad()
def measure(scores: Scores, temperature: float | Tensor) -> dict[str, Tensor]:
    """How well a batch is told apart, as means over its rows.

    For every contrasted variable, of the positive among its negatives: `loss_V`, the cross-entropy of that variable
    alone; `rank_V`, the rank, 1 for the first (of equals, the last); `accuracy_V`, the share of rows where it is 1. And
    `without_negatives`, the share of rows that have no negative of any variable: their loss is 0 whatever the weights.
    """
    contrasted = torch.stack([negatives.mask.any(dim=1) for negatives in scores.negatives.values()])
    measured = {
        "positive_similarity": scores.positive.mean(),
        "without_negatives": 1.0 - contrasted.any(dim=0).float().mean(),
    }
    for variable, negatives in scores.negatives.items():
        alone = Objective("uni", (variable,))
        harder = (negatives.mask & (negatives.similarities >= scores.positive.unsqueeze(1))).sum(dim=1)
        measured[f"loss_{variable}"] = marginal_loss(alone, scores.positive, {variable: negatives}, temperature)
        measured[f"rank_{variable}"] = 1.0 + harder.float().mean()
        measured[f"accuracy_{variable}"] = (harder == 0).float().mean()
    return measured


class Meter:
    """Worker 0's clock and memory during a step.

    Args:
        device, dtype: on which, and in which, the encoder computes.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()
        self._data = 0.0

    @contextmanager
    def data(self) -> Iterator[None]:
        """A block that gets texts of the step and makes tokens of them."""
        began = time.monotonic()
        yield
        self._data += time.monotonic() - began

    def end(self, slots: float, tokens: float, flops: float) -> dict[str, float | None]:
        """What the log says of a step, of which this was the work of a worker, in the mean (see `flops.Workload`)."""
        seconds = time.monotonic() - self._began
        of_all = round(tokens * world()[1])
        return {
            "tokens": of_all,
            "tokens_per_second": of_all / seconds,
            "padding": 1 - tokens / slots,
            "seconds": seconds,
            "data_seconds": self._data,
            "mfu": flops / (seconds * self._peak) if self._peak else None,
            "memory_gib": self._memory() / _GIB,
        }

    def _memory(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def rounded(value: float) -> float:
    """A figure as it is logged: to the digits that fp32 has."""
    return float(f"{value:.{_DIGITS}g}")


class MetricsLog:
    """Writes the log; lines of steps that a resumed run does again are cut first.

    Args:
        directory: of the run.
        start: steps already done in the state the run resumes from.
        name: of the log's file.
    """

    def __init__(self, directory: Path, start: int, name: str = METRICS) -> None:
        self._path = directory / name
        lines, _ = json_lines.read(self._path)
        json_lines.rewrite(self._path, (line for line in lines if line["step"] <= start))

    def write(self, **values: Any) -> dict[str, Any]:
        """Append one step; on disk at once, because the driver shows progress from it. What is not finite is null.

        Returns:
            what it says of the step.
        """
        line = {name: _plain(value) for name, value in values.items()}
        json_lines.append(self._path, line)
        return line


def _plain(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return rounded(value) if math.isfinite(value) else None


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """All whole lines so far; empty before the first step."""
    return lines_from(directory, 0)[0]


def lines_from(directory: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines from a byte of the log on, and where they end; all of them, if it was cut since."""
    return json_lines.read(directory / METRICS, offset)
