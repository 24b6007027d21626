"""What a training run did, as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from infembed_ray.config import Settings, TrainSettings
from infembed_ray.training.events import Event, read_events
from infembed_ray.training.metrics import read_metrics
from infembed_ray.training.validation import EXPORTED

REPORT = "report.html"
MOST_EVENTS = 50
"""Events that are listed; the rest is counted in one line."""
POINTS = 200
"""Most points of a curve. Of a longer run, a point is the mean of some steps, in front of the span of their values."""

_WIDTH, _HEIGHT = 360, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 22
"""Pixels of a plot, and of the room around it for the axes."""

Line = Mapping[str, Any]
"""Of the log."""


def write(directory: Path, settings: TrainSettings, records: int, steps: int) -> None:
    """Write the report of the run in `directory` beside its log; arguments as for `render`."""
    exported = directory / EXPORTED
    after = json.loads(exported.read_text(encoding="utf-8")) if exported.exists() else None
    page = render(settings, read_metrics(directory), read_events(directory), records, steps, after)
    (directory / REPORT).write_text(page, encoding="utf-8")


def render(
    settings: TrainSettings,
    metrics: Sequence[Line],
    events: Sequence[Event],
    records: int,
    steps: int,
    exported: Mapping[str, Any] | None = None,
) -> str:
    """The page of a run, finished or not. The same arguments give the same page.

    Args:
        settings: of the run.
        metrics: its log, one line a step (see `metrics`).
        events: what else happened.
        records: that it trains on.
        steps: of the whole run, if it is not ended early.
        exported: the `step` after which the model was taken, and its `score` in the validation; None: not finished.
    """
    environment = Environment(loader=PackageLoader("infembed_ray.training", "."), autoescape=True)
    return environment.get_template(REPORT).render(
        settings=settings,
        changed=list(changed(settings)),
        summary=Summary.of(metrics, events),
        why_no_mfu="no GPU" if not settings.gpus_per_worker else "the peak of this GPU is not known",
        plots=list(_plots(metrics, events)),
        figures=list(_figures(metrics)),
        events=events,
        most_events=MOST_EVENTS,
        records=records,
        steps=steps,
        exported=exported,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        bottom=_HEIGHT - _BOTTOM,
    )


def changed(settings: Settings, within: str = "") -> Iterator[tuple[str, str]]:
    """Name and value of every setting that is not at its default, of nested ones with dots."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value == field.default:
            continue
        if isinstance(value, Settings):
            yield from list(changed(value, f"{within}{name}.")) or [(f"{within}{name}", "{}")]
        else:
            yield f"{within}{name}", ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Summary:
    """A run in figures.

    Attributes:
        done: steps.
        skipped: of these, without an update.
        tokens: read by all workers.
        seconds: of all steps.
        elapsed: seconds from the first step's beginning to the last one's end: with saving, evaluation, interruptions.
        padding, data: shares of the places in the passes that held nothing, and of the seconds until texts were tokens.
        mfu: model FLOPs utilisation; None where the peak is not known.
        memory_gib: most that was in use.
        resumed: how often the run began anew from a state.
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
    def of(cls, metrics: Sequence[Line], events: Sequence[Event]) -> Summary | None:
        """None before the first step."""
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


# ----------------------------------------------------------------------------------------------------------- curves

_PLOTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss", ("loss", "loss_")),
    ("Validation", ("validation_",)),
    ("Accuracy: the positive comes first", ("accuracy_",)),
    ("Rank of the positive", ("rank_",)),
    ("Similarity of the positive", ("positive_similarity",)),
    ("Rows without negatives", ("without_negatives",)),
    ("Gradient norm", ("grad_norm",)),
    ("Learning rate", ("learning_rate",)),
    ("Temperature", ("temperature",)),
    ("Tokens per second", ("tokens_per_second",)),
    ("MFU", ("mfu",)),
    ("Memory, GiB", ("memory_gib",)),
    ("Padding", ("padding",)),
    ("Seconds a step", ("seconds", "data_seconds")),
)
"""Title -> what is plotted; a name that ends in _ stands for all that begin so."""
_CONSTANT = ("Temperature", "Rows without negatives", "Padding")
"""Plots that only tell something if it changes."""


@dataclass(frozen=True)
class Series:
    """One curve: SVG paths of its points and of the span they stand for, and its ends for the legend."""

    label: str
    path: str
    span: str
    first: str
    last: str


@dataclass(frozen=True)
class Plot:
    """Curves of one measure over the steps. Ticks and marks are at pixels; a mark is an event's action."""

    title: str
    series: Sequence[Series]
    x: Sequence[tuple[float, str]]
    y: Sequence[tuple[float, str]]
    marks: Sequence[tuple[float, str]]


