"""The report of a training run as one self-contained HTML file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infembed_ray.config.base import Settings
from infembed_ray.config.training import TrainSettings
from infembed_ray.reporting import page
from infembed_ray.reporting.charts import Point, Series
from infembed_ray.training.observability.events import Event, read_events
from infembed_ray.training.observability.metrics import read_metrics
from infembed_ray.training.validation import EXPORTED

REPORT = "report.html"
MAX_EVENTS = 50
"""Listed events; the report gives the number of the others."""

LogLine = Mapping[str, Any]
"""A step of the metrics log."""


def write(directory: Path, settings: TrainSettings, records: int, steps: int) -> None:
    """Write the report of the run in `directory` beside its log; arguments as for `render`."""
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
        settings: settings of the run.
        metrics: its log, one line per step (see `metrics`).
        events: its events, in order.
        records: number of training records.
        steps: planned steps.
        exported: the `step` whose model was exported, and its validation `score`; None for an unfinished run.
    """
    return page.render(
        "infembed_ray.training.observability",
        REPORT,
        settings=settings,
        changed=list(changed(settings)),
        summary=RunTotals.from_log(metrics, events),
        why_no_mfu="the peak of this GPU is unknown" if settings.gpus_per_worker else "no GPU",
        plots=list(_plots(metrics, events)),
        window=window_of(len(metrics)),
        last_step=max(metrics[-1]["step"], 2) if metrics else 2,
        ranges=dict(_ranges(metrics)),
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
    """Totals of a run.

    Attributes:
        done: finished steps.
        skipped: finished steps without an optimizer update.
        tokens: tokens read by all workers, without padding.
        seconds: time in steps.
        elapsed: seconds from the start of the first step to the end of the last, with saving, validation and restarts.
        padding: share of the tokens in the forward passes that were padding.
        data: share of the time in steps spent on loading and tokenising.
        mfu: model FLOPs utilisation, weighted by time; None without a known peak.
        memory_gib: peak memory of any step.
        resumed: number of restarts from a saved state.
    """

    done: int
    skipped: int
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
        """Add up a log; None before the first step."""
        if not metrics:
            return None
        seconds = sum(line["seconds"] for line in metrics)
        tokens = sum(line["tokens"] for line in metrics)
        known = all(line["mfu"] is not None for line in metrics)
        return cls(
            done=len(metrics),
            skipped=sum(line["grad_norm"] is None for line in metrics),
            tokens=tokens,
            seconds=seconds,
            elapsed=metrics[-1]["time"] - metrics[0]["time"] + metrics[0]["seconds"],
            padding=1 - tokens / sum(line["tokens"] / (1 - line["padding"]) for line in metrics),
            data=sum(line["data_seconds"] for line in metrics) / seconds,
            mfu=sum(line["mfu"] * line["seconds"] for line in metrics) / seconds if known else None,
            memory_gib=max(line["memory_gib"] for line in metrics),
            resumed=sum(event.kind == "resumed" for event in events),
        )


_VARIABLES = {"P": "passages", "I": "instructions", "IQ": "instruction and query", "PIQ": "all three at once"}
"""Contrasted variable -> its name in a legend."""


def _of_variables(measure: str) -> dict[str, str]:
    return {f"{measure}_{variable}": name for variable, name in _VARIABLES.items()}


@dataclass(frozen=True)
class _Chart:
    """A chart over steps.

    Attributes:
        title: with the unit.
        lines: metric -> its name in the legend.
        scale: factor of the displayed values.
        smooth: draw moving averages.
        hide_constant: leave out a chart whose values are all equal.
    """

    title: str
    lines: Mapping[str, str]
    scale: float = 1
    smooth: bool = False
    hide_constant: bool = False


_CHARTS = (
    _Chart("Loss", {"loss": "objective"} | _of_variables("loss"), smooth=True),
    _Chart("Validation", {"validation_p_mrr": "p-MRR", "validation_ndcg_at_10": "nDCG@10"}),
    _Chart("Positive ranked first (% of rows)", _of_variables("accuracy"), 100, smooth=True),
    _Chart("Mean rank of the positive", _of_variables("rank"), smooth=True),
    _Chart("Cosine similarity of the positive", {"positive_similarity": "positive"}, smooth=True),
    _Chart("Rows without negatives (%)", {"without_negatives": "rows"}, 100, hide_constant=True),
    _Chart("Gradient norm before clipping", {"grad_norm": "norm"}, smooth=True),
    _Chart("Learning rate", {"learning_rate": "learning rate"}),
    _Chart("Temperature", {"temperature": "temperature"}, hide_constant=True),
    _Chart("Tokens per second", {"tokens_per_second": "tokens"}, smooth=True),
    _Chart("Model FLOPs utilisation (%)", {"mfu": "utilisation"}, 100, smooth=True),
    _Chart("Peak memory (GiB)", {"memory_gib": "memory"}),
    _Chart("Padding (% of tokens)", {"padding": "padding"}, 100, smooth=True, hide_constant=True),
    _Chart("Seconds per step", {"seconds": "whole step", "data_seconds": "waiting for data"}, smooth=True),
)


@dataclass(frozen=True)
class Plot:
    """A chart over steps: its series, and (step, action) of the events in it."""

    title: str
    series: Sequence[Series]
    events: Sequence[tuple[float, str]]


def window_of(steps: int) -> int:
    """Return the steps per moving average: the odd number near the square root; 1, no smoothing, below 10 steps."""
    return 2 * round(math.sqrt(steps) / 2) + 1 if steps >= 10 else 1


def _plots(metrics: Sequence[LogLine], events: Sequence[Event]) -> Iterator[Plot]:
    shown = [(e.step, e.action) for e in events if e.action in ("warn", "skip", "stop")]
    for chart in _CHARTS:
        window = window_of(len(metrics)) if chart.smooth else 1
        found = {name: _points(metrics, metric, chart.scale) for metric, name in chart.lines.items()}
        series = [Series(name, points, window=window) for name, points in found.items() if points]
        values = [value for s in series for _, value in s.points]
        if values and not (chart.hide_constant and min(values) == max(values)):
            last = metrics[-1]["step"]
            yield Plot(chart.title, series, [e for e in shown if e[0] <= last] if chart.title == "Loss" else [])


def _points(metrics: Sequence[LogLine], name: str, scale: float = 1) -> list[Point]:
    return [(line["step"], scale * line[name]) for line in metrics if line.get(name) is not None]


def _ranges(metrics: Sequence[LogLine]) -> Iterator[tuple[str, tuple[float, float, float, float]]]:
    """Yield each metric with its first, smallest, largest and last value."""
    for name in dict.fromkeys(name for line in metrics for name in line):
        values = [value for _, value in _points(metrics, name)]
        if values and name not in ("step", "time"):
            yield name, (values[0], min(values), max(values), values[-1])
