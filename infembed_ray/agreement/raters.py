"""`infembed agreement`: LLM raters answer the items of an agreement study, and are compared with the reference raters.

A study has hundreds of items, so one process asks all raters. The prompt is the judge's, and answers go through the journal,
the limits and the budget of the LLM client, as in a synthesis.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from infembed_ray.agreement.figure import Answers, as_csv, as_text, figure, render
from infembed_ray.analysis import agreement
from infembed_ray.config.analysis import AgreementSettings
from infembed_ray.config.llm import ChatModel, Endpoint
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.llm import budget, dialects, prices
from infembed_ray.llm.chat import Complete, Dialect, RowFailure, RunFailure
from infembed_ray.llm.client import ChatClient, run_in_thread
from infembed_ray.llm.journal_store import JournalPlace, open_journal
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.rate_limits import Grant, LeaseReport
from infembed_ray.progress import Advance, counted, say, track
from infembed_ray.records import tables
from infembed_ray.storage import durable
from infembed_ray.storage.dry_run import state
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import Published, Step, find_input, folder_of, resolve_input
from infembed_ray.synthesis import preflight, templates
from infembed_ray.synthesis.judge import NONE, Lineup
from infembed_ray.synthesis.pipeline import rate

REPORT_FILE, PAGE_FILE, TABLE_FILE = "report.json", "report.html", "table.csv"
ANSWERS_FILE = "answers.jsonl"
"""The LLM raters' answers, in the format of `answers`."""
NOTHING_FITS = "0"
"""Answer of a rater who finds no right passage."""
PRINTED = 5
"""Printed reasons of missing answers."""


@dataclass(frozen=True)
class Item:
    """An item of the sheet, and its passages in order."""

    id: str
    instruction: str
    query: str
    passages: tuple[str, ...]

    @property
    def shown(self) -> Lineup:
        """The passages as the judge's candidates, named by their numbers."""
        return Lineup(tuple(str(number) for number in range(1, len(self.passages) + 1)), self.passages)


@dataclass(frozen=True)
class Study:
    """The resolved inputs of a run."""

    items: list[Item]
    references: Answers
    table: PriceTable
    journal: JournalPlace
    endpoints: Mapping[str, Endpoint]


def run(settings: AgreementSettings) -> Published:
    """Ask the LLM raters, compare them with the reference raters, and publish the report.

    Publishes `report.json`, `report.html`, `table.csv` and `answers.jsonl`. An interrupted run resumes from its journal.

    Raises:
        InputError: bad settings or inputs; endpoints that refuse or do not answer; a used-up budget; a rater with more items
            without an answer than `max_dead_letters`; or one whose mean kappa is below `min_kappa`, after its report is
            published.
    """
    step = prepare(settings)
    done = step.finished()
    if done is None:
        study = resolve(settings)
        with step.publish() as staging:
            try:
                rated, reasons = run_in_thread(_ask_all(study, settings))
            except RunFailure as failure:
                raise InputError(f"{failure}; nothing is published; the same command resumes") from failure
            _require_answers(len(study.items), rated, reasons, settings.max_dead_letters)
            models = {rater: model.model for rater, model in settings.raters.items()}
            found = figure(len(study.items), study.references, rated, models, settings.bootstrap, settings.seed)
            durable.replace_json(staging.path / REPORT_FILE, asdict(found))
            (staging.path / PAGE_FILE).write_text(render(found, settings.sheet), encoding="utf-8")
            (staging.path / TABLE_FILE).write_text(as_csv(found), encoding="utf-8")
            rows = [{"item_id": i.id, **{rater: rated[rater].get(i.id) for rater in rated}} for i in study.items]
            tables.write_lines(staging.path / ANSWERS_FILE, rows)
            staging.counts = {"items": len(study.items), "unanswered": reasons.total()}
            staging.facts["kappa"] = {bar.rater: bar.kappa.kappa for bar in found.bars}
        for reason, times in reasons.most_common(PRINTED):
            say(f"agreement: {times} without an answer: {reason}")
        say(as_text(found))
        done = step.published()
    _require_floor(done, settings)
    return done


