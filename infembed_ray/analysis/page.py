"""The quality report: all findings as one value, and as one self-contained HTML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from infembed_ray.analysis.agreement import Agreement
from infembed_ray.analysis.contamination import Contamination
from infembed_ray.analysis.cost import Cost, cost
from infembed_ray.analysis.coverage import Coverage, Covered
from infembed_ray.analysis.diversity import Diversity
from infembed_ray.analysis.duplicates import Duplicates, duplicates
from infembed_ray.analysis.examples import RULE, Example, examples
from infembed_ray.analysis.funnel import Funnel, Verdicts, funnel, verdicts
from infembed_ray.analysis.inputs import RecordSet
from infembed_ray.analysis.lengths import PAPER_SIZE, Length, Size, lengths, sizes
from infembed_ray.reporting import page
from infembed_ray.reporting.charts import Point, Scale

LONGEST_LIST = 20
"""Rows per list; the report gives the number of the others."""


@dataclass(frozen=True)
class Summary:
    """The quality report; `report.json` has the same fields.

    Attributes:
        topics, sources: topic or source -> kept records, most frequent first.
        diversities: by kind, then by set, the records first.
        cheap_judge: figures of the manifest; None if only the judge judged.
        coverages: by kind; empty without an encoder.
        contaminations: by evaluation set, then by kind.
    """

    funnel: Funnel
    verdicts: list[Verdicts]
    examples: list[Example]
    lengths: list[Length]
    sizes: list[Size]
    topics: dict[str, int]
    sources: dict[str, int]
    duplicates: list[Duplicates]
    cost: Cost | None
    cheap_judge: dict[str, Any] | None
    diversities: list[Diversity]
    coverages: list[Coverage]
    agreements: list[Agreement]
    contaminations: list[Contamination]


def summarise(
    found: RecordSet,
    diversities: Sequence[Diversity] = (),
    coverages: Sequence[Coverage] = (),
    agreements: Sequence[Agreement] = (),
    contaminations: Sequence[Contamination] = (),
) -> Summary:
    """Analyse records; the other arguments are added as they are."""
    counted = funnel(found)
    return Summary(
        funnel=counted,
        verdicts=verdicts(found),
        examples=examples(found, counted.rejections),
        lengths=lengths(found.kept),
        sizes=sizes(found.kept),
        topics=dict(Counter(record.topic for record in found.kept if record.topic is not None).most_common()),
        sources=dict(Counter(record.source for record in found.kept).most_common()),
        duplicates=duplicates(found.kept),
        cost=cost(found),
        cheap_judge=found.manifest.get("cheap_judge"),
        diversities=list(diversities),
        coverages=list(coverages),
        agreements=list(agreements),
        contaminations=list(contaminations),
    )


def render(summary: Summary, source: str, ngram: int = 13) -> str:
    """Render the quality report.

    Args:
        ngram: consecutive words that make an overlap with an evaluation set.
    """
    return page.render(
        "infembed_ray.analysis",
        "report.html",
        summary=summary,
        source=source,
        ngram=ngram,
        paper_size=PAPER_SIZE,
        length_scales={
            kind: Scale(0.0, max(n for x in summary.lengths if x.kind == kind for n in (x.p95, x.mean, x.paper_mean)))
            for kind in {x.kind for x in summary.lengths}
        },
        kappa_scale=Scale(min([0.0, *(a.low for a in summary.agreements if a.low is not None)]), 1.0),
        most_aps=max((d.aps for d in summary.diversities if d.aps is not None), default=None),
        most_ingf={
            kind: max(d.ingf for d in summary.diversities if d.kind == kind)
            for kind in {d.kind for d in summary.diversities}
        },
        others=_others,
        dot_size=lambda covered: round(max(1.2, min(4.0, 64 / len(covered.points) ** 0.5)), 1),
        longest_list=LONGEST_LIST,
        rule=RULE,
    )


def _others(coverage: Coverage, covered: Covered) -> Iterator[Point]:
    """Yield the points of all other sets."""
    return (point for other in coverage.sets if other is not covered for point in other.points)
