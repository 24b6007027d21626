"""Estimate of a run's calls, tokens and price: every row is kept, so that it is an upper estimate.

A row takes all steps from the first one that no journal answers, and a cheap judge answers twice before `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.llm import budget, prices
from infembed_ray.llm.client import run_in_thread
from infembed_ray.llm.journal_store import open_journal
from infembed_ray.llm.prices import BATCH_PRICE
from infembed_ray.records.tables import Seed
from infembed_ray.storage.dry_run import state
from infembed_ray.synthesis import preflight
from infembed_ray.synthesis.pipeline import CHEAP_JUDGE, model_of, next_request, steps_of
from infembed_ray.synthesis.preflight import Job

SAMPLE = 500
"""Most seeds that are looked at; they are spread evenly, and the figures are scaled to all seeds."""
BYTES_PER_TOKEN = 4
"""Approximate UTF-8 bytes per token of English text."""
PROMPT_BYTES = 1200
"""Length of a prompt without the texts of its row, with an instruction and an example."""


@dataclass
class Estimate:
    """What a run is expected to send at most.

    Attributes:
        seeds: of the run; `rehearsed`: those looked at.
        calls: requests that no journal answers, without those after a malformed, cut-off, refused or empty answer.
        prompt_tokens: of these calls.
        answer_tokens: infinite if the settings put no bound on some answers.
        usd: at list prices; infinite or NaN if the answers have no bound, or a price is unknown.
    """

    seeds: int
    rehearsed: int = 0
    calls: float = 0
    prompt_tokens: float = 0
    answer_tokens: float = 0
    usd: float = 0


def estimate(job: Job) -> Estimate:
    """Estimate what a run sends at most; InputError if a journal cannot be read."""
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
    for name in ("calls", "prompt_tokens", "answer_tokens", "usd"):
        setattr(made, name, getattr(made, name) * made.seeds / made.rehearsed)
    return made


def _count(made: Estimate, job: Job, seed: Seed, step: str) -> None:
    """Add what a step of a row takes."""
    model, calls = model_of(job.settings, step)[1], 2 if step.startswith(CHEAP_JUDGE) else 1
    prompt, answer = calls * _prompt_bytes(job, seed, step) / BYTES_PER_TOKEN, calls * (model.max_tokens or math.inf)
    of_prompt, of_answer, *_ = job.table.price(model.model) or (math.nan, math.nan)
    made.calls += calls
    made.prompt_tokens += prompt
    made.answer_tokens += answer
    made.usd += (BATCH_PRICE if job.in_batches else 1.0) * (of_prompt * prompt + of_answer * answer) / 1e6


def _prompt_bytes(job: Job, seed: Seed, step: str) -> int:
    """Return about how long a step's prompt is: generated passages are as long as the seed's."""
    passages = 3 + job.settings.distractors if "judge" in step else 1
    return PROMPT_BYTES + len(seed.query.encode()) + passages * len(seed.passage.encode())


def describe(settings: SynthesizeSettings) -> Iterator[str]:
    """Yield what a run would do, line by line.

    Raises:
        InputError: as a run, after the lines that could be made.
    """
    try:
        seeds, table, step = preflight.prepare(settings)
    except InputError as error:
        check_all(partial(_raise, error), lambda: preflight.check_settings(settings, prices.load(settings.prices)))
        raise
    if (yield from state(step)):
        return
    job = preflight.resolve(settings, seeds, table)
    yield f"seeds: {job.survey.seeds:,} of {seeds.path}"
    made = estimate(job)
    sample = "" if made.rehearsed == made.seeds else f" (estimated from {made.rehearsed:,} of the seeds)"
    if not made.calls:
        yield f"calls: none, the journals answer all of them{sample}"
    else:
        yield f"calls: {made.calls:,.0f} at most, if every record is kept and no answer is malformed{sample}"
        unbound = [f"{name}.max_tokens" for name, model in preflight.models(settings).items() if not model.max_tokens]
        bound = (
            f"at most {made.answer_tokens:,.0f} for answers"
            if math.isfinite(made.answer_tokens)
            else f"no bound for answers; set {' and '.join(unbound)}"
        )
        yield f"tokens: about {made.prompt_tokens:,.0f} for prompts, {bound}"
        if math.isfinite(made.usd):
            yield f"price: about {made.usd:,.2f} USD at most, at list prices of {table.as_of}"
        elif math.isfinite(made.answer_tokens):
            yield "price: unknown, because a model has no list price; give its prices in a file and set prices=FILE"
    preflight.check(job)
    if settings.limits.budget_usd is not None:
        spent = budget.spent_usd(job.journal, table)
        yield f"budget: {settings.limits.budget_usd:,.2f} USD, of which this journal has used {spent:,.2f}"


def _raise(error: InputError) -> None:
    raise error
