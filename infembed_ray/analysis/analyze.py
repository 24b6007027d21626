"""`infembed analyze`: the quality report of InF-IR records, and on request the records that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from infembed_ray.analysis import agreement, clean, diversity, figures
from infembed_ray.analysis.agreement import Answers
from infembed_ray.analysis.diversity import TextSet
from infembed_ray.analysis.figures import RecordSet, Section
from infembed_ray.analysis.overlap import EvaluationTexts, contamination
from infembed_ray.analysis.report import as_html, as_text, shown_rows, summarise
from infembed_ray.config.analysis import AnalyzeGates, AnalyzeSettings
from infembed_ray.errors import GateError, InputError, check_all
from infembed_ray.modeling.checkpoint import Located, locate
from infembed_ray.progress import counted, say
from infembed_ray.records.tables import write_lines
from infembed_ray.storage import durable
from infembed_ray.storage.places import Place, place_of, read_json
from infembed_ray.storage.steps import Published, Step, find_input, output_state

if TYPE_CHECKING:
    from infembed_ray.analysis.raters import AgreementItem

REPORT_FILE = "report.json"
PAGE_FILE = "report.html"
SHEET_FILE = "annotate.jsonl"
KEY_FILE = "annotate_key.jsonl"
ANSWERS_FILE = "answers.jsonl"
"""The LLM raters' answers, in the format of `agreement.files`."""
LABEL = "records"
"""Label of the records in comparisons."""
_ROUNDING = 1e-9
"""A figure that equals its minimum may be rounded down."""


@dataclass(frozen=True)
class AnalysisInputs:
    """All that an analysis reads: records, sets to compare them with, label -> evaluation set, answers of the reference raters,
    and the items that LLM raters are asked."""

    records: RecordSet
    compared: list[TextSet]
    evaluations: dict[str, EvaluationTexts]
    references: Answers
    items: list[AgreementItem]


def run(settings: AnalyzeSettings) -> Published:
    """Analyse records, alone or with other sets; publish `report.json` and `report.html`.

    With `clean`, also publish the records that stay, `records.parquet`, and `removed.parquet`. With `annotate`, also publish
    `annotate.jsonl`, items for annotators, and `annotate_key.jsonl`. With LLM raters, also publish `answers.jsonl`.

    Raises:
        InputError: an input or the encoder cannot be read, no record would be left, LLM raters cannot be asked, or the output
            cannot be written.
        GateError: the records do not keep the limits of `gates`; the report is published.
    """
    files, step = prepare(settings)
    done = step.finished() or _publish(settings, files, step)
    if failed := list(failures(settings.gates, read_json(place_of(done.address) / REPORT_FILE))):
        raise GateError(*failed)
    limits = settings.gates.model_dump(exclude_none=True)
    return replace(done, gates={"figures": {f"gates.{name}": f">= {limit:g}" for name, limit in limits.items()}})


def failures(gates: AnalyzeGates, report: Section) -> Iterator[str]:
    """Yield a line for each limit that a report does not keep. A figure without a value fails too."""
    seeds, kept = report["funnel"]["seeds"], report["funnel"]["kept"]
    figures = [("min_kept", "the share of seeds kept", kept / seeds if seeds else None)]
    figures += [
        ("min_judged_right", f"the judge's share of right answers, {v['scenario']},", v["right"] / v["judged"])
        for v in report["verdicts"]
    ] or [("min_judged_right", "the judge's share of right answers", None)]
    for setting, figure, value in figures:
        limit = getattr(gates, setting)
        if limit is not None and value is None:
            yield f"gates.{setting}={limit:g}: {figure} is unknown; analyze the output of `infembed synthesize`"
        elif limit is not None and value < limit - _ROUNDING:
            yield f"gates.{setting}={limit:g}: {figure} is {value:.4g}, must be at least {limit:g}"


def _publish(settings: AnalyzeSettings, files: Mapping[str, Place], step: Step) -> Published:
    given = read(settings, files)
    records = given.records
    embed = _encoder(settings)
    with step.publish() as staging:
        study = _agreement(given, settings, staging.path)
        contaminations, contaminated = [], {}
        for label, evaluation in given.evaluations.items():
            matches, contaminated[label] = contamination(label, evaluation, records.kept)
            contaminations += matches
        sets = [diversity.from_records(LABEL, records.kept), *given.compared]
        diversities, coverages = diversity.compare(sets, embed)
        removed = clean.removals(records.kept, contaminated) if settings.clean else {}
        if settings.clean and len(removed) == len(records.kept):
            raise InputError.of("clean", None, f"no record of {settings.records} would be left", "check evaluations")
        reasons = clean.write(staging.path, files["records"], removed) if settings.clean else None
        report = summarise(
            records,
            diversities=diversities,
            coverages=coverages,
            contaminations=contaminations,
            agreement=study,
            removed=reasons,
        )
        html = as_html(report, shown_rows(records, removed), settings.records)
        (staging.path / PAGE_FILE).write_text(html, encoding="utf-8")
        for covered in (each for coverage in coverages for each in coverage["sets"]):
            del covered["points"]  # only the page has the plots
        durable.replace_json(staging.path / REPORT_FILE, report)
        if settings.annotate:
            items, key = agreement.sheet(records.kept, settings.annotate)
            write_lines(staging.path / SHEET_FILE, items)
            write_lines(staging.path / KEY_FILE, key)
        staging.counts = {name: report["funnel"][name] for name in ("kept", "rejected", "dead_letter")}
        if reasons is not None:
            staging.counts["kept"] -= len(removed)
            staging.counts |= reasons
    say(as_text(report))
    return step.published()


