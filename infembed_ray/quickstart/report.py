"""The quickstart's report: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from infembed_ray.evaluation.tasks.infir import FIGURES
from infembed_ray.quickstart.rankings import Ranking

_WIDTH, _HEIGHT, _MARGIN = 560, 220, 40
"""Pixels of a plot and of the room around it for the axes."""


@dataclass(frozen=True)
class Axis:
    """Labelled positions along one edge of a plot, in pixels."""

    ticks: Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Curve:
    """A line plot: an SVG path and its axes."""

    path: str
    x: Axis
    y: Axis


@dataclass(frozen=True)
class Bar:
    """One bar of a bar plot, in pixels."""

    x: float
    y: float
    width: float
    height: float
    model: int
    label: str


def write_report(
    path: Path,
    funnel: Mapping[str, int],
    figures: Mapping[str, Mapping[str, float | None]],
    metrics: Sequence[Mapping[str, Any]],
    rankings: Sequence[Ranking],
) -> Path:
    """Write the report.

    Args:
        path: of the HTML file.
        funnel: synthesis counts: seeds, kept, rejected, dead_letter, calls, replayed.
        figures: model -> name of a figure -> value, by `infir.FIGURES`; the first model is the baseline.
        metrics: the training log, one entry a step.
        rankings: the demo query under its instructions.
    """
    environment = Environment(loader=PackageLoader("infembed_ray.quickstart", "."), autoescape=True)
    page = environment.get_template("report.html").render(
        funnel=funnel,
        figures=figures,
        curve=_curve([m["loss"] for m in metrics]),
        groups=_bars(figures),
        rankings=rankings,
        width=_WIDTH,
        height=_HEIGHT,
        margin=_MARGIN,
    )
    path.write_text(page, encoding="utf-8")
    return path


def _curve(values: Sequence[float]) -> Curve:
    """Training loss by step."""
    top = max(values) * 1.05
    across = max(1, len(values) - 1)

    def point(step: int, value: float) -> tuple[float, float]:
        x = _MARGIN + step / across * (_WIDTH - 2 * _MARGIN)
        return x, _HEIGHT - _MARGIN - value / top * (_HEIGHT - 2 * _MARGIN)

    path = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in (point(s, v) for s, v in enumerate(values)))
    steps = sorted({0, across // 2, across})
    levels = [top * k / 4 for k in range(5)]
    return Curve(
        path,
        x=Axis([(point(s, 0)[0], str(s + 1)) for s in steps]),
        y=Axis([(point(0, v)[1], f"{v:.1f}") for v in levels]),
    )


def _bars(figures: Mapping[str, Mapping[str, float | None]]) -> list[tuple[float, str, list[Bar]]]:
    """Every measure's bars, one a model: (middle of the group, name of the measure, bars). All in per cent."""
    measures = {
        figure.name: [100 * (of_model[figure.name] or 0.0) for of_model in figures.values()] for figure in FIGURES
    }
    room = (_WIDTH - 2 * _MARGIN) / len(measures)
    width = room * 0.7 / len(figures)
    groups = []
    for g, (name, values) in enumerate(measures.items()):
        left = _MARGIN + g * room + room * 0.15
        bars = []
        for model, value in enumerate(values):
            height = max(0.0, value) / 100 * (_HEIGHT - 2 * _MARGIN)
            bars.append(
                Bar(left + model * width, _HEIGHT - _MARGIN - height, width * 0.92, height, model, f"{value:.1f}")
            )
        groups.append((_MARGIN + (g + 0.5) * room, name, bars))
    return groups