def _plots(metrics: Sequence[Line], events: Sequence[Event]) -> Iterator[Plot]:
    names = dict.fromkeys(name for line in metrics for name in line)
    marked = [event for event in events if event.action in ("warn", "skip", "stop")]
    for title, prefixes in _PLOTS:
        shown = [
            n for prefix in prefixes for n in names if n == prefix or (prefix.endswith("_") and n.startswith(prefix))
        ]
        curves = {name: points for name in shown if (points := _points(metrics, name))}
        values = [value for points in curves.values() for _, value in points]
        if not values or (title in _CONSTANT and min(values) == max(values)):
            continue
        yield _plot(title, curves, max(metrics[-1]["step"], 2), marked if title == "Loss" else [])


def _points(metrics: Sequence[Line], name: str) -> list[tuple[int, float]]:
    return [(line["step"], line[name]) for line in metrics if line.get(name) is not None]


def _plot(title: str, curves: Mapping[str, list[tuple[int, float]]], steps: int, marked: Sequence[Event]) -> Plot:
    values = [value for points in curves.values() for _, value in points]
    ticks = _ticks(min(values), max(values))
    low, high = ticks[0], ticks[-1]

    def x(step: float) -> float:
        return round(_LEFT + (step - 1) / (steps - 1) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP), 1)

    series = []
    for name, points in curves.items():
        buckets = list(_buckets(points))
        line = [(x(step), y(mean)) for step, mean, _, _ in buckets]
        path = "M" + "L".join(f"{a} {b}" for a, b in line) + ("h0" if len(line) == 1 else "")
        span = ""
        if len(points) > len(buckets):
            upper = [f"{x(step)} {y(most)}" for step, _, _, most in buckets]
            lower = [f"{x(step)} {y(least)}" for step, _, least, _ in reversed(buckets)]
            span = f"M{'L'.join(upper + lower)}Z"
        series.append(Series(name, path, span, figure(points[0][1]), figure(points[-1][1])))
    across = [step for step in _ticks(1, steps) if 1 < step <= steps and step == int(step)]
    return Plot(
        title,
        series,
        x=[(x(step), f"{int(step):,}") for step in [1, *across]],
        y=[(y(value), figure(value)) for value in ticks],
        marks=[(x(event.step), event.action) for event in marked if event.step <= steps],
    )


def _buckets(points: Sequence[tuple[int, float]]) -> Iterator[tuple[float, float, float, float]]:
    """(step, mean, least, most) of at most `POINTS` runs of equally many points, but for the last."""
    size = math.ceil(len(points) / POINTS)
    for start in range(0, len(points), size):
        steps, values = zip(*points[start : start + size], strict=True)
        yield sum(steps) / len(steps), sum(values) / len(values), min(values), max(values)


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers, evenly apart, that enclose an interval."""
    if low == high:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    apart = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(apart))
    apart = next(step * power for step in (1, 2, 5, 10) if step * power >= apart * 0.999)
    first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    return [round(n * apart, 12 - math.floor(math.log10(apart))) for n in range(first, last + 1)]


# ---------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figure:
    """What became of one measure."""

    name: str
    first: str
    least: str
    most: str
    last: str


def _figures(metrics: Sequence[Line]) -> Iterator[Figure]:
    for name in dict.fromkeys(name for line in metrics for name in line):
        values = [value for _, value in _points(metrics, name)]
        if values and name not in ("step", "time"):
            yield Figure(name, *map(figure, (values[0], min(values), max(values), values[-1])))


def figure(value: float) -> str:
    """A figure for reading: four digits, thousands apart, very small ones by their power of ten."""
    if 1e4 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    digits, power = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"
