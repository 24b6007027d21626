"""The report of a training run as one self-contained HTML file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from infembed_ray.config.base import Settings
from infembed_ray.config.training import TrainSettings
from infembed_ray.reporting import page
from infembed_ray.reporting.charts import Series
from infembed_ray.training.observability.logs import Event, read_events, read_metrics
from infembed_ray.training.validation import EXPORTED

REPORT = "report.html"
MAX_EVENTS = 50
"""Listed events; the report gives the number of the others."""

LogLine = Mapping[str, Any]
"""A step of the metrics."""


def write(directory: Path, settings: TrainSettings, records: int, steps: int) -> None:
    """Write the report of the run in `directory` beside its logs; arguments as for `render`."""
    exported = directory / EXPORTED
    after = json.loads(exported.read_text(encoding="utf-8")) if exported.exists() else None
    html = render(settings, read_metrics(directory), read_events(directory), records, steps, after)
    (directory / REPORT).write_text(html, encoding="utf-8")


def render(
    settings: TrainSettings,
    metrics: Sequence[LogLine],
    events: Sequence[Event],
    records: int,
    steps: int,
    exported: Mapping[str, Any] | None = None,
) -> str:
    """Render the report of a finished or unfinished run; equal arguments give equal HTML.

    Args:
        settings: Settings of the run.
        metrics: Its metrics, one line per step.
        events: Its events, in order.
        records: Number of training records.
        steps: Planned steps.
        exported: The `step` whose model was exported, and its validation `score`; None for an unfinished run.
    """
    return page.render(
        "infembed_ray.training.observability",
        REPORT,
        settings=settings,
        changed=list(changed(settings)),
        summary=RunTotals.from_log(metrics, events),
        plots=list(_plots(metrics, events)),
        window=window_of(len(metrics)),
        last_step=max(metrics[-1]["step"], 2) if metrics else 2,
        events=events,
        max_events=MAX_EVENTS,
        records=records,
        steps=steps,
        exported=exported,
    )


def changed(settings: Settings, within: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and value of the settings that differ from their defaults; nested names have dots."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value == field.default:
            continue
        if isinstance(value, Settings):
            yield from list(changed(value, f"{within}{name}.")) or [(f"{within}{name}", "{}")]
        else:
            yield f"{within}{name}", ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class RunTotals:
    """Totals of a run: finished steps, tokens of all workers without padding, seconds in steps, and resumed attempts.

    `elapsed` includes saving, validation and restarts; `padding` is a share of the tokens in the passes, and `data` of the
    time in steps; `mfu` is weighted by time, None without a known peak.
    """

    done: int
    tokens: int
    seconds: float
    elapsed: float
    padding: float
    data: float
    mfu: float | None
    memory_gib: float
    resumed: int

    @classmethod
    def from_log(cls, metrics: Sequence[LogLine], events: Sequence[Event]) -> RunTotals | None:
        """Add up the metrics; None before the first step."""
        if not metrics:
            return None
        seconds = sum(line["seconds"] for line in metrics)
        tokens = sum(line["tokens"] for line in metrics)
        measured = all(line["mfu"] is not None for line in metrics)
        return cls(
            done=len(metrics),
            tokens=tokens,
            seconds=seconds,
            elapsed=metrics[-1]["time"] - metrics[0]["time"] + metrics[0]["seconds"],
            padding=1 - tokens / sum(line["tokens"] / (1 - line["padding"]) for line in metrics),
            data=sum(line["data_seconds"] for line in metrics) / seconds,
            mfu=sum(line["mfu"] * line["seconds"] for line in metrics) / seconds if measured else None,
            memory_gib=max(line["memory_gib"] for line in metrics),
            resumed=sum(event.kind == "resumed" for event in events),
        )


_VARIABLES = {"P": "passages", "I": "instructions", "IQ": "instruction and query", "PIQ": "all three at once"}
"""Contrasted variable -> its name in a legend."""


class _Chart(NamedTuple):
    """A chart over steps: its title, metric -> name in the legend, factor of the values, and whether to smooth them."""

    title: str
    lines: Mapping[str, str]
    scale: float = 1
    smooth: bool = True


_CHARTS = (
    _Chart("Loss", {"loss": "objective"} | {f"loss_{v}": name for v, name in _VARIABLES.items()}),
    _Chart("Validation", {"validation_p_mrr": "p-MRR", "validation_ndcg_at_10": "nDCG@10"}, smooth=False),
    _Chart("Positive ranked first (% of rows)", {f"accuracy_{v}": name for v, name in _VARIABLES.items()}, 100),
    _Chart("Mean rank of the positive", {f"rank_{v}": name for v, name in _VARIABLES.items()}),
    _Chart("Cosine similarity of the positive", {"positive_similarity": "positive"}),
    _Chart("Gradient norm before clipping", {"grad_norm": "norm"}),
    _Chart("Learning rate", {"learning_rate": "learning rate"}, smooth=False),
    _Chart("Tokens per second", {"tokens_per_second": "tokens"}),
    _Chart("Model FLOPs utilisation (%)", {"mfu": "utilisation"}, 100),
    _Chart("Peak memory (GiB)", {"memory_gib": "memory"}, smooth=False),
    _Chart("Seconds per step", {"seconds": "whole step", "data_seconds": "waiting for data"}),
)


class Plot(NamedTuple):
    """A chart with its series, and (step, action) of the events in it."""

    title: str
    series: Sequence[Series]
    events: Sequence[tuple[float, str]]


def window_of(steps: int) -> int:
    """Return the steps per moving average: the odd number near the square root; 1, no smoothing, below 10 steps."""
    return 2 * round(math.sqrt(steps) / 2) + 1 if steps >= 10 else 1


def _plots(metrics: Sequence[LogLine], events: Sequence[Event]) -> Iterator[Plot]:
    last = metrics[-1]["step"] if metrics else 0
    marks = [(event.step, event.action) for event in events if event.action != "note" and event.step <= last]
    for chart in _CHARTS:
        window = window_of(len(metrics)) if chart.smooth else 1
        series = []
        for metric, name in chart.lines.items():
            points = [(line["step"], chart.scale * line[metric]) for line in metrics if line.get(metric) is not None]
            series += [Series(name, points, window=window)] if points else []
        if series:
            yield Plot(chart.title, series, marks if chart.title == "Loss" else [])
