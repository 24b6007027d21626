"""Measures of a training step, and the log of a run: one JSON line per step.

    step                  steps done, including this one
    time                  end of the step, in seconds since 1970
    learning_rate         learning rate of the step
    temperature           temperature of the similarities
    loss                  the objective, averaged over all rows of the step
    loss_V, rank_V, ...   see `measure`
    grad_norm             gradient norm before clipping; null if it was not finite, so that the update was skipped
    tokens                tokens in the passes of all workers, without padding; a shared prefix counts once
    tokens_per_second     of all workers together
    padding               share of the slots in the passes that hold no token; 0 if everything is packed
    seconds               duration of the step, without checkpoints and validation
    data_seconds          part of `seconds` spent waiting for data, which a thread prepares
    mfu                   model FLOPs (see `flops`) / (seconds x workers x peak of the device); null if the peak is unknown
    memory_gib            peak of allocated device memory so far; on CPU, peak resident memory of the process

Duration and memory are worker 0's: workers wait for each other in every step, and ZeRO divides memory evenly.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infembed_ray.config.training import TrainSettings
from infembed_ray.telemetry import report
from infembed_ray.training.collectives import world
from infembed_ray.training.losses import Objective, marginal_loss
from infembed_ray.training.observability import json_lines
from infembed_ray.training.observability.events import EventLog
from infembed_ray.training.observability.flops import peak_flops
from infembed_ray.training.observability.trackers import Trackers
from infembed_ray.training.scores import Scores

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
"""Log of the records of every step: their ids, of all workers in rank order."""
_DIGITS = 7
"""Significant digits of a logged figure, as many as fp32 has."""
_RSS_UNIT = 1 if sys.platform == "darwin" else 1 << 10
_GIB = 1 << 30


@torch.no_grad()
def measure(scores: Scores, temperature: float | Tensor) -> dict[str, Tensor]:
    """Measure how well the positives of a batch are ranked, averaged over its rows.

    For every variable V: `loss_V`, the cross-entropy of that variable alone; `rank_V`, the rank of the positive among its
    negatives, from 1, the last among equals; `accuracy_V`, the share of rows where that rank is 1. `without_negatives` is
    the share of rows that have no negative of any variable, so that their loss is 0 whatever the weights.
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
    """Measures duration and memory of a step.

    Args:
        device, dtype: Device and precision of the encoder.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._began = time.monotonic()
        self._data = 0.0

    @contextmanager
    def data(self) -> Iterator[None]:
        """Count the block as `data_seconds`."""
        began = time.monotonic()
        yield
        self._data += time.monotonic() - began

    def end(self, slots: float, tokens: float, flops: float) -> dict[str, float | None]:
        """Return the figures of a step; the arguments are its work, averaged over workers (see `flops.Workload`)."""
        seconds = time.monotonic() - self._began
        tokens_of_all = round(tokens * world()[1])
        return {
            "tokens": tokens_of_all,
            "tokens_per_second": tokens_of_all / seconds,
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
    """Round a figure to the digits of fp32."""
    return float(f"{value:.{_DIGITS}g}")


class StepLog:
    """A log of one line per step. A resumed run first removes the lines of the steps that it repeats.

    Args:
        directory: Output of the run.
        start: Steps done in the checkpoint from which the run resumes.
        name: File name of the log.
    """

    def __init__(self, directory: Path, start: int, name: str = METRICS) -> None:
        self._path = directory / name
        lines, _ = json_lines.read(self._path)
        json_lines.rewrite(self._path, (line for line in lines if line["step"] <= start))

    def write(self, **values: Any) -> dict[str, Any]:
        """Append a step and return its line; figures that are not finite become null.

        The line is on disk when this returns, because the driver shows progress from it.
        """
        line = {name: _plain(value) for name, value in values.items()}
        json_lines.append(self._path, line)
        return line


class RunLog:
    """All logs of the steps of a run: figures, records and trackers. Only worker 0 has one; see `StepLog`."""

    def __init__(self, settings: TrainSettings, directory: Path, start: int, events: EventLog) -> None:
        self._metrics = StepLog(directory, start)
        self._samples = StepLog(directory, start, SAMPLES)
        self._trackers = Trackers(settings, directory, read_metrics(directory), events)
        self._start, self._records, self._tokens = start, 0, 0

    def write(self, step: int, records: Sequence[str], **figures: Any) -> None:
        """Append one step and the ids of its records."""
        self._samples.write(step=step, records=records)
        line = self._metrics.write(step=step, **figures)
        self._trackers.log(line)
        self._records += len(records)
        self._tokens += line["tokens"]
        report(
            training_steps_total=step - self._start,
            training_records_total=self._records,
            training_tokens_total=self._tokens,
            training_step_number=step,
            training_loss=line["loss"],
            training_grad_norm=line["grad_norm"],
            training_learning_rate=line["learning_rate"],
            training_step_seconds=line["seconds"],
            training_memory_bytes=line["memory_gib"] * _GIB,
        )

    def close(self) -> None:
        """Close the trackers."""
        self._trackers.close()


def _plain(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return rounded(value) if math.isfinite(value) else None


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Read all complete lines of the log; empty before the first step."""
    return read_metrics_from(directory, 0)[0]


def read_metrics_from(directory: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Read the complete lines of the log from a byte offset, and return them with their end; see `json_lines.read`."""
    return json_lines.read(directory / METRICS, offset)
