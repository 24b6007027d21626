"""Charts of the HTML reports: axes, bars, lines, intervals and scatter plots, as SVG.

Shapes are drawn in percent of the chart's width and height and stretched to its size on the screen; strokes are not
stretched. Axis labels are HTML beside the SVG, so text has the size of the page's text on every screen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from markupsafe import Markup

MAX_POINTS = 200
"""Points per line. A longer series is drawn as the means of its buckets."""

Point = tuple[float, float]
Interval = tuple[float, float]
Mark = Literal["dot", "ring", "tick"]


_SMALLEST = 1e-290
"""Smaller values are drawn as 0: the spacing of their ticks would be no number."""


@dataclass(frozen=True)
class Scale:
    """A linear axis.

    Attributes:
        low, high: ends of the axis, in units of the data.
    """

    low: float
    high: float

    @classmethod
    def enclosing(cls, values: Iterable[float]) -> Scale:
        """Return the smallest axis that holds all values; an axis of length 1 for equal ones."""
        values = list(values)
        low, high = min(values), max(values)
        return cls(low, high if high > low else low + 1)

    def __call__(self, value: float) -> float:
        """Return the position of a value in percent of the axis; a value beyond an end is drawn at that end."""
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)


def ticks(low: float, high: float) -> list[float]:
    """Return three to seven evenly spaced round numbers that enclose an interval."""
    low, high = (0.0 if abs(end) < _SMALLEST else end for end in (low, high))
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    spacing = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(spacing))
    spacing = next(step * power for step in (1, 2, 5, 10) if step * power >= spacing * 0.999)
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    return [round(n * spacing, 12 - math.floor(math.log10(spacing))) for n in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Write evenly spaced ticks with as many decimals as their spacing needs, so that every label is exact."""
    largest, spacing = max(map(abs, values)), values[1] - values[0]
    power = 0 if 1e-3 <= largest < 1e9 else math.floor(math.log10(largest))
    unit = 10.0**power
    decimals = max(0, -math.floor(math.log10(spacing / unit) + 1e-9))
    suffix = f"e{power}" if power else ""
    return ["0" if value == 0 else f"{value / unit:,.{decimals}f}{suffix}" for value in values]


