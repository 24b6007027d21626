"""Estimate of a run's calls, tokens and price: a rehearsal in which every row is kept, so that it is an upper estimate.

A cheap judge is always in doubt after its second answer, so that every verdict costs all calls that it can.

A journal answers what it holds. The other answers are placeholders with as many tokens as the published set has on average
(paper, Table 1), because later prompts contain earlier answers.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import Completion, Malformed, Request, without_reasoning
from infembed_ray.llm.client import run_in_thread
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.journal_store import open_journal
from infembed_ray.llm.prices import BATCH_PRICE
from infembed_ray.llm.structured_output import AnswerFormat, labelled
from infembed_ray.records import Seed
from infembed_ray.synthesis.pipeline import CHEAP_JUDGE, model_of, synthesize
from infembed_ray.synthesis.preflight import Job

SAMPLE = 500
"""Most seeds that are rehearsed; they are spread evenly, and the figures are scaled to all seeds."""
BYTES_PER_TOKEN = 4
"""Approximate UTF-8 bytes per token of English text."""
_WORDS: Mapping[str, int] = {"instruction": 36, "query": 8}
"""Mean words of the published set (paper, Table 1); a passage is as long as that of the seed."""


@dataclass
class Estimate:
    """What a run is expected to send at most.

    Attributes:
        seeds: of the run; `rehearsed`: of these.
        calls: requests that no journal answers, without those after a malformed, cut-off, refused or empty answer.
        prompt_tokens: of these calls.
        answer_tokens: None if the settings put no bound on some answers.
        usd: at list prices; None if the answers have no bound, or a price is unknown.
    """

    seeds: int
    rehearsed: int = 0
    calls: float = 0
    prompt_tokens: float = 0
    answer_tokens: float | None = 0
    usd: float | None = 0


def estimate(job: Job) -> Estimate:
    """Estimate what a run sends at most.

    Raises:
        RunFailure: a journal cannot be read.
    """
    made = Estimate(job.survey.seeds)
    journal = open_journal(job.journal, job.replay)
    every = -(-made.seeds // SAMPLE)

    async def rehearse() -> None:
        for seed in islice(job.seeds, 0, None, every):
            made.rehearsed += 1
            await synthesize(seed, job.survey.pool, job.settings, _Rehearsal(seed, job, journal, made))

    run_in_thread(rehearse())
    scale = made.seeds / made.rehearsed
    made.calls *= scale
    made.prompt_tokens *= scale
    made.answer_tokens = None if made.answer_tokens is None else made.answer_tokens * scale
    made.usd = None if made.usd is None else made.usd * scale
    canary = job.settings.canary
    if made.usd is not None and canary is not None and job.in_batches:  # its seeds are asked at the list price
        made.usd *= 1 + min(1.0, canary.seeds / made.seeds) * (1 / BATCH_PRICE - 1)
    return made


class _Rehearsal:
    """Answers the requests of one row, and counts those that no journal answers."""

    def __init__(self, seed: Seed, job: Job, journal: Journal, made: Estimate) -> None:
        self._seed = seed
        self._job = job
        self._journal = journal
        self._made = made
        self._passages = {"positive": seed.passage}
        self._cheaply_judged: set[str] = set()

    async def __call__(self, request: Request) -> Completion:
        known = self._journal.get(*request.keys)
        if known is not None:
            self._note_passage(request.step, without_reasoning(known.text))
            return known
        self._count(request, self._job.settings)
        label, value = self._answer(request)
        form = request.parameters.get("response_format")
        text = f"{label}: {value}" if form is None else json.dumps({label.lower(): value})
        return Completion(text, "stop", request.model, 0, 0)

    def _count(self, request: Request, settings: SynthesizeSettings) -> None:
        made, answer = self._made, model_of(settings, request.step)[1].max_tokens
        prompt = sum(len(message["content"].encode()) for message in request.messages) / BYTES_PER_TOKEN
        made.calls += 1
        made.prompt_tokens += prompt
        price = self._job.table.price(request.model)
        if answer is None or made.answer_tokens is None:
            made.answer_tokens = made.usd = None
            return
        made.answer_tokens += answer
        if price is None or made.usd is None:
            made.usd = None
        else:
            share = BATCH_PRICE if self._job.in_batches else 1.0
            made.usd += share * (price[0] * prompt + price[1] * answer) / 1e6

    def _answer(self, request: Request) -> tuple[str, str]:
        """Return label and value of an answer that the row passes with."""
        step = request.step
        if "judge_" in step:
            if step in self._cheaply_judged:
                return "Answer", "none"
            if step.startswith(CHEAP_JUDGE):
                self._cheaply_judged.add(step)
            scenario = "negative_instruction" if step == "judge_complement" else step.partition("judge_")[2]
            shown = re.search(
                rf"\[(\d+)\] {re.escape(self._passages.get(scenario, ''))}", request.messages[0]["content"]
            )
            return "Answer", shown[1] if shown else "1"
        if step.startswith("hard_negative"):
            value = f"{step} {self._seed.passage.strip()}"
            self._note_passage(step, f"Passage: {value}")
            return "Passage", value
        kind = step.partition("_")[0]
        words = [step, self._seed.language or "", *["words"] * _WORDS[kind]]
        return kind.capitalize(), " ".join(filter(None, words))

    def _note_passage(self, step: str, answer: str) -> None:
        """Note the passage of an answer, so that the judge picks it."""
        scenario = {"hard_negative_document_1": "negative_instruction", "hard_negative_document_2": "negative_query"}
        if step in scenario:
            with contextlib.suppress(Malformed):
                answer = AnswerFormat("Passage", "").as_text(answer)
            with contextlib.suppress(Malformed):
                self._passages[scenario[step]] = labelled("passage", answer).strip()
