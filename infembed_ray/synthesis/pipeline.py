"""One seed through all steps of the pipeline (paper, section 4.1): it is kept, rejected, or becomes a dead letter.

The calls of a row follow one another, so a row that fails pays for nothing more. A step is named after the column that it
writes, or `judge_` and what is judged.
"""

from __future__ import annotations

import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import pyarrow as pa

from infembed_ray.config.llm import ChatModel
from infembed_ray.config.synthesis import CheapJudge, SynthesizeSettings
from infembed_ray.errors import in_one_line
from infembed_ray.llm import prices
from infembed_ray.llm.chat import (
    CAP,
    Complete,
    Completion,
    Malformed,
    Request,
    RowFailure,
    RunFailure,
    Unjournaled,
    Unusable,
    labelled,
    replace_surrogates,
    usable_text,
)
from infembed_ray.llm.journal import Journal, replaying
from infembed_ray.records.tables import DEAD_LETTER, RECORD, REJECTED, SCENARIOS, Seed
from infembed_ray.redaction import masked
from infembed_ray.synthesis import filters, judge, templates
from infembed_ray.synthesis.batch_files import LEFT_OUT

T = TypeVar("T")
Kind = Literal["kept", "rejected", "dead_letter"]

SCHEMAS: Mapping[Kind, pa.Schema] = {"kept": RECORD, "rejected": REJECTED, "dead_letter": DEAD_LETTER}
"""Columns of the rows of each kind."""

_JUDGE = "judge_"
CHEAP_JUDGE = "cheap_judge_"
"""Prefix of the steps of `settings.cheap_judge`, which come before all steps of `settings.judge`."""

ALIKE = 20
"""Rows that must fail alike at a step, before any row passes it, to stop the run; at least half of an actor's requests
in flight, because failures can arrive before the first success. Each actor counts its own rows."""
STEPS = (
    "instruction_positive",
    "instruction_negative",
    "query_negative",
    "hard_negative_document_1",
    "hard_negative_document_2",
    *(CHEAP_JUDGE + scenario for scenario in judge.ORDER),
    *(_JUDGE + scenario for scenario in judge.ORDER),
    "instruction_complement",
    "judge_complement",
)
"""All steps in order."""


def steps_of(settings: SynthesizeSettings) -> list[str]:
    """Return the steps that a run may ask, in order."""
    return [
        step
        for step in STEPS
        if (settings.complement or not step.endswith("_complement"))
        and (settings.cheap_judge is not None or not step.startswith(CHEAP_JUDGE))
    ]


def model_of(settings: SynthesizeSettings, step: str) -> tuple[str, ChatModel]:
    """Return the setting that names a step's model, and the model."""
    if step in settings.steps:
        return f"steps.{step}", settings.steps[step]
    if settings.cheap_judge is not None and step.startswith(CHEAP_JUDGE):
        return "cheap_judge", settings.cheap_judge
    return ("judge", settings.judge) if step.startswith(_JUDGE) else ("generator", settings.generator)


def kind_of(error: str) -> str:
    """Return the error of a dead letter without its details, for example `HTTP 400`."""
    return re.split("[:;(]", error, maxsplit=1)[0].strip()


@dataclass(frozen=True)
class Spend:
    """Answered calls and their cost."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float | None = 0.0
    """List price, or that of the Batch API; None if the price table lacks a model."""

    def __add__(self, other: Spend) -> Spend:
        return Spend(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            None if self.usd is None or other.usd is None else self.usd + other.usd,
        )


@dataclass(frozen=True)
class Outcome:
    """The result of one seed."""

    kind: Kind
    row: Mapping[str, Any]
    """Columns of `SCHEMAS[kind]`, without those that were not reached."""
    paid: Spend
    """In this run."""
    replayed: Spend
    """Answered by journals, so paid before this run."""
    complement: Mapping[str, Any] | None = None
    """Columns of `records.COMPLEMENT` for a kept record; None if `settings.complement` is off."""
    traceback: str | None = None
    """Of an unexpected exception, which made the row a dead letter."""
    from_journal: bool = False
    """Whether a journal answered the row's last request."""


