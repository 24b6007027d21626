"""LLM raters answer the items of an agreement study, as the judge of a synthesis would.

A study has hundreds of items, so one process asks all raters. The prompt is the judge's, and answers go through the journal,
the limits and the budget of the LLM client, as in a synthesis.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from infembed_ray.analysis.agreement import Answers, cell
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.config.llm import ChatModel
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.llm import budget, prices
from infembed_ray.llm.chat import Complete, RowFailure, RunFailure
from infembed_ray.llm.client import ChatClient, run_in_thread
from infembed_ray.llm.journal_store import open_journal
from infembed_ray.llm.ledger import Grant, LeaseReport, Ledger, RateLimiter
from infembed_ray.progress import Advance, say, track
from infembed_ray.records.files import raw_rows
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import open_place
from infembed_ray.synthesis import preflight
from infembed_ray.synthesis.judge import NONE, Lineup
from infembed_ray.synthesis.pipeline import rate

NOTHING_FITS = "0"
"""Answer of a rater who finds no right passage."""
IN_FLIGHT = 64
"""Most requests in flight."""
JOURNAL = "journal"
"""Folder of the answers in the output."""
PRINTED = 5
"""Printed reasons of missing answers."""
MAX_UNANSWERED = 0.1
"""Maximum share of items without an answer of a rater; above it nothing is published."""


@dataclass(frozen=True)
class AgreementItem:
    """An item of the sheet, and its passages in order."""

    id: str
    instruction: str
    query: str
    passages: tuple[str, ...]


def prepare(settings: AnalyzeSettings, files: Sequence[Place], references: Answers) -> list[AgreementItem]:
    """Read the items, and check what can be checked before a request.

    Args:
        files: of `agreement.files`; one of them has the items.
        references: answers in these files.

    Raises:
        InputError: no file has items, a rater has the label of another one, or a limit cannot be kept.
    """
    wanted = settings.agreement
    models = {f"agreement.raters.{label}": model for label, model in wanted.raters.items()}
    items, _ = check_all(
        lambda: _items(files), lambda: preflight.check_limits(wanted.limits, models, prices.load(None))
    )
    for label in wanted.raters:
        if label in references:
            fault = "is also the label of a reference rater"
            raise InputError.of(f"agreement.raters.{label}", None, fault, "choose another label")
    _check_answers(references, items)
    return items


def ask(questions: Sequence[AgreementItem], settings: AnalyzeSettings) -> dict[str, dict[str, str]]:
    """Ask all raters; return rater -> item_id -> answer. An interrupted run resumes from its journal.

    Raises:
        InputError: endpoints that refuse or do not answer, a used-up budget, or a rater with too many items without an answer.
    """
    journal = open_place(settings.output, "output") / JOURNAL
    try:
        with budget.held(settings.agreement.limits, journal):
            rated, reasons = run_in_thread(_ask_all(questions, settings, journal))
    except RunFailure as failure:
        raise InputError(f"{failure}; nothing is published; the same command resumes") from failure
    for reason, times in reasons.most_common(PRINTED):
        say(f"agreement: {times} without an answer: {reason}")
    items = len(questions)
    for rater, missing in ((rater, items - len(answers)) for rater, answers in rated.items()):
        if missing > MAX_UNANSWERED * items:
            causes = "; ".join(f"{times} x {reason}" for reason, times in reasons.most_common(PRINTED))
            fault = f"{missing} of {items} items are without an answer, so nothing is published: {causes}"
            remedy = "mend the cause and run the same command, which asks again only what was not answered"
            raise InputError.of(f"agreement.raters.{rater}", None, fault, remedy)
    return rated


def _items(files: Sequence[Place]) -> list[AgreementItem]:
    """Read the items of the first file that has some."""
    for file in files:
        rows = list(raw_rows(file, "agreement.files"))
        if any("passages" in row for row in rows):
            return [_item(row, f"agreement.files={file}: row {number}") for number, row in enumerate(rows, start=1)]
    fault = "no file has a column `passages`, which LLM raters choose from"
    raise InputError.of("agreement.files", None, fault, "make one with annotate=100")


def _item(row: Mapping[str, Any], where: str) -> AgreementItem:
    passages, name = row.get("passages"), cell(row.get("item_id"))
    instruction, query = row.get("instruction"), row.get("query")
    texts = [name, instruction, query]
    if not isinstance(passages, Mapping) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise InputError(f"{where}: needs item_id, instruction, query and passages (number -> text)")
    shown = {place: text for place, text in passages.items() if text is not None}
    if not shown or list(shown) != [str(place) for place in range(1, len(shown) + 1)]:
        raise InputError(f"{where}: passages are {', '.join(shown) or 'missing'}; number them 1, 2, ...")
    return AgreementItem(str(name), str(instruction), str(query), tuple(map(str, shown.values())))


def _check_answers(references: Answers, items: Sequence[AgreementItem]) -> None:
    """Require that reference raters answer the items, with numbers of their passages."""
    passages = {item.id: len(item.passages) for item in items}
    for rater, answers in references.items():
        for item, answer in answers.items():
            if item not in passages:
                raise InputError(f"agreement.files: {rater} answers {item}, which is no item of the sheet; drop it")
            if answer not in map(str, range(passages[item] + 1)):
                fault = f"column {rater}, item {item}: {answer[:40]!r} is no answer"
                remedy = f"give the number of a passage, 1 to {passages[item]}, or 0 for none"
                remedy += "; drop the column if it is no rater's"
                raise InputError.of("agreement.files", None, fault, remedy)


async def _ask_all(
    items: Sequence[AgreementItem], settings: AnalyzeSettings, place: Place
) -> tuple[dict[str, dict[str, str]], Counter[str]]:
    """Return rater -> item_id -> answer, and how often which reason left an item without one.

    Raises:
        RunFailure: nothing more can be asked. Answers in flight are still journaled.
    """
    limits, raters = settings.agreement.limits, settings.agreement.raters
    journal, table = open_journal(place), prices.load(None)
    spent = 0.0 if limits.budget_usd is None else budget.resume(place, table)
    ledger = Ledger(limits, spent, note=partial(budget.note_at_most, place))

    async def exchange(report: LeaseReport) -> Grant:
        return ledger.exchange(report)

    limiter = RateLimiter(limits, IN_FLIGHT, exchange)
    client = ChatClient(settings.agreement.endpoint, journal, limiter, table)
    asked = [(rater, item) for rater in raters for item in items]
    try:
        with track("agreement", len(asked)) as advance:
            jobs = (_ask(item, raters[rater], settings, client.complete, advance) for rater, item in asked)
            answers: Sequence[Any] = await asyncio.gather(*jobs, return_exceptions=True)
    finally:
        await client.close()
        journal.close()
        if limits.budget_usd is not None:
            budget.note_unjournaled(place, table, ledger.committed_usd)
        for line in ledger.stats().warnings:
            say(f"agreement: {line}")
    rated: dict[str, dict[str, str]] = {rater: {} for rater in raters}
    reasons: Counter[str] = Counter()
    for (rater, item), answer in zip(asked, answers, strict=True):
        if isinstance(answer, RowFailure):
            reasons[f"{rater}: {answer}"] += 1
        elif isinstance(answer, BaseException):
            raise answer
        else:
            rated[rater][item.id] = answer
    return rated, reasons


async def _ask(
    item: AgreementItem, model: ChatModel, settings: AnalyzeSettings, complete: Complete, advance: Advance
) -> str:
    # A rater is what the judge of a synthesis would be, and numbers name the candidates.
    shown = Lineup(tuple(map(str, range(1, len(item.passages) + 1))), item.passages)
    judging = SynthesizeSettings(seeds=settings.records, output=settings.output, judge=model)
    try:
        picked = await rate(item.id, item.instruction, item.query, shown, judging, complete)
    finally:
        advance()
    return NOTHING_FITS if picked == NONE else picked
