"""The quality report: as JSON, as printed lines, and as one self-contained HTML file whose rows a reader can browse."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from heapq import nsmallest
from typing import Any

from infembed_ray.analysis.clean import Removal
from infembed_ray.analysis.figures import RecordSet, Section, cost, funnel, lengths, verdicts
from infembed_ray.analysis.overlap import NGRAM, THRESHOLD, duplicates
from infembed_ray.reporting import page
from infembed_ray.reporting.charts import Scale

PRINTED = 5
"""Printed reasons of each kind; the files have all."""
LONGEST_LIST = 20
"""Rows per list of the page; it gives the number of the others."""
SHOWN = 500
"""Rows of each kind in the page: about 1 MB."""
TEXTS: Mapping[str, str] = {
    "query_positive": "Query",
    "instruction_positive": "Instruction",
    "document_positive": "Passage (positive)",
    "instruction_negative": "Poisoned instruction",
    "hard_negative_document_1": "Its passage (negative instruction)",
    "query_negative": "Poisoned query",
    "hard_negative_document_2": "Its passage (negative query)",
    "complement": "Complement instruction",
}
"""Column -> name of its text; in brackets is the judge's name of the passage."""


def summarise(records: RecordSet, **findings: Any) -> Section:
    """Analyse records.

    Args:
        findings: `diversities`, `coverages` and `contaminations` (lists of sections), `agreement` (a study) and `removed`
            (reason -> records that `clean` removed), which are added as they are.
    """
    kept = records.kept
    return {
        "funnel": funnel(records),
        "verdicts": verdicts(records),
        "lengths": lengths(kept),
        "topics": dict(Counter(record.topic for record in kept if record.topic is not None).most_common()),
        "sources": dict(Counter(record.source for record in kept).most_common()),
        "duplicates": duplicates(kept),
        "cost": cost(records),
        "cheap_judge": records.manifest.get("cheap_judge"),
        **{"diversities": [], "coverages": [], "contaminations": [], "agreement": None, "removed": None},
        **findings,
    }


# --------------------------------------------------------------------------------------------------------------- text


def as_text(report: Section) -> str:
    """Format the report as lines of a number and its meaning."""
    counts = report["funnel"]
    headline = f"analyze: {counts['kept']:,} records"
    if counts["seeds"] is not None:
        lost = f"{counts['rejected']:,} rejected, {counts['dead_letter']:,} dead letters"
        headline = f"analyze: {counts['seeds']:,} seeds: {counts['kept']:,} kept, {lost}"
    return "\n".join([headline, *(f"{number:>11}  {meaning}" for number, meaning in _lines(report))])


def _lines(report: Section) -> Iterator[tuple[str, str]]:
    counts, spent = report["funnel"], report["cost"]
    if counts["unaccounted"]:
        yield f"{counts['unaccounted']:,}", "seeds are neither kept, rejected nor dead letters: this output is damaged"
    for name, losses in (("rejected", counts["rejections"]), ("dead letters", counts["errors"])):
        for loss in losses[:PRINTED]:
            yield f"{loss['rows']:,}", f"{name} at {loss['step']}: {loss['why']}"
    if counts["complements"]:
        yield f"{counts['complements_fit']:,}", f"of {counts['complements']:,} complements passed"
    for v in report["verdicts"]:
        yield f"{100 * v['right'] / v['judged']:.1f}", f"% pass the judge, {v['scenario']}"
    for d in report["duplicates"]:
        yield f"{d['repeated']:,}", f"duplicate {d['kind']} texts"
        yield f"{d['near']:,}", f"nearly equal {d['kind']} texts"
    for c in report["contaminations"]:
        yield f"{c['matching']:,}", f"of {c['texts']:,} {c['kind']} texts match {c['evaluation']}, in whole or in part"
    for reason, number in (report["removed"] or {}).items():
        yield f"{number:,}", f"records removed: {reason}"
    if report["agreement"] is not None:
        yield from _kappas(report["agreement"])
    if spent is not None:
        yield f"{spent['total']['prompt_tokens'] + spent['total']['completion_tokens']:,}", "tokens"
        if spent["total"]["usd"] is not None:
            yield f"{spent['total']['usd']:,.2f}", "USD"
        if spent["usd_per_1000_kept"] is not None:
            yield f"{spent['usd_per_1000_kept']:,.2f}", "USD per 1,000 kept records"


