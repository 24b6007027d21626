"""Charts of the HTML reports: bars, intervals and scatter plots, as SVG.

Shapes are drawn in percent of the chart's width and height and stretched to its size on the screen; strokes are not
stretched. Labels are HTML beside the SVG, so text has the size of the page's text on every screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

Point = tuple[float, float]
Interval = tuple[float, float]
Mark = Literal["dot", "ring", "tick"]


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