class _Rejected(Exception):
    """Everything was answered, but the row is not good enough."""


async def synthesize(seed: Seed, pool: Sequence[str], settings: SynthesizeSettings, complete: Complete) -> Outcome:
    """Make one record of a seed; RunFailure if `complete` raises it, while its RowFailure makes the row a dead letter.

    An unexpected exception makes the row a dead letter with a traceback: one row must not end a run that pays for thousands.
    The judge's distractors come from the distinct passages of `pool`.
    """
    row = _Row(seed, settings, complete)
    try:
        await _write(row)
        await _judge(row, pool)
        complement = await _complement(row, pool) if settings.complement else None
    except _Rejected as reason:
        return row.outcome("rejected", step=row.asked[-1].step, reason=str(reason))
    except RowFailure as error:
        return row.dead_letter(str(error))
    except (RunFailure, MemoryError):  # these concern all rows
        raise
    except Exception as error:
        lines = replace_surrogates(masked(traceback.format_exc()))
        return replace(row.dead_letter(in_one_line(error)), traceback=lines)
    return replace(row.outcome("kept"), complement=complement)


async def next_request(
    seed: Seed, pool: Sequence[str], settings: SynthesizeSettings, journal: Journal
) -> Request | None:
    """Return the first request of a row that the journal does not answer; None if it answers all; RunFailure if the journal cannot be read."""
    try:
        await synthesize(seed, pool, settings, replaying(journal))
    except Unjournaled as missing:
        return missing.request
    return None


async def rate(
    item: str, instruction: str, query: str, shown: judge.Lineup, settings: SynthesizeSettings, complete: Complete
) -> str:
    """Return which candidate `settings.judge` picks for (instruction, query), or `judge.NONE`; RowFailure if none is usable."""
    row = _Row(Seed(item, query, instruction), settings, complete)
    read = partial(judge.verdict, candidates=shown)
    values = {"instruction": instruction, "query": query, "candidates": str(shown)}
    return await row.ask(f"{_JUDGE}item", "judge", read, shown.choices, **values)


class _Asked(NamedTuple):
    """A request without its text, because many rows are in progress."""

    model: str
    prompt: str
    step: str
    key: str


_Exchange = tuple[_Asked, Completion]


