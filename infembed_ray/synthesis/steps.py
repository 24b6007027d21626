"""One seed through all steps of the pipeline (paper, section 4.1): kept, rejected, or a dead letter.

The calls of a row follow one another, so a row that fails pays for nothing more; rows run side by side. A step is
named after the column it makes, or `judge_` and what is judged. A malformed answer is asked for once more.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import pyarrow as pa

from infembed_ray.config import ChatModel, SynthesizeSettings
from infembed_ray.errors import in_one_line
from infembed_ray.records import DEAD_LETTER, RECORD, REJECTED, SCENARIOS, Seed
from infembed_ray.synthesis import filters, judge, prices, templates
from infembed_ray.synthesis.chat import (
    Complete,
    Completion,
    Malformed,
    Request,
    RowFailure,
    RunFailure,
    answer,
    sound,
)
from infembed_ray.synthesis.formats import labelled

T = TypeVar("T")

Kind = Literal["kept", "rejected", "dead_letter"]

SCHEMAS: Mapping[Kind, pa.Schema] = {"kept": RECORD, "rejected": REJECTED, "dead_letter": DEAD_LETTER}
"""What the rows of each kind hold."""

_JUDGE = "judge_"

STEPS = (
    "instruction_positive",
    "instruction_negative",
    "query_negative",
    "hard_negative_document_1",
    "hard_negative_document_2",
    *(_JUDGE + scenario for scenario in judge.ORDER),
    "instruction_complement",
    "judge_complement",
)
"""All steps in their order."""


@dataclass(frozen=True)
class Spend:
    """Answered calls and what they cost."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float | None = 0.0
    """At list prices; None where the table does not know a model."""

    def __add__(self, other: Spend) -> Spend:
        return Spend(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            None if self.usd is None or other.usd is None else self.usd + other.usd,
        )


@dataclass(frozen=True)
class Outcome:
    """What became of one seed."""

    kind: Kind
    row: Mapping[str, Any]
    """Columns of `SCHEMAS[kind]`; those that were not reached are absent."""
    paid: Spend
    """In this run."""
    replayed: Spend
    """Answered by journals, so paid before this run."""
    complement: Mapping[str, Any] | None = None
    """Of a kept record, columns of `records.COMPLEMENT`; None where `settings.complement` is off."""
    traceback: str | None = None
    """Of an unexpected exception, which made the row a dead letter."""
    from_journal: bool = False
    """A journal answered the row's last request."""


def model_of(settings: SynthesizeSettings, step: str) -> tuple[str, ChatModel]:
    """The name of the setting that gives a step's model, and the model."""
    if step in settings.steps:
        return f"steps.{step}", settings.steps[step]
    return ("judge", settings.judge) if step.startswith(_JUDGE) else ("generator", settings.generator)


class _Rejected(Exception):
    """Everything was answered, but the row is not good enough."""


async def synthesize(seed: Seed, pool: Sequence[str], settings: SynthesizeSettings, complete: Complete) -> Outcome:
    """Make one record of a seed.

    Args:
        seed: a query and its relevant passage; a dead letter at once if one of them is empty.
        pool: distinct passages to draw the judge's distractors from, more than `settings.distractors`.
        settings: the models, the number of distractors, the seed of their draw.
        complete: asks a model. Its RowFailure makes the row a dead letter, its RunFailure is passed on.

    Any other exception makes the row a dead letter as well, with its traceback in the outcome: one row must not end a
    run that pays for thousands.
    """
    row = _Row(seed, settings, complete)
    for name, text in (("query", seed.query), ("passage", seed.passage)):
        if not text.strip():
            return row.outcome("dead_letter", step="seed", error=f"its {name} is empty")
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
        return replace(row.dead_letter(in_one_line(error)), traceback=sound(traceback.format_exc()))
    return replace(row.outcome("kept"), complement=complement)


class _Asked(NamedTuple):
    """What is remembered of a request: not its text, since many rows are in work."""

    model: str
    prompt: str
    step: str
    key: str