def _agreement(given: AnalysisInputs, settings: AnalyzeSettings, directory: Any) -> Section | None:
    """Compare the raters, LLM raters included, if there are any."""
    if not given.references:
        return None
    rated: dict[str, dict[str, str]] = {}
    if given.items:
        from infembed_ray.analysis import raters

        rated = raters.ask(given.items, settings)
        answers = [{"item_id": i.id, **{name: rated[name].get(i.id) for name in rated}} for i in given.items]
        write_lines(directory / ANSWERS_FILE, answers)
    models = {name: model.model for name, model in settings.agreement.raters.items()}
    return agreement.study(given.references, rated, models)


def prepare(settings: AnalyzeSettings) -> tuple[dict[str, Place], Step]:
    """Locate the files that the settings name, and identify the run.

    Returns:
        Name of the setting -> file; and the step.

    Raises:
        InputError: an input does not exist, a set has the label of the records, or the output cannot be written.
    """
    paths_by_setting = {f"compare.{label}": file for label, file in settings.compare.items()}
    paths_by_setting |= {f"evaluations.{label}": file for label, file in settings.evaluations.items()}
    paths_by_setting |= {f"agreement.files.{number}": file for number, file in enumerate(settings.agreement.files)}
    paths_by_setting["records"] = settings.records
    if LABEL in settings.compare:
        raise InputError.of(f"compare.{LABEL}", None, "is the label of the records", "choose another label")
    encoder, *paths = check_all(
        lambda: Located("", {}, {}) if settings.encoder is None else locate(settings.encoder, "encoder"),
        *(partial(find_input, file, setting) for setting, file in paths_by_setting.items()),
    )
    files = dict(zip(paths_by_setting, paths, strict=True))
    prompts: dict[str, Place] = {}
    if settings.agreement.raters:
        from infembed_ray.synthesis import templates

        prompts["prompts"] = templates.DIRECTORY
    return files, Step("analyze", settings, settings.output, {**files, **encoder.inputs, **prompts}, encoder.names)


def read(settings: AnalyzeSettings, files: Mapping[str, Place]) -> AnalysisInputs:
    """Read all inputs, and check what can be checked before a request to an LLM.

    Raises:
        InputError: an input cannot be read or has other columns, or LLM raters cannot be asked.
    """

    def of_section(prefix: str) -> dict[str, Place]:
        return {name.removeprefix(prefix): file for name, file in files.items() if name.startswith(prefix)}

    compared, evaluations = of_section("compare."), of_section("evaluations.")
    tasks: list[Callable[[], Any]] = [
        lambda: figures.read(files["records"], "records"),
        lambda: _rated(settings, list(of_section("agreement.files.").values())),
        *(partial(diversity.read, label, file, f"compare.{label}") for label, file in compared.items()),
        *(partial(EvaluationTexts.read, file, f"evaluations.{label}") for label, file in evaluations.items()),
    ]
    records, (references, items), *sets = check_all(*tasks)
    texts = dict(zip(evaluations, sets[len(compared) :], strict=True))
    return AnalysisInputs(records, sets[: len(compared)], texts, references, items)


def _rated(settings: AnalyzeSettings, files: Sequence[Place]) -> tuple[Answers, list[AgreementItem]]:
    """Read the reference answers, and prepare the LLM raters."""
    if not files and not settings.agreement.raters:
        return {}, []
    references = agreement.read(files, "agreement.files", least=1 if settings.agreement.raters else 2)
    if not settings.agreement.raters:
        return references, []
    from infembed_ray.analysis import raters  # imports the LLM client

    return references, raters.prepare(settings, files, references)


def _encoder(settings: AnalyzeSettings) -> diversity.Embed | None:
    if settings.encoder is None:
        return None
    from infembed_ray.modeling.encoder import InstructionEncoder  # imports torch

    return InstructionEncoder.from_pretrained(settings.encoder).encode_passages


def describe(settings: AnalyzeSettings) -> Iterator[str]:
    """Yield what a run would do, line by line; InputError as `prepare`."""
    files, step = prepare(settings)
    if (yield from output_state(step)):
        return
    given = read(settings, files)
    records = given.records
    yield f"records: {len(records.kept):,} kept, {len(records.rejected):,} rejected, {len(records.dead_letter):,} dead letters"
    if given.compared or given.evaluations:
        others = counted(len(given.compared), "other set")
        yield f"compared with {others} and {counted(len(given.evaluations), 'evaluation set')}"
    if given.references:
        yield f"agreement: {counted(len(given.references), 'reference rater')}"
    if given.items:
        calls = len(given.items) * len(settings.agreement.raters)
        yield f"calls: {calls:,} at most, if no answer is malformed or journaled"