class _Row:
    """State of one row: its columns, the judge's verdicts, its requests and their answers."""

    def __init__(self, seed: Seed, settings: SynthesizeSettings, complete: Complete) -> None:
        self.settings = settings
        self.language = seed.language
        self.columns: dict[str, Any] = {
            "id": seed.id,
            "source": seed.source,
            "topic": seed.topic,
            "split": seed.split,
            "language": seed.language,
            "query_positive": seed.query,
            "document_positive": seed.passage,
        }
        self.verdicts: dict[str, str] = {}
        self.judged_by: dict[str, str] = {}
        self.audit: Kind | None = None
        self.asked: list[_Asked] = []
        self._answered: list[_Exchange] = []
        self._complete = complete

    async def ask(
        self, step: str, prompt: str, read: Callable[[str], T], choices: Sequence[str] = (), **values: str
    ) -> T:
        """Ask a step's model and return what `read` makes of its answer; ask once more if the answer is malformed.

        Args:
            read: labelled text -> value; raises Malformed.
            choices: the only valid answers, where they are few.
        """
        model = model_of(self.settings, step)[1]
        # A seed of any source with a programming language follows LeetCode's rule (appendix B.2).
        source = "leetcode" if self.language else self.columns["source"]
        own = self.settings.prompts
        template = templates.load(prompt, source, own, self.settings.shared_prefix)
        values["language"] = self.language or "its programming language"
        request = template.request(model, step, self.columns["id"], values, choices)

        def value(text: str) -> T:
            made = read(template.answer.as_text(text) if model.structured else text)
            if isinstance(made, str) and not choices and template.echoed(made):
                raise Malformed(f"{template.answer.label}: (not the text of the prompt)", text)
            return made

        text = await self._exchange(request)
        try:
            return value(text)
        except Malformed as fault:
            return value(await self._exchange(templates.repair(request, text, fault, own)))

    async def _exchange(self, request: Request) -> str:
        """Return the text of an answer; ask again if it was cut off, interrupted, refused or empty by chance."""
        model = model_of(self.settings, request.step)[1]
        completion = await self._send(request)
        if completion.cut_off and model.max_tokens is not None:
            higher = {**request.parameters, CAP: 2 * model.max_tokens}
            completion = await self._send(replace(request, parameters=higher))
        unlucky = model.max_tokens is None if completion.cut_off else completion.refused or completion.empty
        if completion.interrupted or (unlucky and model.temperature != 0):
            # Not sent, but part of the journal key: the same question has one answer for each sample.
            completion = await self._send(replace(request, prompt=f"{request.prompt} resample=1"))
        return usable_text(completion)

    async def _send(self, request: Request) -> Completion:
        self.asked.append(_Asked(request.model, request.prompt, request.step, request.complete_key))
        completion = await self._complete(request)
        self.asked[-1] = self.asked[-1]._replace(key=request.journal_key(completion))
        self._answered.append((self.asked[-1], completion))
        return completion

    def dead_letter(self, error: str) -> Outcome:
        """Return the outcome after a failure of the last request, or of the first step if there is none yet."""
        if not self.asked:
            return self.outcome("dead_letter", step=STEPS[0], error=replace_surrogates(error))
        failed = self.asked[-1]
        return self.outcome("dead_letter", step=failed.step, error=replace_surrogates(error), request_hash=failed.key)

    def outcome(self, kind: Kind, **why: str) -> Outcome:
        """Return the row as far as it came; `why` says at which step it ended and for what reason."""
        columns = {**self.columns, **why, "provenance": self._provenance()}
        row = {name: value for name, value in columns.items() if name in SCHEMAS[kind].names}
        paid = [exchange for exchange in self._answered if not exchange[1].replayed]
        replayed = [exchange for exchange in self._answered if exchange[1].replayed]
        from_journal = bool(replayed) and replayed[-1][0] is self.asked[-1]
        return Outcome(kind, row, self._spend(paid), self._spend(replayed), from_journal=from_journal)

    def _provenance(self) -> dict[str, Any]:
        spend = self._spend(self._answered)
        return {
            "generator": self._snapshots(judged=False),
            "judge": self._snapshots(judged=True),
            "prompt_version": " ".join(sorted({name for request in self.asked for name in request.prompt.split()})),
            "request_hashes": [request.key for request in self.asked],
            "prompt_tokens": spend.prompt_tokens,
            "completion_tokens": spend.completion_tokens,
            "usd": spend.usd,
            "verdicts": {scenario: self.verdicts.get(scenario) for scenario in SCENARIOS},
            "judged_by": self.judged_by or None,
            "audit": self.audit,
        }

    def _snapshots(self, judged: bool) -> str | None:
        """Return the endpoint's names of the models that answered; several if a snapshot changed between two calls."""
        exchanges = [exchange for exchange in self._answered if (_JUDGE in exchange[0].step) == judged]
        return ", ".join(sorted({completion.model or asked.model for asked, completion in exchanges})) or None

    def _spend(self, exchanges: Sequence[_Exchange]) -> Spend:
        table = prices.load(self.settings.prices)
        total = Spend()
        for asked, completion in exchanges:
            usd = table.usd(asked.model, completion)
            total += Spend(1, completion.prompt_tokens, completion.completion_tokens, usd)
        return total


async def _write(row: _Row) -> None:
    """Generate instruction, poisoned instruction and poisoned query, and their passages (section 4.1, appendix H)."""
    query, document = row.columns["query_positive"], row.columns["document_positive"]
    instruction = await _line(
        row, "instruction_positive", "instruction", "instruction_generation", query=query, document=document
    )
    positives = {"document": document, "query_positive": query, "instruction_positive": instruction}
    other_instruction = await _line(
        row, "instruction_negative", "instruction", "instruction_poisoning", poisons=instruction, **positives
    )
    other_query = await _line(row, "query_negative", "query", "query_poisoning", poisons=query, **positives)
    await _passage(row, "hard_negative_document_1", other_instruction, query)
    await _passage(row, "hard_negative_document_2", instruction, other_query)


