"""The quality report as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jinja2 import Environment, PackageLoader

from infembed_ray.analysis.lengths import Length
from infembed_ray.analysis.summary import Summary

LONGEST_LIST = 20
"""Lines of a list; the rest is counted in one line."""

_SPAN_WIDTH, _SPAN_MARGIN = 240, 8
"""Pixels of a plot of lengths and of the room at its ends for the marks."""


def render(summary: Summary, source: str) -> str:
    """The page for a summary of what lies at `source`."""
    environment = Environment(loader=PackageLoader("infembed_ray.analysis", "."), autoescape=True)
    return environment.get_template("report.html").render(
        summary=summary,
        source=source,
        spans=[(n, _scale([m for m in summary.lengths if m.kind == n.kind])) for n in summary.lengths],
        span_width=_SPAN_WIDTH,
        longest_list=LONGEST_LIST,
    )


def _scale(of_kind: Sequence[Length]) -> Callable[[float], float]:
    """Words -> pixels, the same for all texts of a kind."""
    longest = max(words for n in of_kind for words in (n.p95, n.mean, n.paper_mean))
    return lambda words: round(_SPAN_MARGIN + words / longest * (_SPAN_WIDTH - 2 * _SPAN_MARGIN), 1)
