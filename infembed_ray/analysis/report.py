"""The quality report of a set of InF-IR records: JSON, an HTML page, and a few printed lines."""

from __future__ import annotations

from dataclasses import asdict

from infembed_ray.analysis import material, page
from infembed_ray.analysis.funnel import Funnel
from infembed_ray.analysis.summary import Summary, summarise
from infembed_ray.config import AnalyzeSettings
from infembed_ray.progress import say
from infembed_ray.storage import Published, Step, existing, write_json

REPORT_FILE = "report.json"
PAGE_FILE = "report.html"

PRINTED = 5
"""Reasons of each kind that are printed; the files have all."""


def run(settings: AnalyzeSettings) -> Published:
    """Analyse records and publish `report.json` and `report.html`.

    Raises:
        InputError: the records cannot be read, or the output cannot be written.
    """
    path = existing(settings.records, "records")
    step = Step("analyze", settings, settings.output, {"records": path})
    if done := step.finished():
        return done
    summary = summarise(material.read(path, "records"))
    with step.publish() as staging:
        write_json(staging.path / REPORT_FILE, asdict(summary))
        (staging.path / PAGE_FILE).write_text(page.render(summary, settings.records), encoding="utf-8")
        staging.counts = {
            "kept": summary.funnel.kept,
            "rejected": summary.funnel.rejected,
            "dead_letter": summary.funnel.dead_letter,
        }
    say(as_text(summary))
    return step.published()


def as_text(summary: Summary) -> str:
    """The summary in a few lines: a number each, and what it counts."""
    funnel = summary.funnel
    lines = [_headline(funnel)]
    if funnel.unaccounted:
        lines.append(_line(f"{funnel.unaccounted:,}", "seeds are in none of the three: this output is damaged"))
    lines += [_line(f"{loss.rows:,}", f"rejected at {loss.step}: {loss.why}") for loss in funnel.rejections[:PRINTED]]
    lines += [_line(f"{loss.rows:,}", f"dead letters at {loss.step}: {loss.why}") for loss in funnel.errors[:PRINTED]]
    lines += [_line(f"{100 * v.right / v.judged:.1f}", f"% pass the judge, {v.scenario}") for v in summary.verdicts]
    lines += [
        _line(f"{n.mean:.1f}", f"words, mean {n.kind} ({n.p5:.0f} to {n.p95:.0f}; the paper's set: {n.paper_mean})")
        for n in summary.lengths
        if n.column is None
    ]
    lines += [_line(f"{d.repeated:,}", f"{d.kind} texts that stand more than once") for d in summary.duplicates]
    if summary.cost is not None:
        total, per_kept = summary.cost.total, summary.cost.usd_per_1000_kept
        lines.append(_line(f"{total.prompt_tokens + total.completion_tokens:,}", "tokens"))
        if total.usd is not None:
            lines.append(_line(f"{total.usd:,.2f}", "USD"))
        if per_kept is not None:
            lines.append(_line(f"{per_kept:,.2f}", "USD per 1,000 kept records"))
    return "\n".join(lines)


def _headline(funnel: Funnel) -> str:
    if funnel.seeds is None:
        return f"analyze: {funnel.kept:,} records"
    lost = f"{funnel.rejected:,} rejected, {funnel.dead_letter:,} dead letters"
    return f"analyze: {funnel.seeds:,} seeds: {funnel.kept:,} kept, {lost}"


def _line(number: str, what: str) -> str:
    return f"{number:>11}  {what}"
