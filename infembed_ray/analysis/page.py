"""The quality report as one self-contained HTML file, whose rows a reader can filter and search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from infembed_ray.analysis.contamination import NGRAM
from infembed_ray.analysis.coverage import Coverage, CoveredSet
from infembed_ray.analysis.lengths import PAPER_SIZE
from infembed_ray.analysis.rows import SHOWN, ShownRow
from infembed_ray.analysis.summary import QualityReport
from infembed_ray.reporting import page
from infembed_ray.reporting.charts import Point, Scale

LONGEST_LIST = 20
"""Rows per list; the report gives the number of the others."""


def render(report: QualityReport, rows: Sequence[ShownRow], source: str, threshold: float = 0.7) -> str:
    """Render the quality report.

    Args:
        rows: rows to browse.
        source: the records.
        threshold: Jaccard similarity of near-duplicates.
    """
    study = report.agreement
    kappas = [] if study is None else [pair.kappa for pair in study.pairs] + [rater.kappa for rater in study.llm_raters]
    return page.render(
        "infembed_ray.analysis",
        "report.html",
        summary=report,
        rows=[asdict(row) for row in rows],
        shown=SHOWN,
        source=source,
        ngram=NGRAM,
        threshold=threshold,
        paper_size=PAPER_SIZE,
        length_scales={
            kind: Scale(0.0, max(n for x in report.lengths if x.kind == kind for n in (x.p95, x.mean, x.paper_mean)))
            for kind in {x.kind for x in report.lengths}
        },
        kappa_scale=Scale(min([0.0, *(kappa.low for kappa in kappas if kappa.low is not None)]), 1.0),
        most_aps=max((d.aps for d in report.diversities if d.aps is not None), default=None),
        most_ingf={
            kind: max(d.ingf for d in report.diversities if d.kind == kind)
            for kind in {d.kind for d in report.diversities}
        },
        others=_others,
        dot_size=lambda covered: round(max(1.2, min(4.0, 64 / len(covered.points) ** 0.5)), 1),
        longest_list=LONGEST_LIST,
    )


def _others(coverage: Coverage, covered: CoveredSet) -> Iterator[Point]:
    """Yield the points of all other sets."""
    return (point for other in coverage.sets if other is not covered for point in other.points)