def _require_answers(items: int, rated: Mapping[str, Mapping[str, str]], reasons: Counter[str], most: float) -> None:
    """Refuse raters that answered too few items for a kappa."""
    silent = {rater: items - len(answers) for rater, answers in rated.items() if (items - len(answers)) / items > most}
    if silent:
        raters = ", ".join(f"{rater} {missing} of {items} ({missing / items:.1%})" for rater, missing in silent.items())
        causes = "; ".join(f"{times} x {reason}" for reason, times in reasons.most_common(PRINTED))
        raise InputError(
            f"max_dead_letters={most:g}: too many items without an answer of {raters}, so nothing is published: {causes}. Mend the "
            "cause and run the same command, which asks again only what was not answered, or raise max_dead_letters"
        )


def _require_floor(done: Published, settings: AgreementSettings) -> None:
    """Refuse raters below `min_kappa`. The kappas are in the manifest, so a finished output refuses them again."""
    if settings.min_kappa is None:
        return
    floor = settings.min_kappa - 1e-9  # a kappa that equals it may be rounded down
    low = {rater: k for rater, k in done.manifest["kappa"].items() if k is None or k < floor}
    if low:
        found = ", ".join(f"{rater} {'undefined' if k is None else format(k, '.4f')}" for rater, k in low.items())
        raise InputError(
            f"min_kappa={settings.min_kappa:g}: mean kappa with the reference raters is lower ({found}); keep the present "
            f"judge, or lower the floor; the report is {done.address}"
        )


def prepare(settings: AgreementSettings) -> Step:
    """Locate the inputs, and identify the run.

    Raises:
        InputError: an input does not exist, or the output cannot be written.
    """
    sources = _sources(settings)
    found = check_all(*(partial(find_input, file, name) for name, file in sources.items()))
    places = dict(zip(sources, found, strict=True))
    if settings.prices is not None:
        places["prices"] = resolve_input(settings.prices, "prices")
    return Step("agreement", settings, settings.output, {**places, "prompts": templates.DIRECTORY})


def _sources(settings: AgreementSettings) -> dict[str, str]:
    return {"sheet": settings.sheet} | {f"answers.{number}": file for number, file in enumerate(settings.answers)}


def resolve(settings: AgreementSettings) -> Study:
    """Read the items and the reference answers, and check what can be checked before a request.

    Raises:
        InputError: a file is unreadable, there is no reference rater, a rater has the label of another one, an endpoint has
            no URL, or a limit cannot be kept.
    """
    endpoints, table = preflight.endpoints(settings), prices.load(settings.prices)
    models = {f"raters.{label}": model for label, model in settings.raters.items()}
    items, references, *_ = check_all(
        lambda: _items(find_input(settings.sheet, "sheet")),
        lambda: agreement.read([find_input(f, n) for n, f in _sources(settings).items()], "sheet, answers", least=1),
        lambda: preflight.check_urls(endpoints),
        lambda: _check_not_served(endpoints),
        lambda: preflight.check_limits(settings.limits, models, table),
    )
    for label in settings.raters:
        if label in references:
            raise InputError(f"raters.{label}: is also the label of a reference rater; choose another label")
    _check_answers(references, items, settings.sheet)
    return Study(items, references, table, folder_of(settings, "journal"), endpoints)


def _check_not_served(endpoints: Mapping[str, Endpoint]) -> None:
    for name, endpoint in endpoints.items():
        if endpoint.serve is not None:
            raise InputError(
                f"{name}.serve: only `infembed synthesize` starts a model; start a server and give its {name}.base_url"
            )


def _items(sheet: Place) -> list[Item]:
    items = []
    for number, row in enumerate(tables.raw_rows(sheet, "sheet"), start=1):
        passages, name = row.get("passages"), agreement.cell(row.get("item_id"))
        instruction, query = row.get("instruction"), row.get("query")
        texts = [name, instruction, query]
        if not isinstance(passages, Mapping) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise InputError(
                f"sheet={sheet}: row {number}: needs item_id, instruction, query and passages (number -> text); make one "
                "with `infembed analyze annotate=100`"
            )
        shown = {place: text for place, text in passages.items() if text is not None}
        if not shown or list(shown) != [str(place) for place in range(1, len(shown) + 1)]:
            found = ", ".join(shown) or "missing"
            raise InputError(f"sheet={sheet}: row {number}: passages are {found}; number them 1, 2, ...")
        items.append(Item(str(name), str(instruction), str(query), tuple(map(str, shown.values()))))
    return items


