"""Estimate of a run's calls, tokens and price: every row is kept, so that it is an upper estimate.

A row takes all steps from the first one that no journal answers, and a cheap judge answers twice before `judge`. Texts that
do not exist yet are as long as those of the published set on average (paper, Table 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from infembed_ray.llm.client import run_in_thread
from infembed_ray.llm.journal_store import open_journal
from infembed_ray.llm.prices import BATCH_PRICE
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis import templates
from infembed_ray.synthesis.pipeline import CHEAP_JUDGE, model_of, next_request, steps_of
from infembed_ray.synthesis.preflight import Job

SAMPLE = 500
"""Most seeds that are looked at; they are spread evenly, and the figures are scaled to all seeds."""
BYTES_PER_TOKEN = 4
"""Approximate UTF-8 bytes per token of English text."""
_INSTRUCTION = "words " * 36
"""As many words as in the published set; queries and passages are as long as those of the seed."""
_PROMPTS: Mapping[str, str] = {
    "instruction_positive": "instruction_generation",
    "instruction_negative": "instruction_poisoning",
    "query_negative": "query_poisoning",
    "hard_negative_document_1": "passage_writing",
    "hard_negative_document_2": "passage_writing",
    "instruction_complement": "complement",
}
"""Step -> its prompt; the others have the judge's."""


@dataclass
class Estimate:
    """What a run is expected to send at most.

    Attributes:
        seeds: of the run; `rehearsed`: those looked at.
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
    """Estimate what a run sends at most; RunFailure if a journal cannot be read."""
    made, steps = Estimate(job.survey.seeds), steps_of(job.settings)
    journal = open_journal(job.journal, job.replay)
    every = -(-made.seeds // SAMPLE)

    async def rehearse() -> None:
        for seed in islice(job.seeds, 0, None, every):
            made.rehearsed += 1
            request = await next_request(seed, job.survey.pool, job.settings, journal)
            if request is not None:
                for step in steps[steps.index(request.step) :]:
                    _count(made, job, seed, step)

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


def _count(made: Estimate, job: Job, seed: Seed, step: str) -> None:
    """Add what a step of a row takes."""
    model, calls = model_of(job.settings, step)[1], 2 if step.startswith(CHEAP_JUDGE) else 1
    prompt = calls * _prompt_bytes(job, seed, step) / BYTES_PER_TOKEN
    made.calls += calls
    made.prompt_tokens += prompt
    if model.max_tokens is None or made.answer_tokens is None:
        made.answer_tokens = made.usd = None
        return
    answer, price = calls * model.max_tokens, job.table.price(model.model)
    made.answer_tokens += answer
    if price is None or made.usd is None:
        made.usd = None
    else:
        made.usd += (BATCH_PRICE if job.in_batches else 1.0) * (price[0] * prompt + price[1] * answer) / 1e6


def _prompt_bytes(job: Job, seed: Seed, step: str) -> int:
    settings = job.settings
    source = "leetcode" if seed.language else seed.source
    template = templates.load(_PROMPTS.get(step, "judge"), source, settings.prompts, settings.shared_prefix)
    texts = {
        **dict.fromkeys(("query", "query_positive"), seed.query),
        **dict.fromkeys(("instruction", "instruction_positive"), _INSTRUCTION),
        **dict.fromkeys(("document", "reference", "wanted", "unwanted"), seed.passage),
        "candidates": (3 + settings.distractors) * seed.passage,
        "language": seed.language or "",
    }
    request = template.request(model_of(settings, step)[1], step, seed.id, texts)
    return len(request.messages[0]["content"].encode())