class _Row:
    """What is known of one row so far: its columns, the judge's verdicts, what was asked and answered."""

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
        self.asked: list[_Asked] = []
        self._answered: list[tuple[_Asked, Completion]] = []
        self._complete = complete

    async def ask(
        self,
        step: str,
        prompt: str,
        read: Callable[[str], T],
        choices: Sequence[str] = (),
        **values: str,
    ) -> T:
        """What `read` makes of a model's answer; what it calls malformed is asked for once more.

        Args:
            step: the name of the step, which decides the model.
            prompt: the name of the prompt.
            read: labelled text -> the value; raises Malformed.
            choices: the only answers there are, where they are few.
            values: fields of the prompt.
        """
        model = model_of(self.settings, step)[1]
        # Seeds of any source that carry a programming language follow LeetCode's rule.
        template = templates.load(prompt, "leetcode" if self.language else self.columns["source"])
        values["language"] = self.language or "its programming language"
        request = template.request(model, step, self.columns["id"], values, choices)

        def value(text: str) -> T:
            return read(template.answer.as_text(text) if model.structured else text)

        text = await self._exchange(request)
        try:
            return value(text)
        except Malformed as fault:
            return value(await self._exchange(templates.repair(request, text, fault)))

    async def _exchange(self, request: Request) -> str:
        self.asked.append(_Asked(request.model, request.prompt, request.step, request.key))
        completion = await self._complete(request)
        self._answered.append((self.asked[-1], completion))
        return answer(completion)

    def dead_letter(self, error: str) -> Outcome:
        """The row after a failure of its last request, or of its first step if it has none yet."""
        if not self.asked:
            return self.outcome("dead_letter", step=STEPS[0], error=sound(error))
        failed = self.asked[-1]
        return self.outcome("dead_letter", step=failed.step, error=sound(error), request_hash=failed.key)

    def outcome(self, kind: Kind, **why: str) -> Outcome:
        """The row as far as it came, and `why` it went no further."""
        known = {**self.columns, **why, "provenance": self._provenance()}
        row = {name: value for name, value in known.items() if name in SCHEMAS[kind].names}
        paid = [exchange for exchange in self._answered if not exchange[1].replayed]
        replayed = [exchange for exchange in self._answered if exchange[1].replayed]
        from_journal = bool(replayed) and replayed[-1][0] is self.asked[-1]
        return Outcome(kind, row, self._spend(paid), self._spend(replayed), from_journal=from_journal)

    def _provenance(self) -> dict[str, Any]:
        spend = self._spend(self._answered)
        judged = [exchange for exchange in self._answered if exchange[0].step.startswith(_JUDGE)]
        written = [exchange for exchange in self._answered if not exchange[0].step.startswith(_JUDGE)]
        return {
            "generator": _snapshots(written),
            "judge": _snapshots(judged),
            "prompt_version": " ".join(sorted({name for request in self.asked for name in request.prompt.split()})),
            "request_hashes": [request.key for request in self.asked],
            "prompt_tokens": spend.prompt_tokens,
            "completion_tokens": spend.completion_tokens,
            "usd": spend.usd,
            "verdicts": {scenario: self.verdicts.get(scenario) for scenario in SCENARIOS},
        }

    def _spend(self, exchanges: Sequence[tuple[_Asked, Completion]]) -> Spend:
        table = prices.load(self.settings.prices)
        calls = (
            Spend(1, completion.prompt_tokens, completion.completion_tokens, table.usd(request.model, completion))
            for request, completion in exchanges
        )
        return sum(calls, start=Spend())


async def _write(row: _Row) -> None:
    """Instruction, poisoned instruction and query, and the passages that answer them (section 4.1, appendix H)."""
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
    """Have an instruction or a query generated, and filter it (appendix B.1)."""
    text = await row.ask(column, prompt, partial(labelled, kind), **values)
    line = row.columns[column] = filters.first_line(text)
    fault = filters.fault(kind, line, poisons, row.language)
    if fault is not None:
        raise _Rejected(fault)
    return line


async def _passage(row: _Row, column: str, instruction: str, query: str) -> None:
    """Have the passage written that answers (instruction, query)."""
    row.columns[column] = await row.ask(
        column,
        "passage_writing",
        _some_passage,
        instruction=instruction,
        query=query,
        reference=row.columns["document_positive"],
    )
    if filters.repeats(row.columns[column], row.columns["document_positive"]):
        raise _Rejected("equal to the positive passage")


def _some_passage(text: str) -> str:
    passage = labelled("passage", text).strip()
    if not passage:
        raise Malformed("Passage: ...", text)
    return passage


async def _judge(row: _Row, pool: Sequence[str]) -> None:
    """Ask the judge about the three scenarios, until one fails."""
    columns = row.columns
    asked = {
        "positive": (columns["instruction_positive"], columns["query_positive"]),
        "negative_instruction": (columns["instruction_negative"], columns["query_positive"]),
        "negative_query": (columns["instruction_positive"], columns["query_negative"]),
    }
    for scenario in judge.ORDER:
        picked = row.verdicts[scenario] = await _verdict(row, pool, scenario, *asked[scenario])
        if picked != scenario:
            raise _Rejected(f"the judge picked {picked}")


async def _verdict(row: _Row, pool: Sequence[str], judged: str, instruction: str, query: str) -> str:
    """Which of the record's passages and some distractors the judge picks for (instruction, query)."""
    columns, settings = row.columns, row.settings
    documents = {
        "positive": columns["document_positive"],
        "negative_instruction": columns["hard_negative_document_1"],
        "negative_query": columns["hard_negative_document_2"],
    }
    shown = judge.lineup(documents, pool, settings.distractors, settings.seed, columns["id"], judged)
    return await row.ask(
        _JUDGE + judged,
        "judge",
        partial(judge.verdict, candidates=shown),
        shown.choices,
        instruction=instruction,
        query=query,
        candidates=str(shown),
    )


async def _complement(row: _Row, pool: Sequence[str]) -> Mapping[str, Any]:
    """The dual view of a good record: the instruction that turns P1- into the positive and P+ into a negative.

    The judge confirms it. Whatever fails here, the record stays good.
    """
    columns = row.columns
    names = ("id", "source", "query_positive", "hard_negative_document_1", "document_positive")
    made: dict[str, Any] = {name: columns[name] for name in names}
    try:
        instruction = await row.ask(
            "instruction_complement",
            "complement",
            partial(labelled, "instruction"),
            query=columns["query_positive"],
            instruction=columns["instruction_positive"],
            wanted=columns["hard_negative_document_1"],
            unwanted=columns["document_positive"],
        )
        line = made["instruction_complement"] = filters.first_line(instruction)
        fault = filters.fault("instruction", line, columns["instruction_positive"], row.language)
        if fault is None:
            picked = await _verdict(row, pool, "complement", line, columns["query_positive"])
            fault = None if picked == "negative_instruction" else f"the judge picked {picked}"
    except RowFailure as error:
        fault = str(error)
    except (RunFailure, MemoryError):
        raise
    except Exception as error:
        fault = sound(in_one_line(error))
    return {**made, "fault": fault}


def _snapshots(exchanges: Sequence[tuple[_Asked, Completion]]) -> str | None:
    """The models that answered, as the endpoint names them; more than one where it changed between two calls."""
    names = {completion.model or request.model for request, completion in exchanges}
    return ", ".join(sorted(names)) or None
