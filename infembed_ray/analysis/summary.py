"""Everything the report says, as one typed value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infembed_ray.analysis.agreement import Agreement
from infembed_ray.analysis.contamination import Contamination
from infembed_ray.analysis.cost import Cost, cost
from infembed_ray.analysis.coverage import Coverage
from infembed_ray.analysis.diversity import Diversity
from infembed_ray.analysis.duplicates import Duplicates, duplicates
from infembed_ray.analysis.funnel import Funnel, Verdicts, funnel, verdicts
from infembed_ray.analysis.lengths import Length, lengths
from infembed_ray.analysis.material import Material


@dataclass(frozen=True)
class Summary:
    """The quality report. `report.json` is this, field by field."""

    funnel: Funnel
    verdicts: list[Verdicts]
    lengths: list[Length]
    topics: dict[str, int]
    """Topic -> kept records, most frequent first; empty where no record names one."""
    sources: dict[str, int]
    duplicates: list[Duplicates]
    cost: Cost | None
    diversities: list[Diversity]
    """By kind, then by set, the records first."""
    coverages: list[Coverage]
    """By kind; empty without an encoder."""
    agreements: list[Agreement]
    contaminations: list[Contamination]
    """By evaluation, then by kind."""


def summarise(
    material: Material,
    diversities: Sequence[Diversity] = (),
    coverages: Sequence[Coverage] = (),
    agreements: Sequence[Agreement] = (),
    contaminations: Sequence[Contamination] = (),
) -> Summary:
    """Analyse the material, and put what was found out about it beside."""
    return Summary(
        funnel=funnel(material),
        verdicts=verdicts(material),
        lengths=lengths(material.kept),
        topics=_counted(record.topic for record in material.kept if record.topic is not None),
        sources=_counted(record.source for record in material.kept),
        duplicates=duplicates(material.kept),
        cost=cost(material),
        diversities=list(diversities),
        coverages=list(coverages),
        agreements=list(agreements),
        contaminations=list(contaminations),
    )


def _counted(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())