def _kappas(study: Section) -> Iterator[tuple[str, str]]:
    kappas = [
        (pair["kappa"], f"Cohen's kappa of {pair['one']} and {pair['other']} on {pair['items']:,} items")
        for pair in study["pairs"]
    ]
    for rater in study["llm_raters"]:
        answered = f"{rater['answered']:,} of {study['items']:,} items"
        kappas.append((rater["kappa"], f"mean Cohen's kappa of {rater['rater']} ({rater['model']}), {answered}"))
    if len(study["references"]) > 1:
        kappas.append((study["among_references"], "mean Cohen's kappa among the reference raters"))
    for kappa, meaning in kappas:
        interval = "" if kappa["value"] is None else f" ({kappa['low']:.3f} to {kappa['high']:.3f})"
        yield "undefined" if kappa["value"] is None else f"{kappa['value']:.3f}", f"{meaning}{interval}"


# --------------------------------------------------------------------------------------------------------------- page


def as_html(report: Section, rows: Sequence[Section], source: str) -> str:
    """Render the quality report of the records `source`, with rows to browse."""
    study, measured = report["agreement"], report["diversities"]
    kappas = [] if study is None else [each["kappa"] for each in (*study["pairs"], *study["llm_raters"])]
    return page.render(
        "infembed_ray.analysis",
        "report.html",
        summary=report,
        rows=rows,
        shown=SHOWN,
        source=source,
        ngram=NGRAM,
        threshold=THRESHOLD,
        length_scale=lambda words: Scale(0.0, max(words["p95"], words["mean"], words["paper_mean"])),
        kappa_scale=Scale(min([0.0, *(kappa["low"] for kappa in kappas if kappa["low"] is not None)]), 1.0),
        most_aps=max((d["aps"] for d in measured if d["aps"] is not None), default=None),
        most_ingf={d["kind"]: max(e["ingf"] for e in measured if e["kind"] == d["kind"]) for d in measured},
        others=lambda coverage, covered: [p for of in coverage["sets"] if of is not covered for p in of["points"]],
        dot_size=lambda covered: round(max(1.2, min(4.0, 64 / len(covered["points"]) ** 0.5)), 1),
        longest_list=LONGEST_LIST,
    )


def shown_rows(records: RecordSet, removed: Mapping[int, Removal]) -> list[Section]:
    """Choose the rows of each kind whose ids have the smallest SHA-256, at most SHOWN.

    Returns:
        Per row: id, kind (kept, removed, rejected or dead letter), the step, reason and detail of its end, source, topic, its
        texts by their names, and the judge's `picks` by scenario.
    """
    by_kind: dict[str, list[Section]] = {}
    for row in _rows(records, removed):
        by_kind.setdefault(row["kind"], []).append(row)
    drawn = (nsmallest(SHOWN, rows, key=lambda row: sha256(row["id"].encode()).digest()) for rows in by_kind.values())
    return [row for rows in drawn for row in rows]


def _rows(records: RecordSet, removed: Mapping[int, Removal]) -> Iterator[Section]:
    complements = {row["id"]: row.get("instruction") for row in records.complements}
    provenance = records.provenance["kept"]
    for number, record in enumerate(records.kept):
        more = {
            "provenance": provenance[number] if len(provenance) == len(records.kept) else None,
            "complement": complements.get(record.id),
        }
        if removal := removed.get(number):
            yield _row("removed", vars(record) | more, "clean", removal.reason, removal.detail)
        else:
            yield _row("kept", vars(record) | more)
    for row in records.rejected:
        yield _row("rejected", row, row["step"], row["reason"])
    for row in records.dead_letter:
        yield _row("dead letter", row, row["step"], row["error"])


def _row(
    kind: str, row: Mapping[str, Any], step: str | None = None, reason: str | None = None, detail: str | None = None
) -> Section:
    verdicts = (row.get("provenance") or {}).get("verdicts") or {}
    return {
        "id": str(row["id"]),
        "kind": kind,
        "step": step,
        "reason": reason,
        "detail": detail,
        "source": row.get("source"),
        "topic": row.get("topic"),
        "texts": {name: row[column] for column, name in TEXTS.items() if row.get(column)},
        "picks": {scenario: pick for scenario, pick in verdicts.items() if pick is not None},
    }