def _check_answers(references: Answers, items: Sequence[Item], sheet: str) -> None:
    """Require that reference raters answer items of the sheet, and with numbers of their passages."""
    passages = {item.id: len(item.passages) for item in items}
    for rater, answers in references.items():
        for item, answer in answers.items():
            if item not in passages:
                raise InputError(f"answers: {rater} answers {item}, which is not in sheet={sheet}; drop it")
            if answer not in map(str, range(passages[item] + 1)):
                raise InputError(
                    f"sheet, answers: column {rater}, item {item}: {answer[:40]!r} is no answer; give the number of a passage, 1 "
                    f"to {passages[item]}, or 0 for none; drop the column if it is no rater's"
                )


async def _ask_all(study: Study, settings: AgreementSettings) -> tuple[dict[str, dict[str, str]], Counter[str]]:
    """Return rater -> item_id -> answer, and how often which reason left an item without one.

    Raises:
        RunFailure: nothing more can be asked. Answers in flight are still journaled.
    """
    limits = settings.limits
    journal = open_journal(study.journal, settings.replay, upload=settings.journal_upload)
    slots = min(limits.in_flight or settings.in_flight, settings.in_flight)
    spent = 0.0 if limits.budget_usd is None else budget.resume(study.journal, study.table)
    ledger = budget.DurableLedger(limits, spent, study.journal)

    async def exchange(report: LeaseReport) -> Grant:
        return ledger.exchange(report)

    async def learn() -> Sequence[Mapping[str, Dialect]]:
        probes = {f"raters.{rater}": templates.probe(model) for rater, model in settings.raters.items()}
        learned = await dialects.learn(study.endpoints, probes, study.table)
        ledger.charge(learned.used, learned.report)
        return learned.dialects

    limiter = budget.rate_limiter(limits, slots, exchange, study.journal)
    client = ChatClient(list(study.endpoints.values()), journal, limiter, study.table, learn=learn)
    asked = [(rater, item) for rater in settings.raters for item in study.items]
    try:
        with track("agreement", len(asked)) as advance:
            jobs = (_ask(item, settings.raters[rater], settings, client.complete, advance) for rater, item in asked)
            answers: Sequence[Any] = await asyncio.gather(*jobs, return_exceptions=True)
    finally:
        await client.close()
        journal.close()
        if limits.budget_usd is not None:
            budget.note_unjournaled(study.journal, study.table, ledger.committed_usd)
        for line in ledger.stats().warnings:
            say(f"agreement: {line}")
    rated: dict[str, dict[str, str]] = {rater: {} for rater in settings.raters}
    reasons: Counter[str] = Counter()
    for (rater, item), answer in zip(asked, answers, strict=True):
        if isinstance(answer, RowFailure):
            reasons[f"{rater}: {answer}"] += 1
        elif isinstance(answer, BaseException):
            raise answer
        else:
            rated[rater][item.id] = answer
    return rated, reasons


async def _ask(item: Item, model: ChatModel, settings: AgreementSettings, complete: Complete, advance: Advance) -> str:
    # A rater is what the judge of a synthesis would be.
    judging = SynthesizeSettings(seeds=settings.sheet, output=settings.output, judge=model, prices=settings.prices)
    try:
        picked = await rate(item.id, item.instruction, item.query, item.shown, judging, complete)
    finally:
        advance()
    return NOTHING_FITS if picked == NONE else picked


def describe(settings: AgreementSettings) -> Iterator[str]:
    """Yield what a run would do, line by line; InputError as `prepare`."""
    step = prepare(settings)
    if not (yield from state(step)):
        study = resolve(settings)
        yield f"items: {len(study.items):,}, answered by {counted(len(study.references), 'reference rater')}"
        yield f"calls: {len(study.items) * len(settings.raters):,} at most, if no answer is malformed or journaled"
