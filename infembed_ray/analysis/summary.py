"""All findings of the quality report as one value, and as printed lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from infembed_ray.analysis.agreement import AgreementStudy, Kappa
from infembed_ray.analysis.contamination import Contamination
from infembed_ray.analysis.cost import SynthesisCost, cost
from infembed_ray.analysis.coverage import Coverage
from infembed_ray.analysis.diversity import Diversity
from infembed_ray.analysis.funnel import Funnel, Verdicts, funnel, verdicts
from infembed_ray.analysis.inputs import RecordSet
from infembed_ray.analysis.lengths import Length, TextSizes, lengths, sizes
from infembed_ray.analysis.near_duplicates import Duplicates, duplicates

PRINTED = 5
"""Printed reasons of each kind; the files have all."""


@dataclass(frozen=True, kw_only=True)
class QualityReport:
    """The quality report; `report.json` has the same fields.

    Attributes:
        topics, sources: topic or source -> kept records, most frequent first.
        cheap_judge: figures of the manifest; None if only the judge judged.
        diversities: by kind, then by set, the records first.
        coverages: by kind; empty without an encoder.
        contaminations: by evaluation set, then by kind.
        agreement: None without raters.
        removed: reason -> records that `clean` removed; None without it.
    """

    funnel: Funnel
    verdicts: list[Verdicts]
    lengths: list[Length]
    sizes: list[TextSizes]
    topics: dict[str, int]
    sources: dict[str, int]
    duplicates: list[Duplicates]
    cost: SynthesisCost | None
    cheap_judge: dict[str, Any] | None
    diversities: list[Diversity]
    coverages: list[Coverage]
    contaminations: list[Contamination]
    agreement: AgreementStudy | None
    removed: dict[str, int] | None


def summarise(
    records: RecordSet,
    threshold: float = 0.7,
    diversities: list[Diversity] | None = None,
    coverages: list[Coverage] | None = None,
    contaminations: list[Contamination] | None = None,
    agreement: AgreementStudy | None = None,
    removed: dict[str, int] | None = None,
) -> QualityReport:
    """Analyse records; the findings given are added as they are.

    Args:
        threshold: Jaccard similarity of near-duplicates.
    """
    return QualityReport(
        funnel=funnel(records),
        verdicts=verdicts(records),
        lengths=lengths(records.kept),
        sizes=sizes(records.kept),
        topics=dict(Counter(record.topic for record in records.kept if record.topic is not None).most_common()),
        sources=dict(Counter(record.source for record in records.kept).most_common()),
        duplicates=duplicates(records.kept, threshold),
        cost=cost(records),
        cheap_judge=records.manifest.get("cheap_judge"),
        diversities=diversities or [],
        coverages=coverages or [],
        contaminations=contaminations or [],
        agreement=agreement,
        removed=removed,
    )


def as_text(report: QualityReport) -> str:
    """Format the summary as lines of a number and its meaning."""
    return "\n".join([_headline(report.funnel), *(f"{number:>11}  {meaning}" for number, meaning in _lines(report))])


def _lines(report: QualityReport) -> Iterator[tuple[str, str]]:
    funnel, cost = report.funnel, report.cost
    if funnel.unaccounted:
        yield f"{funnel.unaccounted:,}", "seeds are neither kept, rejected nor dead letters: this output is damaged"
    for name, losses in (("rejected", funnel.rejections), ("dead letters", funnel.errors)):
        for loss in losses[:PRINTED]:
            yield f"{loss.rows:,}", f"{name} at {loss.step}: {loss.why}"
    if funnel.complements:
        yield f"{funnel.complements_fit:,}", f"of {funnel.complements:,} complements passed"
    for v in report.verdicts:
        yield f"{100 * v.right / v.judged:.1f}", f"% pass the judge, {v.scenario}"
    for size in report.sizes:
        for kind, number in size.texts.items():
            yield f"{number:,}", f"distinct {kind} texts{f' of {size.source}' if size.source else ''}"
    for n in report.lengths:
        if n.column is None:
            spread = f"p5 {n.p5:.0f}, p95 {n.p95:.0f}; the paper's set: {n.paper_mean}"
            yield f"{n.mean:.1f}", f"words per {n.kind}, mean ({spread})"
    for d in report.duplicates:
        yield f"{d.repeated:,}", f"duplicate {d.kind} texts"
        yield f"{d.near:,}", f"nearly equal {d.kind} texts"
    for measured in report.diversities:
        sample = f"of {measured.sampled:,} {measured.kind} texts, {measured.label}"
        if measured.aps is not None:
            yield f"{measured.aps:.3f}", f"average pairwise similarity {sample}"
        yield f"{measured.ingf:,.0f}", f"inter-sample n-gram frequency {sample}"
    for c in report.contaminations:
        yield f"{c.matching:,}", f"of {c.texts:,} {c.kind} texts match {c.evaluation}, in whole or in part"
    for reason, records in (report.removed or {}).items():
        yield f"{records:,}", f"records removed: {reason}"
    if report.agreement is not None:
        yield from _kappas(report.agreement)
    if cost is not None:
        yield f"{cost.total.prompt_tokens + cost.total.completion_tokens:,}", "tokens"
        if cost.total.usd is not None:
            yield f"{cost.total.usd:,.2f}", "USD"
        if cost.usd_per_1000_kept is not None:
            yield f"{cost.usd_per_1000_kept:,.2f}", "USD per 1,000 kept records"
        for name, seconds in list(cost.latency_s.items())[-1:]:
            yield f"{seconds:.2f}", f"{name} latency of the requests (s)"


def _kappas(study: AgreementStudy) -> Iterator[tuple[str, str]]:
    for pair in study.pairs:
        yield _kappa(pair.kappa, f"Cohen's kappa of {pair.one} and {pair.other} on {pair.items:,} items")
    for rater in study.llm_raters:
        answered = f"{rater.answered:,} of {study.items:,} items"
        yield _kappa(rater.kappa, f"mean Cohen's kappa of {rater.rater} ({rater.model}), {answered}")
    if len(study.references) > 1:
        yield _kappa(study.among_references, "mean Cohen's kappa among the reference raters")
    yield _kappa(study.fleiss, "Fleiss' kappa of all raters")


def _kappa(kappa: Kappa, meaning: str) -> tuple[str, str]:
    if kappa.value is None:
        return "undefined", meaning
    return f"{kappa.value:.3f}", f"{meaning} ({kappa.low:.3f} to {kappa.high:.3f})"


def _headline(funnel: Funnel) -> str:
    if funnel.seeds is None:
        return f"analyze: {funnel.kept:,} records"
    lost = f"{funnel.rejected:,} rejected, {funnel.dead_letter:,} dead letters"
    return f"analyze: {funnel.seeds:,} seeds: {funnel.kept:,} kept, {lost}"