async def _line(
    row: _Row, column: str, kind: filters.Generated, prompt: str, poisons: str | None = None, **values: str
) -> str:
    """Generate an instruction or a query, and filter it (appendix B.1)."""
    line = row.columns[column] = await row.ask(column, prompt, partial(_read, kind, filters.first_line), **values)
    fault = filters.fault(kind, line, poisons, row.language)
    if any(filters.repeats(line, text) for text in values.values() if text != poisons):
        fault = "repeats a text of the prompt"
    if fault is not None:
        raise _Rejected(fault)
    return line


async def _passage(row: _Row, column: str, instruction: str, query: str) -> None:
    """Generate the passage that answers (instruction, query)."""
    reference = row.columns["document_positive"]
    read = partial(_read, "passage", filters.unwrapped)
    values = {"instruction": instruction, "query": query, "reference": reference}
    row.columns[column] = await row.ask(column, "passage_writing", read, **values)
    if filters.repeats(row.columns[column], reference):
        raise _Rejected("equal to the positive passage")


def _read(label: str, clean: Callable[[str], str], text: str) -> str:
    if value := clean(labelled(label, text)):
        return value
    raise Malformed(f"{label.capitalize()}: ...", text)


async def _judge(row: _Row, pool: Sequence[str]) -> None:
    """Ask the judge about the three scenarios until one fails; with a cheap judge, only where that is in doubt.

    In an audit the judge decides instead of the cheap judge, although that is in no doubt.
    """
    cheap = row.settings.cheap_judge
    settled = {} if cheap is None else await _settled(row, pool, cheap)
    rejected = any(picked != scenario for scenario, picked in settled.items())
    if cheap is not None and (rejected or len(settled) == len(judge.ORDER)):
        draw = random.Random(f"audit\0{row.settings.seed}\0{row.columns['id']}").random()
        if draw < cheap.audit:
            row.audit, settled, rejected = "rejected" if rejected else "kept", {}, False
    for scenario in settled if rejected else judge.ORDER:
        picked = settled.get(scenario) or await _verdict(row, pool, scenario, *_pair(row, scenario))
        row.verdicts[scenario] = picked
        if cheap is not None:
            row.judged_by[scenario] = "cheap_judge" if scenario in settled else "judge"
        if picked != scenario:
            raise _Rejected(f"the judge picked {picked}")


async def _settled(row: _Row, pool: Sequence[str], cheap: CheapJudge) -> dict[str, str]:
    """Return the cheap judge's picks in the scenarios in which it is in no doubt, up to its first wrong one."""
    settled: dict[str, str] = {}
    for scenario in judge.ORDER:
        try:
            picked = await _verdict(row, pool, scenario, *_pair(row, scenario), order=1)
            sure = picked == scenario or cheap.rejects
            sure = sure and picked == await _verdict(row, pool, scenario, *_pair(row, scenario), order=2)
        except Unusable:
            continue
        if sure:
            settled[scenario] = picked
            if picked != scenario:
                break
    return settled


def _pair(row: _Row, scenario: str) -> tuple[str, str]:
    """Return the instruction and the query of a scenario."""
    instruction = "instruction_negative" if scenario == "negative_instruction" else "instruction_positive"
    query = "query_negative" if scenario == "negative_query" else "query_positive"
    return row.columns[instruction], row.columns[query]


async def _verdict(
    row: _Row, pool: Sequence[str], judged: str, instruction: str, query: str, order: int | None = None
) -> str:
    """Return which candidate, a passage of the record or a distractor, the judge picks for (instruction, query).

    `order`: asks the cheap judge, with distractors and an order of the candidates that this number decides.
    """
    columns, settings = row.columns, row.settings
    documents = {
        "positive": columns["document_positive"],
        "negative_instruction": columns["hard_negative_document_1"],
        "negative_query": columns["hard_negative_document_2"],
    }
    lineup = "" if settings.shared_prefix else judged  # the candidates of all scenarios are then the same text
    draw = (settings.seed, columns["id"], lineup) if order is None else (settings.seed, columns["id"], lineup, order)
    shown = judge.lineup(documents, pool, settings.distractors, *draw, query=columns["query_positive"])
    return await row.ask(
        (_JUDGE if order is None else CHEAP_JUDGE) + judged,
        "judge",
        partial(judge.verdict, candidates=shown),
        shown.choices,
        instruction=instruction,
        query=query,
        candidates=str(shown),
    )


