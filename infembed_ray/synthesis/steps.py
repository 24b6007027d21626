"""One seed through all steps of the pipeline (paper, section 4.1): kept, rejected, or a dead letter.

The calls of a row follow one another, so a row that fails pays for nothing more; rows run side by side. A step is
named after the column it makes, or `judge_` and the scenario.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from infembed_ray.config import ChatModel, SynthesizeSettings
from infembed_ray.records import DEAD_LETTER, RECORD, REJECTED, SCENARIOS, Seed
from infembed_ray.synthesis import filters, judge, prices, templates
from infembed_ray.synthesis.chat import Complete, Completion, Request, RowFailure, answer, malformed

Kind = Literal["kept", "rejected", "dead_letter"]

SCHEMAS: Mapping[Kind, pa.Schema] = {"kept": RECORD, "rejected": REJECTED, "dead_letter": DEAD_LETTER}
"""What the rows of each kind hold."""

_JUDGE = "judge_"


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


class _Rejected(Exception):
    """Everything was answered, but the row is not good enough."""


async def synthesize(seed: Seed, pool: Sequence[str], settings: SynthesizeSettings, complete: Complete) -> Outcome:
    """Make one record of a seed.

    Args:
        seed: a query and its relevant passage.
        pool: distinct passages to draw the judge's distractors from, more than `settings.distractors`.
        settings: the models, the number of distractors, the seed of their draw.
        complete: asks a model. Its RowFailure makes the row a dead letter, its RunFailure is passed on.
    """
    row = _Row(seed, settings, complete)
    try:
        await _write(row)
        await _judge(row, pool)
    except _Rejected as reason:
        return row.outcome("rejected", step=row.asked[-1].step, reason=str(reason))
    except RowFailure as error:
        failed = row.asked[-1]
        return row.outcome("dead_letter", step=failed.step, error=str(error), request_hash=failed.key)
    return row.outcome("kept")


class _Row:
    """What is known of one row so far: its columns, the judge's verdicts, what was asked and answered."""

    def __init__(self, seed: Seed, settings: SynthesizeSettings, complete: Complete) -> None:
        self.settings = settings
        self.columns: dict[str, Any] = {
            "id": seed.id,
            "source": seed.source,
            "topic": seed.topic,
            "split": seed.split,
            "query_positive": seed.query,
            "document_positive": seed.passage,
        }
        self.verdicts: dict[str, str] = {}
        self.asked: list[Request] = []
        self._answered: list[tuple[Request, Completion]] = []
        self._complete = complete

    async def ask(self, step: str, prompt: str, model: ChatModel, **values: str) -> str:
        """The text of a model's answer."""
        request = templates.load(prompt).request(model, step, self.columns["id"], values)
        self.asked.append(request)
        completion = await self._complete(request)
        self._answered.append((request, completion))
        return answer(completion)

    def outcome(self, kind: Kind, **why: str) -> Outcome:
        """The row as far as it came, and `why` it went no further."""
        known = {**self.columns, **why, "provenance": self._provenance()}
        row = {name: value for name, value in known.items() if name in SCHEMAS[kind].names}
        paid = [exchange for exchange in self._answered if not exchange[1].replayed]
        replayed = [exchange for exchange in self._answered if exchange[1].replayed]
        return Outcome(kind, row, _spend(paid), _spend(replayed))

    def _provenance(self) -> dict[str, Any]:
        spend = _spend(self._answered)
        judged = [exchange for exchange in self._answered if exchange[0].step.startswith(_JUDGE)]
        written = self._answered[: len(self._answered) - len(judged)]  # all writing precedes the judge
        return {
            "generator": _snapshots(written),
            "judge": _snapshots(judged),
            "prompt_version": templates.versions(),
            "request_hashes": [request.key for request in self.asked],
            "prompt_tokens": spend.prompt_tokens,
            "completion_tokens": spend.completion_tokens,
            "usd": spend.usd,
            "verdicts": {scenario: self.verdicts.get(scenario) for scenario in SCENARIOS},
        }


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
    text = await row.ask(column, prompt, row.settings.generator, **values)
    line = filters.first_line(templates.labelled(kind, text))
    row.columns[column] = line
    fault = filters.fault(kind, line, poisons)
    if fault is not None:
        raise _Rejected(fault)
    return line


async def _passage(row: _Row, column: str, instruction: str, query: str) -> None:
    """Have the passage written that answers (instruction, query)."""
    reference = row.columns["document_positive"]
    text = await row.ask(
        column, "passage_writing", row.settings.generator, instruction=instruction, query=query, reference=reference
    )
    passage = templates.labelled("passage", text).strip()
    if not passage:
        raise malformed("Passage: ...", text)
    row.columns[column] = passage


async def _judge(row: _Row, pool: Sequence[str]) -> None:
    """Ask the judge about the three scenarios, until one fails."""
    columns, settings = row.columns, row.settings
    asked = {
        "positive": (columns["instruction_positive"], columns["query_positive"]),
        "negative_instruction": (columns["instruction_negative"], columns["query_positive"]),
        "negative_query": (columns["instruction_positive"], columns["query_negative"]),
    }
    documents = {
        "positive": columns["document_positive"],
        "negative_instruction": columns["hard_negative_document_1"],
        "negative_query": columns["hard_negative_document_2"],
    }
    for scenario in judge.ORDER:
        instruction, query = asked[scenario]
        shown = judge.lineup(documents, pool, settings.distractors, settings.seed, columns["id"], scenario)
        text = await row.ask(
            _JUDGE + scenario, "judge", settings.judge, instruction=instruction, query=query, candidates=str(shown)
        )
        picked = row.verdicts[scenario] = judge.verdict(text, shown)
        if picked != scenario:
            raise _Rejected(f"the judge picked {picked}")


def _spend(exchanges: Sequence[tuple[Request, Completion]]) -> Spend:
    table = prices.load()
    calls = (
        Spend(1, completion.prompt_tokens, completion.completion_tokens, table.usd(request.model, completion))
        for request, completion in exchanges
    )
    return sum(calls, start=Spend())


def _snapshots(exchanges: Sequence[tuple[Request, Completion]]) -> str | None:
    """The models that answered, as the endpoint names them; more than one where it changed between two calls."""
    names = {completion.model or request.model for request, completion in exchanges}
    return ", ".join(sorted(names)) or None
