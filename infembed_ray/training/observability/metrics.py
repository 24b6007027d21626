"""Measures and anomalies of a training step, and the metrics of a run: one JSON line per step (docs/operations/monitoring.md).

Duration and memory are worker 0's: workers wait for each other in every step, and ZeRO divides memory evenly.
"""

import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infembed_ray.config.training import TrainSettings
from infembed_ray.telemetry import report
from infembed_ray.training.collectives import world
from infembed_ray.training.losses import Objective, marginal_loss
from infembed_ray.training.observability import logs
from infembed_ray.training.observability.flops import peak_flops
from infembed_ray.training.observability.logs import Event
from infembed_ray.training.observability.trackers import Trackers
from infembed_ray.training.scores import Scores

_LISTED_RECORDS = 8
"""Maximum number of records that a message lists."""
_DIGITS = 7
"""Significant digits of a logged figure, as many as fp32 has."""
_GIB = 1 << 30


class Monitor:
    """Judges the figures of every step.

    Args:
        learning_rate: Setting that a message advises to lower.
        log: Logs an event.

    Attributes:
        stopped: Why the run stops after this step, which makes no update; None while it continues.
    """

    def __init__(self, learning_rate: float, log: Callable[[Event], None]) -> None:
        self.stopped: str | None = None
        self._log = log
        self._remedy = f"lower learning_rate={learning_rate:g}, which starts the run from the beginning"
        self._without_negatives = False  # in the step before

    def check(self, step: int, what: str, value: float, records: Sequence[str] = ()) -> None:
        """Stop the run if a figure of a step, from 1, is not finite; `records` are the ids of the step's records."""
        if not math.isfinite(value):
            inspect = "inspect these records, or " if records else ""
            problem = f"{what} is {value}{_listed(records)}"
            self.stopped = f"step {step}: {problem}: stopped, nothing is published; {inspect}{self._remedy}"
            self._log(Event(step, "nonfinite", "stop", self.stopped))

    def check_negatives(self, step: int, without: float, records: Sequence[str]) -> None:
        """Warn of the first of consecutive steps all of whose rows, a share of 1, are `without` negatives."""
        repeated, self._without_negatives = self._without_negatives, without == 1.0
        if self._without_negatives and not repeated:
            problem = f"no row has a negative, so that the loss is 0 whatever the weights{_listed(records)}"
            remedy = "remove records that share their texts, or raise records_per_step or instruction_negatives"
            message = f"step {step}: {problem}: training continues; {remedy}"
            self._log(Event(step, "no_negatives", "warn", message))


def _listed(records: Sequence[str]) -> str:
    more = f" and {len(records) - _LISTED_RECORDS} more" if len(records) > _LISTED_RECORDS else ""
    return f" (records {', '.join(records[:_LISTED_RECORDS])}{more})" if records else ""


@torch.no_grad()
def measure(scores: Scores, temperature: float) -> dict[str, Tensor]:
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
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts KiB
        if self._device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self._device)
        return {
            "tokens": tokens_of_all,
            "tokens_per_second": tokens_of_all / seconds,
            "padding": 1 - tokens / slots,
            "seconds": seconds,
            "data_seconds": self._data,
            "mfu": flops / (seconds * self._peak) if self._peak else None,
            "memory_gib": memory / _GIB,
        }


def rounded(value: float) -> float:
    """Round a figure to the digits of fp32."""
    return float(f"{value:.{_DIGITS}g}")


class RunLog:
    """The metrics of a run and its trackers. Only worker 0 has one.

    Args:
        settings, directory: Settings and output of the run, whose logs have begun.
        start: Steps done in the checkpoint from which the run resumes.
        log: Logs an event.
    """

    def __init__(self, settings: TrainSettings, directory: Path, start: int, log: Callable[[Event], None]) -> None:
        self._directory = directory
        self._trackers = Trackers(settings, directory, logs.read_metrics(directory), log)
        self._start, self._records, self._tokens = start, 0, 0

    def write(self, step: int, records: int, **figures: Any) -> None:
        """Append the figures of a step of so many records; figures that are not finite become null."""
        line = {name: _plain(value) for name, value in {"step": step, **figures}.items()}
        logs.append_metrics(self._directory, line)
        self._trackers.log(line)
        self._records += records
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
