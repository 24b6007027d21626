"""`infembed analyze`: the quality report of InF-IR records as JSON, as HTML and as printed lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from infembed_ray.analysis import agreement, contamination, gates, inputs, page, texts
from infembed_ray.analysis.coverage import Coverage
from infembed_ray.analysis.diversity import Diversity
from infembed_ray.analysis.funnel import Funnel
from infembed_ray.analysis.page import Summary, summarise
from infembed_ray.analysis.texts import TextSet, compare
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.progress import counted, say, track
from infembed_ray.records.tables import write_lines
from infembed_ray.storage import durable
from infembed_ray.storage.dry_run import state
from infembed_ray.storage.places import Place, place_of, read_binary
from infembed_ray.storage.steps import Published, Step, find_input

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder

REPORT_FILE = "report.json"
PAGE_FILE = "report.html"
SHEET_FILE = "annotate.jsonl"
KEY_FILE = "annotate_key.jsonl"

EMBEDDED_AT_ONCE = 1024
"""Texts per report of progress."""
PRINTED = 5
"""Printed reasons of each kind; the files have all."""


def run(settings: AnalyzeSettings) -> Published:
    """Analyse records, alone or with other sets; publish `report.json` and `report.html`.

    With `annotate`, also publish `annotate.jsonl`, items for annotators, and `annotate_key.jsonl`.

    Raises:
        InputError: an input or the encoder cannot be read, or the output cannot be written.
        GateError: the records do not keep the limits of `gates`; the report is published.
    """
    files, step = prepare(settings)
    done = step.finished() or _publish(settings, files, step)
    gates.require(settings.gates, read_binary(place_of(done.address) / REPORT_FILE).decode("utf-8"))
    return done


def _publish(settings: AnalyzeSettings, files: Mapping[str, Place], step: Step) -> Published:
    found, raters, others, evaluations = read(settings, files)
    sets = [texts.from_records(settings.label, found.kept), *others]
    contaminations: list[contamination.Contamination] = []
    for label, theirs in evaluations.items():
        contaminations += contamination.contamination(label, theirs, sets[0].texts, settings.ngram)
    encoder = _encoder(settings)
    with step.publish() as staging:
        diversities, coverages = _compare(sets, encoder, settings)
        agreements = agreement.agreements(raters, settings.bootstrap, settings.seed)
        summary = summarise(found, diversities, coverages, agreements, contaminations)
        durable.replace_json(staging.path / REPORT_FILE, _plain(summary))
        (staging.path / PAGE_FILE).write_text(page.render(summary, settings.records, settings.ngram), encoding="utf-8")
        if settings.annotate:
            items, key = agreement.sheet(found.kept, settings.annotate, settings.seed)
            write_lines(staging.path / SHEET_FILE, items)
            write_lines(staging.path / KEY_FILE, key)
        staging.counts = {name: getattr(summary.funnel, name) for name in ("kept", "rejected", "dead_letter")}
    say(as_text(summary))
    return step.published()


def prepare(settings: AnalyzeSettings) -> tuple[dict[str, Place], Step]:
    """Locate the files that the settings name, and identify the run.

    Returns:
        Name of the setting -> file; and the step.

    Raises:
        InputError: an input does not exist, two sets have the same label, or the output cannot be written.
    """
    named = {f"compare.{label}": (file, f"compare.{label}") for label, file in settings.compare.items()}
    named |= {f"evaluations.{label}": (file, f"evaluations.{label}") for label, file in settings.evaluations.items()}
    named |= {f"agreement.{n}": (file, "agreement") for n, file in enumerate(settings.agreement)}
    named["records"] = (settings.records, "records")
    _, (encoder_paths, encoder_names), *paths = check_all(
        lambda: _check_labels(settings),
        lambda: _encoder_identity(settings),
        *(partial(find_input, file, setting) for file, setting in named.values()),
    )
    files = dict(zip(named, paths, strict=True))
    return files, Step("analyze", settings, settings.output, {**files, **encoder_paths}, encoder_names)


def read(settings: AnalyzeSettings, files: Mapping[str, Place]) -> tuple[inputs.RecordSet, Any, list[TextSet], Any]:
    """Read all inputs: the records, the answers of raters, the sets to compare with, and label -> evaluation set.

    Raises:
        InputError: one cannot be read, or has other columns.
    """
    answers = [file for name, file in files.items() if name.startswith("agreement.")]
    others = {name: file for name, file in files.items() if name.startswith("compare.")}
    evaluations = {name: file for name, file in files.items() if name.startswith("evaluations.")}
    columns = settings.compare_columns
    found, raters, *sets = check_all(
        lambda: inputs.read(files["records"], "records"),
        lambda: agreement.read(answers, "agreement") if answers else {},
        *(partial(texts.read, n.removeprefix("compare."), file, n, columns) for n, file in others.items()),
        *(partial(contamination.read, file, name) for name, file in evaluations.items()),
    )
    labels = [name.removeprefix("evaluations.") for name in evaluations]
    return found, raters, sets[: len(others)], dict(zip(labels, sets[len(others) :], strict=True))


def _check_labels(settings: AnalyzeSettings) -> None:
    if settings.label in settings.compare:
        raise InputError(f"compare.{settings.label}: is also the label of the records; choose another label")


def _encoder_identity(settings: AnalyzeSettings) -> tuple[dict[str, Place], dict[str, str]]:
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
    """Return the summary without the points of the plots, which only the page has."""
    plain = asdict(summary)
    for covered in (each for coverage in plain["coverages"] for each in coverage["sets"]):
        del covered["points"]
    return plain


def as_text(summary: Summary) -> str:
    """Format the summary as lines of a number and its meaning."""
    return "\n".join([_headline(summary.funnel), *(f"{number:>11}  {meaning}" for number, meaning in _lines(summary))])


def _lines(summary: Summary) -> Iterator[tuple[str, str]]:
    funnel, cost = summary.funnel, summary.cost
    if funnel.unaccounted:
        yield f"{funnel.unaccounted:,}", "seeds are neither kept, rejected nor dead letters: this output is damaged"
    for name, losses in (("rejected", funnel.rejections), ("dead letters", funnel.errors)):
        for loss in losses[:PRINTED]:
            yield f"{loss.rows:,}", f"{name} at {loss.step}: {loss.why}"
    if funnel.complements:
        yield f"{funnel.complements_fit:,}", f"of {funnel.complements:,} complements passed"
    for v in summary.verdicts:
        yield f"{100 * v.right / v.judged:.1f}", f"% pass the judge, {v.scenario}"
    for size in summary.sizes:
        for kind, number in size.texts.items():
            yield f"{number:,}", f"distinct {kind} texts{f' of {size.source}' if size.source else ''}"
    for n in summary.lengths:
        if n.column is None:
            spread = f"p5 {n.p5:.0f}, p95 {n.p95:.0f}; the paper's set: {n.paper_mean}"
            yield f"{n.mean:.1f}", f"words per {n.kind}, mean ({spread})"
    for d in summary.duplicates:
        yield f"{d.repeated:,}", f"duplicate {d.kind} texts"
        yield f"{d.near:,}", f"nearly equal {d.kind} texts"
    for measured in summary.diversities:
        sample = f"of {measured.sampled:,} {measured.kind} texts, {measured.label}"
        if measured.aps is not None:
            yield f"{measured.aps:.3f}", f"average pairwise similarity {sample}"
        yield f"{measured.ingf:,.0f}", f"inter-sample n-gram frequency {sample}"
    for a in summary.agreements:
        if a.kappa is not None:
            raters = f"{a.one} and {a.other} on {a.items:,} items"
            yield f"{a.kappa:.3f}", f"Cohen's kappa of {raters} ({a.low:.3f} to {a.high:.3f})"
    for c in summary.contaminations:
        yield f"{c.equal + c.overlapping:,}", f"of {c.texts:,} {c.kind} texts match {c.evaluation}, in whole or in part"
    if cost is not None:
        yield f"{cost.total.prompt_tokens + cost.total.completion_tokens:,}", "tokens"
        if cost.total.usd is not None:
            yield f"{cost.total.usd:,.2f}", "USD"
        if cost.usd_per_1000_kept is not None:
            yield f"{cost.usd_per_1000_kept:,.2f}", "USD per 1,000 kept records"
        for name, seconds in list(cost.latency_s.items())[-1:]:
            yield f"{seconds:.2f}", f"{name} latency of the requests (s)"


def _headline(funnel: Funnel) -> str:
    if funnel.seeds is None:
        return f"analyze: {funnel.kept:,} records"
    lost = f"{funnel.rejected:,} rejected, {funnel.dead_letter:,} dead letters"
    return f"analyze: {funnel.seeds:,} seeds: {funnel.kept:,} kept, {lost}"


def describe(settings: AnalyzeSettings) -> Iterator[str]:
    """Yield what a run would do, line by line; InputError as `prepare`."""
    files, step = prepare(settings)
    if (yield from state(step)):
        return
    found, _, others, evaluations = read(settings, files)
    yield f"records: {len(found.kept):,} kept, {len(found.rejected):,} rejected, {len(found.dead_letter):,} dead letters"
    if others or evaluations:
        yield f"compared with {counted(len(others), 'other set')} and {counted(len(evaluations), 'evaluation set')}"
