"""The quality report as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader

from infembed_ray.analysis.agreement import Agreement
from infembed_ray.analysis.coverage import Coverage
from infembed_ray.analysis.lengths import Length
from infembed_ray.analysis.summary import Summary

LONGEST_LIST = 20
"""Lines of a list; the rest is counted in one line."""

_SPAN_WIDTH, _SPAN_MARGIN = 240, 8
"""Pixels of a plot of lengths or agreements and of the room at its ends for the marks."""
_PLANE, _PLANE_MARGIN = 300, 8
"""Pixels of a side of a coverage plot and of the room within it."""


def render(summary: Summary, source: str, ngram: int = 13) -> str:
    """The page for a summary of what lies at `source`; `ngram` words in a row are an overlap with an evaluation."""
    environment = Environment(loader=PackageLoader("infembed_ray.analysis", "."), autoescape=True)
    return environment.get_template("report.html").render(
        summary=summary,
        source=source,
        ngram=ngram,
        spans=[(n, _scale([m for m in summary.lengths if m.kind == n.kind])) for n in summary.lengths],
        span_width=_SPAN_WIDTH,
        planes=[(coverage, _panels(coverage)) for coverage in summary.coverages],
        plane=_PLANE,
        most_aps=max((d.aps for d in summary.diversities if d.aps is not None), default=None),
        most_ingf={
            kind: max(d.ingf for d in summary.diversities if d.kind == kind)
            for kind in {d.kind for d in summary.diversities}
        },
        kappa=_kappa_scale(summary.agreements),
        longest_list=LONGEST_LIST,
    )


def _scale(of_kind: Sequence[Length]) -> Callable[[float], float]:
    """Words -> pixels, the same for all texts of a kind."""
    longest = max(words for n in of_kind for words in (n.p95, n.mean, n.paper_mean))
    return _pixels(0.0, longest)


def _kappa_scale(agreements: Sequence[Agreement]) -> Callable[[float], float]:
    """Kappas -> pixels, from 0, or the lowest below it, to 1."""
    return _pixels(min([0.0, *(a.low for a in agreements if a.low is not None)]), 1.0)


def _pixels(low: float, high: float) -> Callable[[float], float]:
    room = _SPAN_WIDTH - 2 * _SPAN_MARGIN
    return lambda value: round(_SPAN_MARGIN + (value - low) / (high - low) * room, 1)


@dataclass(frozen=True)
class _Panel:
    """One set in the plane, in front of all others: the data of two SVG paths of dots."""

    label: str
    share: float
    """Of the occupied cells, those that this set reaches."""
    dots: str
    others: str
    dot: float
    """Width of a dot: smaller where there are more."""


def _panels(coverage: Coverage) -> list[_Panel]:
    return [
        _Panel(
            covered.label,
            covered.cells / coverage.cells,
            _dots(covered.points),
            _dots(point for other in coverage.sets if other is not covered for point in other.points),
            round(max(1.2, min(4.0, 64 / len(covered.points) ** 0.5)), 1),
        )
        for covered in coverage.sets
    ]


def _dots(points: Iterable[tuple[float, float]]) -> str:
    """A path that is a dot, with round line caps, at every point; upward is up."""
    room = _PLANE - 2 * _PLANE_MARGIN
    return "".join(f"M{_PLANE_MARGIN + x * room:.1f} {_PLANE_MARGIN + (1 - y) * room:.1f}h0" for x, y in points)
