"""The quality report of a set of InF-IR records: JSON, an HTML page, and a few printed lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infembed_ray.analysis import agreement, contamination, material, page, texts
from infembed_ray.analysis.comparison import compare
from infembed_ray.analysis.coverage import Coverage
from infembed_ray.analysis.diversity import Diversity
from infembed_ray.analysis.funnel import Funnel
from infembed_ray.analysis.summary import Summary, summarise
from infembed_ray.analysis.texts import TextSet
from infembed_ray.config import AnalyzeSettings
from infembed_ray.errors import InputError
from infembed_ray.progress import say, track
from infembed_ray.storage import Published, Step, existing, write_json

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder

REPORT_FILE = "report.json"
PAGE_FILE = "report.html"
SHEET_FILE = "annotate.jsonl"
KEY_FILE = "annotate_key.jsonl"

EMBEDDED_AT_ONCE = 1024
"""Texts between two reports of progress."""
PRINTED = 5
"""Reasons of each kind that are printed; the files have all."""


def run(settings: AnalyzeSettings) -> Published:
    """Analyse records, alone or beside other sets, and publish `report.json` and `report.html`.

    With `annotate`, also `annotate.jsonl` (items for annotators) and `annotate_key.jsonl`.

    Raises:
        InputError: the records, another input or the encoder cannot be read, or the output cannot be written.
    """
    if settings.label in settings.compare:
        raise InputError(f"compare.{settings.label}: is what the records are called; choose another label")
    path = existing(settings.records, "records")
    others = {f"compare.{label}": existing(other, f"compare.{label}") for label, other in settings.compare.items()}
    evaluations = {
        f"evaluations.{label}": existing(other, f"evaluations.{label}") for label, other in settings.evaluations.items()
    }
    answers = {f"agreement.{number}": existing(file, "agreement") for number, file in enumerate(settings.agreement)}
    encoder_paths, encoder_names = _encoder_identity(settings)
    inputs = {"records": path, **others, **evaluations, **answers, **encoder_paths}
    step = Step("analyze", settings, settings.output, inputs, encoder_names)
    if done := step.finished():
        return done

    found = material.read(path, "records")
    raters = agreement.read(list(answers.values()), "agreement") if answers else {}
    sets = [texts.of_records(settings.label, found.kept)]
    sets += [
        texts.read(name.removeprefix("compare."), other, name, settings.compare_columns)
        for name, other in others.items()
    ]
    contaminations = [
        one
        for name, file in evaluations.items()
        for one in contamination.contamination(
            name.removeprefix("evaluations."), contamination.read(file, name), sets[0].texts, settings.ngram
        )
    ]
    encoder = _encoder(settings)
    with step.publish() as staging:
        diversities, coverages = _compare(sets, encoder, settings)
        agreements = agreement.agreements(raters, settings.bootstrap, settings.seed)
        summary = summarise(found, diversities, coverages, agreements, contaminations)
        write_json(staging.path / REPORT_FILE, _plain(summary))
        (staging.path / PAGE_FILE).write_text(page.render(summary, settings.records, settings.ngram), encoding="utf-8")
        if settings.annotate:
            items, key = agreement.sheet(found.kept, settings.annotate, settings.seed)
            _write_lines(staging.path / SHEET_FILE, items)
            _write_lines(staging.path / KEY_FILE, key)
        staging.counts = {
            "kept": summary.funnel.kept,
            "rejected": summary.funnel.rejected,
            "dead_letter": summary.funnel.dead_letter,
        }
    say(as_text(summary))
    return step.published()


def _encoder_identity(settings: AnalyzeSettings) -> tuple[dict[str, Path], dict[str, str]]:
    if settings.encoder is None:
        return {}, {}
    from infembed_ray.modeling.checkpoint import locate

    found = locate(settings.encoder, "encoder")
    return found.inputs, found.names


def _encoder(settings: AnalyzeSettings) -> InstructionEncoder | None:
    if settings.encoder is None:
        return None
    from infembed_ray.modeling.encoder import InstructionEncoder  # imports torch

    return InstructionEncoder.from_pretrained(settings.encoder)


def _compare(
    sets: Sequence[TextSet], encoder: InstructionEncoder | None, settings: AnalyzeSettings
) -> tuple[list[Diversity], list[Coverage]]:
    if encoder is None:
        return compare(sets, settings.sample, settings.seed, None)
    with track("analyze", None) as advance:

        def embed(sample: Sequence[str]) -> np.ndarray:
            parts = []
            for start in range(0, len(sample), EMBEDDED_AT_ONCE):
                parts.append(encoder.encode_passages(sample[start : start + EMBEDDED_AT_ONCE], settings.batch_tokens))
                advance(len(parts[-1]), "texts embedded")
            return np.concatenate(parts)

        return compare(sets, settings.sample, settings.seed, embed)


def _plain(summary: Summary) -> dict[str, Any]:
    """The summary without the points of the plots, which only the page shows."""
    plain = asdict(summary)
    for covered in (each for coverage in plain["coverages"] for each in coverage["sets"]):
        del covered["points"]
    return plain


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def as_text(summary: Summary) -> str:
    """The summary in a few lines: a number each, and what it counts."""
    funnel = summary.funnel
    lines = [_headline(funnel)]
    if funnel.unaccounted:
        lines.append(_line(f"{funnel.unaccounted:,}", "seeds are in none of the three: this output is damaged"))
    lines += [_line(f"{loss.rows:,}", f"rejected at {loss.step}: {loss.why}") for loss in funnel.rejections[:PRINTED]]
    lines += [_line(f"{loss.rows:,}", f"dead letters at {loss.step}: {loss.why}") for loss in funnel.errors[:PRINTED]]
    if funnel.complements:
        lines.append(_line(f"{funnel.complements_fit:,}", f"of {funnel.complements:,} complements are fit"))
    lines += [_line(f"{100 * v.right / v.judged:.1f}", f"% pass the judge, {v.scenario}") for v in summary.verdicts]
    lines += [
        _line(f"{n.mean:.1f}", f"words, mean {n.kind} ({n.p5:.0f} to {n.p95:.0f}; the paper's set: {n.paper_mean})")
        for n in summary.lengths
        if n.column is None
    ]
    lines += [_line(f"{d.repeated:,}", f"{d.kind} texts that stand more than once") for d in summary.duplicates]
    lines += [_line(f"{d.near:,}", f"{d.kind} texts that are nearly equal to another") for d in summary.duplicates]
    lines += [
        _line(f"{d.aps:.3f}", f"average pairwise similarity of {d.sampled:,} {d.kind} texts, {d.label}")
        for d in summary.diversities
        if d.aps is not None
    ]
    lines += [
        _line(f"{d.ingf:,.0f}", f"inter-sample n-gram frequency of {d.sampled:,} {d.kind} texts, {d.label}")
        for d in summary.diversities
    ]
    lines += [
        _line(
            f"{a.kappa:.3f}",
            f"Cohen's kappa of {a.one} and {a.other} on {a.items:,} items ({a.low:.3f} to {a.high:.3f})",
        )
        for a in summary.agreements
        if a.kappa is not None
    ]
    lines += [
        _line(f"{c.equal + c.overlapping:,}", f"of {c.texts:,} {c.kind} texts are in {c.evaluation} in whole or part")
        for c in summary.contaminations
    ]
    if summary.cost is not None:
        total, per_kept = summary.cost.total, summary.cost.usd_per_1000_kept
        lines.append(_line(f"{total.prompt_tokens + total.completion_tokens:,}", "tokens"))
        if total.usd is not None:
            lines.append(_line(f"{total.usd:,.2f}", "USD"))
        if per_kept is not None:
            lines.append(_line(f"{per_kept:,.2f}", "USD per 1,000 kept records"))
        for name, seconds in list(summary.cost.latency_s.items())[-1:]:
            lines.append(_line(f"{seconds:.2f}", f"s within which {name[1:]} % of the requests were answered"))
    return "\n".join(lines)


def _headline(funnel: Funnel) -> str:
    if funnel.seeds is None:
        return f"analyze: {funnel.kept:,} records"
    lost = f"{funnel.rejected:,} rejected, {funnel.dead_letter:,} dead letters"
    return f"analyze: {funnel.seeds:,} seeds: {funnel.kept:,} kept, {lost}"


def _line(number: str, what: str) -> str:
    return f"{number:>11}  {what}"