async def _complement(row: _Row, pool: Sequence[str]) -> Mapping[str, Any]:
    """Generate the dual view of a kept record: an instruction that makes P1- the positive and P+ a negative.

    The judge confirms it. If anything fails here, the record is kept and `fault` says why there is no dual view.
    """
    columns = row.columns
    made: dict[str, Any] = {"id": columns["id"], "source": columns["source"], "query": columns["query_positive"]}
    made |= {"positives": columns["hard_negative_document_1"], "negatives": columns["document_positive"]}
    try:
        line = made["instruction"] = await row.ask(
            "instruction_complement",
            "complement",
            partial(_read, "instruction", filters.first_line),
            query=columns["query_positive"],
            instruction=columns["instruction_positive"],
            wanted=columns["hard_negative_document_1"],
            unwanted=columns["document_positive"],
        )
        fault = filters.fault("instruction", line, columns["instruction_positive"], row.language)
        if fault is None:
            picked = await _verdict(row, pool, "complement", line, columns["query_positive"])
            fault = None if picked == "negative_instruction" else f"the judge picked {picked}"
    except RowFailure as error:
        fault = str(error)
    except (RunFailure, MemoryError):
        raise
    except Exception as error:
        fault = replace_surrogates(in_one_line(error))
    return {**made, "fault": fault}


class CircuitBreaker:
    """Stops a run in which every row fails at the same step for the same reason, although the models answer.

    It counts the dead letters of steps that no row has passed yet. Rows that fail end sooner than rows that pass, so a row
    passes a step when its next step is asked. A failed complement does not count, because its record is kept, nor does a
    replayed answer, which costs nothing, nor a request that batches left unanswered.

    Args:
        alike: failures of one kind that trip the breaker; default: see `ALIKE`.
    """

    def __init__(self, settings: SynthesizeSettings, alike: int | None = None) -> None:
        self._settings = settings
        self._alike = alike or max(ALIKE, settings.in_flight // 2)
        self._passed = 0
        """Number of steps, from the first, that some row has passed."""
        self._failures: Counter[tuple[str, str]] = Counter()
        self.failure: str | None = None

    def watch(self, complete: Complete) -> Complete:
        """Wrap `complete` to note the steps that rows pass."""

        async def ask(request: Request) -> Completion:
            if not request.step.endswith("_complement"):  # it may follow the cheap judge alone
                self._passed = max(self._passed, STEPS.index(request.step))
            return await complete(request)

        return ask

    def add(self, outcome: Outcome) -> str | None:
        """Count an outcome; return `failure`."""
        step = outcome.row.get("step")  # a kept row has none
        passed = _passed_by_kept(outcome) if step is None else STEPS.index(step) + (outcome.kind == "rejected")
        self._passed = max(self._passed, passed)
        if step is not None and outcome.kind == "dead_letter":
            replayed = outcome.from_journal and outcome.traceback is None
            if passed >= self._passed and not replayed and not outcome.row["error"].startswith(LEFT_OUT):
                failed = step, kind_of(outcome.row["error"])
                self._failures[failed] += 1
                if self._failures[failed] >= self._alike and self.failure is None:
                    setting, model = model_of(self._settings, step)
                    rows = f"all of the first {self._failures[failed]} rows ({outcome.row['error']})"
                    remedy = f"correct the settings of {setting} or of the endpoint"
                    self.failure = f"{setting}.model={model.model}: step {step} failed alike for {rows}; {remedy}"
        return self.failure


def _passed_by_kept(outcome: Outcome) -> int:
    """Return how many steps a kept row has passed: not those of the judge if only the cheap judge was asked."""
    judges = set(((outcome.row.get("provenance") or {}).get("judged_by") or {}).values())
    return STEPS.index(f"judge_{judge.ORDER[0]}") if judges == {"cheap_judge"} else len(STEPS)
