"""Everything the report says, as one typed value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from infembed_ray.analysis.cost import Cost, cost
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


def summarise(material: Material) -> Summary:
    """Analyse the material."""
    return Summary(
        funnel=funnel(material),
        verdicts=verdicts(material),
        lengths=lengths(material.kept),
        topics=_counted(record.topic for record in material.kept if record.topic is not None),
        sources=_counted(record.source for record in material.kept),
        duplicates=duplicates(material.kept),
        cost=cost(material),
    )


def _counted(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())