def number(value: float) -> str:
    """Write a value with four significant digits, thousands separators, and a power of ten below 0.001."""
    if 1e4 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    digits, power = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        label: name in the legend.
        points: (x, y), at least one, by ascending x.
        window: points per centred moving average; the points themselves are faint behind it. 1 for no smoothing.
    """

    label: str
    points: Sequence[Point]
    window: int = 1

    @property
    def line(self) -> Sequence[Point]:
        """The points of the line: smoothed, or as they are."""
        if self.window == 1:
            return self.points
        xs, ys = zip(*self.points, strict=True)
        return list(zip(xs, moving_average(ys, self.window), strict=True))


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the centred moving average; near the ends it is the mean of the values that exist.

    Args:
        values: n finite numbers.
        window: values per mean, an odd number.
    """
    half = window // 2
    return [fmean(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]


def line_chart(
    title: str, series: Sequence[Series], steps: Interval, events: Sequence[tuple[float, str]] = (), x_title: str = ""
) -> Markup:
    """Draw lines over an integer x axis, with a legend that gives the first and last value of each.

    Args:
        title: name of the chart, for screen readers.
        series: at most four have colours of their own.
        steps: first and last x of the axis.
        events: (x, CSS class) of dashed vertical lines.
        x_title: label of the x axis.
    """
    ends = [value for s in series for _, value in s.points]
    y_ticks = ticks(min(ends), max(ends))
    x, y = Scale.enclosing(steps), Scale(y_ticks[0], y_ticks[-1])
    shapes = [_line("grid", 0, 100, y_at, y_at) for y_at in (_down(y, tick) for tick in y_ticks)]
    shapes += [_line(f"event {style}", x(at), x(at), 0, 100) for at, style in events]
    drawn = [_series(s, f"s{number % 4}", x, y) for number, s in enumerate(series)]
    shapes += [shape for behind, _ in drawn for shape in behind]
    shapes += [shape for _, front in reversed(drawn) for shape in front]  # the first line lies on top
    legend = [(s.label, f"from {number(s.line[0][1])} to {number(s.line[-1][1])}") for s in series]
    x_ticks = [steps[0], *(t for t in ticks(*steps) if steps[0] < t <= steps[1] and t == int(t))]
    return Markup(
        '<div class="chart"><div class="y" aria-hidden="true">{}</div>{}<div class="x">{}{}</div></div>{}'
    ).format(
        _join("<span>{}</span>", ((label,) for label in tick_labels(y_ticks))),
        _svg("plot", f"{title}: " + "; ".join(f"{label} {values}" for label, values in legend), shapes),
        _join(
            '<span class="{}" style="left:{}%">{}</span>',
            (("start" if x(t) < 5 else "end" if x(t) > 95 else "", x(t), f"{int(t):,}") for t in x_ticks),
        ),
        Markup("<b>{}</b>").format(x_title) if x_title else "",
        Markup('<div class="legend">{}</div>').format(
            _join(
                '<span><i class="key s{}"></i>{} {}</span>',
                ((n % 4, label if len(legend) > 1 else "", values) for n, (label, values) in enumerate(legend)),
            )
        ),
    )


def bar(value: float, scale: Scale, label: str, style: str = "s0", interval: Interval | None = None) -> Markup:
    """Draw a horizontal bar from 0, with a whisker for its interval.

    Args:
        value: length of the bar; it points to the left if negative.
        scale: the axis, which holds 0.
        label: what the bar shows, for screen readers.
        style: CSS class of the colour.
        interval: ends of the whisker.
    """
    zero, end = scale(0), scale(value)
    shapes = [
        Markup('<rect class="fill {}" x="{}" y="1" width="{}" height="8"/>').format(
            style, min(zero, end), round(abs(end - zero), 2)
        ),
        _line("zero", zero, zero, 0, 10),
    ]
    if interval is not None:
        low, high = map(scale, interval)
        shapes += [_line("whisker", low, high, 5, 5), *(_line("whisker", at, at, 2.5, 7.5) for at in (low, high))]
    return _svg("bar", label, shapes, 10)


def interval(span: Interval, scale: Scale, label: str, marks: Sequence[tuple[Mark, float]]) -> Markup:
    """Draw a horizontal interval with marks: dots, rings and ticks."""
    shapes = [_line("zero", 0, 100, 8, 8), _line("span", scale(span[0]), scale(span[1]), 8, 8)]
    return _svg("interval", label, [*shapes, *(shape for kind, at in marks for shape in _mark(kind, scale(at)))], 16)


def interval_key(kind: Mark | Literal["span"]) -> Markup:
    """Draw the legend's symbol for an interval or one of its marks."""
    shapes = [_line("span", 30, 70, 8, 8)] if kind == "span" else _mark(kind, 50)
    return _svg("interval symbol", kind, shapes, 16)


def scatter(points: Iterable[Point], others: Iterable[Point], label: str, size: float) -> Markup:
    """Draw points of the unit square, `size` pixels wide, in front of grey others; `label` is for screen readers."""
    shape = '<path class="{}" stroke-width="{}" d="{}"/>'
    # Paths of no length: round line caps make them dots.
    dots = ["".join(f"M{2 + 96 * x:.2f} {2 + 96 * (1 - y):.2f}h0" for x, y in of) for of in (others, points)]
    shapes = [Markup(shape).format(style, size, path) for style, path in zip(("others", "dots"), dots, strict=True)]
    return _svg("scatter", label, shapes)


def _series(series: Series, style: str, x: Scale, y: Scale) -> tuple[list[Markup], list[Markup]]:
    """Return the shapes behind all lines, its values or the band of them, and those in front, a line."""
    buckets = _buckets(series.points)
    behind, front = [], [_path(f"curve {style}", series.line, x, y)]
    if len(series.points) > len(buckets):
        upper = [f"{x(at)} {_down(y, high)}" for at, _, _, high in buckets]
        lower = [f"{x(at)} {_down(y, low)}" for at, _, low, _ in reversed(buckets)]
        behind.append(Markup('<path class="band {}" d="M{}Z"/>').format(style, "L".join(upper + lower)))
    elif series.window > 1:
        behind.append(_path(f"raw {style}", series.points, x, y))
    return behind, front


def _path(style: str, points: Sequence[Point], x: Scale, y: Scale) -> Markup:
    line = [f"{x(at)} {_down(y, mean)}" for at, mean, _, _ in _buckets(points)]
    return Markup('<path class="{}" d="M{}{}"/>').format(style, "L".join(line), "h0" if len(line) == 1 else "")


def _buckets(points: Sequence[Point]) -> list[tuple[float, float, float, float]]:
    """Return (x, mean, least, largest) of at most `MAX_POINTS` runs of neighbouring points, of equal length."""
    size = math.ceil(len(points) / MAX_POINTS)
    buckets = []
    for start in range(0, len(points), size):
        xs, ys = zip(*points[start : start + size], strict=True)
        buckets.append((sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)))
    return buckets


def _down(scale: Scale, value: float) -> float:
    """Return the distance of a value from the top, in percent."""
    return round(100 - scale(value), 2)


def _mark(kind: Mark, at: float) -> list[Markup]:
    if kind == "tick":
        return [_line("tick", at, at, 2, 14)]
    shape = '<path class="{}" d="M{} 8h0"/>'
    return [Markup(shape).format(style, at) for style in (("ring", "hole") if kind == "ring" else ("dot s0",))]


def _line(style: str, x1: float, x2: float, y1: float, y2: float) -> Markup:
    return Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(style, x1, x2, y1, y2)


def _svg(style: str, label: str, shapes: Iterable[Markup], height: int = 100) -> Markup:
    return Markup(
        '<svg class="{}" viewBox="0 0 100 {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(style, height, label, Markup("").join(shapes))


def _join(template: str, rows: Iterable[Sequence[object]]) -> Markup:
    return Markup("").join(Markup(template).format(*row) for row in rows)
