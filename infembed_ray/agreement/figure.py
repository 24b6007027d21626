"""Figure 4 of the paper: how well raters agree with the reference raters, as values, lines, CSV and one HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, product

from infembed_ray.analysis.agreement import Agreement, Estimate, agreements, fleiss_kappa, mean_cohen_kappa
from infembed_ray.progress import counted
from infembed_ray.reporting import page
from infembed_ray.reporting.charts import Scale

Answers = Mapping[str, Mapping[str, str]]
"""Rater -> item_id -> answer."""


@dataclass(frozen=True)
class Bar:
    """One LLM rater.

    Attributes:
        answered: number of items that it answered.
        kappa: mean of Cohen's kappas with the reference raters.
    """

    rater: str
    model: str
    answered: int
    kappa: Estimate


@dataclass(frozen=True)
class Figure:
    """What the run found.

    Attributes:
        items: number of items.
        references: labels of the reference raters.
        among_references: mean of Cohen's kappas of every two of them; undefined for a single one.
        bars: LLM raters, best first.
        fleiss_references, fleiss_all: Fleiss' kappa of the reference raters, and of all raters.
        pairs: every two raters.
    """

    items: int
    references: list[str]
    among_references: Estimate
    bars: list[Bar]
    fleiss_references: Estimate
    fleiss_all: Estimate
    pairs: list[Agreement]


def figure(
    items: int, references: Answers, rated: Answers, models: Mapping[str, str], resamples: int, seed: int
) -> Figure:
    """Compare LLM raters with the reference raters.

    Args:
        references: answers of the reference raters, at least one.
        rated: answers of the LLM raters.
        models: LLM rater -> its model.
    """
    everyone = {**references, **rated}
    undefined = Estimate(None, None, None)
    pairs = {rater: list(product([rater], references)) for rater in rated}
    bars = [
        Bar(rater, models[rater], len(rated[rater]), mean_cohen_kappa(pairs[rater], everyone, resamples, seed))
        for rater in rated
    ]
    of_references = list(combinations(references, 2))
    several = len(references) > 1
    return Figure(
        items=items,
        references=list(references),
        among_references=mean_cohen_kappa(of_references, references, resamples, seed) if several else undefined,
        bars=sorted(bars, key=lambda bar: 2.0 if bar.kappa.kappa is None else -bar.kappa.kappa),
        fleiss_references=fleiss_kappa(references, resamples, seed) if several else undefined,
        fleiss_all=fleiss_kappa(everyone, resamples, seed),
        pairs=agreements(everyone, resamples, seed),
    )


def as_text(found: Figure) -> str:
    """Format the figure as lines of a number and its meaning."""
    with_whom = f"with {counted(len(found.references), 'reference rater')}"
    lines = [f"agreement: {counted(found.items, 'item')}, {counted(len(found.bars), 'LLM rater')} {with_whom}"]
    for bar in found.bars:
        missing = f"; {found.items - bar.answered} items without an answer" if bar.answered < found.items else ""
        lines.append(_line(bar.kappa, f"mean Cohen's kappa of {bar.rater} ({bar.model}) {with_whom}", missing))
    if len(found.references) > 1:
        lines.append(_line(found.among_references, "mean Cohen's kappa among the reference raters"))
        lines.append(_line(found.fleiss_references, "Fleiss' kappa of the reference raters"))
    lines.append(_line(found.fleiss_all, "Fleiss' kappa of all raters"))
    return "\n".join(lines)


def _line(estimate: Estimate, meaning: str, more: str = "") -> str:
    if estimate.kappa is None:
        return f"  undefined  {meaning}{more}"
    return f"{estimate.kappa:>11.3f}  {meaning} ({estimate.low:.3f} to {estimate.high:.3f}){more}"


def as_csv(found: Figure) -> str:
    """Format the bars as CSV; undefined kappas are empty."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["rater", "model", "answered", "kappa", "low", "high"])
    for bar in found.bars:
        table.writerow([bar.rater, bar.model, bar.answered, bar.kappa.kappa, bar.kappa.low, bar.kappa.high])
    among = found.among_references
    table.writerow(["among reference raters", "", found.items, among.kappa, among.low, among.high])
    return text.getvalue()


def render(found: Figure, source: str) -> str:
    """Render the page; `source` is the path of the items."""
    estimates = [*(bar.kappa for bar in found.bars), found.among_references, found.fleiss_references, found.fleiss_all]
    lows = [each.low for each in estimates if each.low is not None]
    lows += [pair.low for pair in found.pairs if pair.low is not None]
    return page.render(
        "infembed_ray.agreement", "report.html", found=found, source=source, scale=Scale(min([0.0, *lows]), 1.0)
    )
