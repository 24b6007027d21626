"""The seeds, checks of a run before it starts Ray or pays for anything, and an estimate of its calls, tokens and price."""

import hashlib
import heapq
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from infembed_ray.config.base import nearest
from infembed_ray.config.llm import ChatModel, Limits
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.llm import budget, prices
from infembed_ray.llm.client import run_in_thread
from infembed_ray.llm.endpoint import missing_key_hint
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.journal_store import open_journal
from infembed_ray.llm.prices import BATCH_PRICE, PriceTable
from infembed_ray.records import tables
from infembed_ray.records.files import BadRows
from infembed_ray.records.tables import Seed
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import Step, folder_of, output_state, require_access, resolve_input
from infembed_ray.synthesis import batch_files, templates
from infembed_ray.synthesis.judge import Pool
from infembed_ray.synthesis.pipeline import CHEAP_JUDGE, STEPS, model_of, next_request, steps_of

POOL_SIZE = 10_000
"""Most passages to draw distractors from."""
BATCHES = "batches"
"""Directory of the Batch API's files, in the journal's directory."""
SAMPLE = 500
"""Most seeds that are looked at; they are spread evenly, and the figures are scaled to all seeds."""
BYTES_PER_TOKEN = 4
"""Approximate UTF-8 bytes per token of English text."""
PROMPT_BYTES = 1200
"""Length of a prompt without the texts of its row, with an instruction and an example."""


class SeedReader:
    """The seeds of a run. Each iteration reads the files again, in the same order, up to `settings.limit`."""

    def __init__(self, settings: SynthesizeSettings) -> None:
        self._settings = settings
        self.path = resolve_input(settings.seeds, "seeds")
        self.bad = BadRows("seeds")
        """Rows that the last iteration could not use."""

    def __iter__(self) -> Iterator[Seed]:
        return islice(self._all(), self._settings.limit)

    def survey(self) -> tuple[int, Pool]:
        """Read all seeds once; return their number, and all distinct passages in seed order, or a sample of POOL_SIZE.

        Passages beyond the limit are in the pool too, so the judge's requests do not depend on it.
        """
        count, pool = sampled(self._all(), POOL_SIZE)
        return min(count, self._settings.limit or count), pool

    def _all(self) -> Iterator[Seed]:
        settings = self._settings
        self.bad = BadRows("seeds", settings.on_bad_row == "reject")
        return tables.stream(self.path, Seed, "seeds", settings.columns, settings.split, self.bad)


def sampled(seeds: Iterable[Seed], size: int) -> tuple[int, Pool]:
    """Return the number of seeds, and their distinct passages in the order in which they first occur.

    Of more than `size` passages, it takes those with the smallest hashes, in bounded memory: the sample does not depend on the
    order of the seeds.
    """
    count, kept = 0, dict[bytes, tuple[str, set[str]]]()

    def smallest() -> dict[bytes, tuple[str, set[str]]]:
        chosen = set(heapq.nsmallest(size, kept))
        return {digest: passage for digest, passage in kept.items() if digest in chosen}

    for seed in seeds:
        count += 1
        digest = hashlib.blake2b(seed.passage.encode(), digest_size=8).digest()
        kept.setdefault(digest, (seed.passage, set()))[1].add(seed.query)
        if len(kept) >= 2 * size:
            kept = smallest()
    return count, Pool.of(dict(smallest().values()))


@dataclass(frozen=True)
class Job:
    """The resolved inputs of a run."""

    settings: SynthesizeSettings
    seeds: Iterable[Seed]
    number: int
    """Of the seeds."""
    pool: Pool
    table: PriceTable
    journal: Place
    replay: Sequence[str]
    """Paths and URIs. Paths are absolute, because actors have another working directory."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Key -> why a request must not be sent: no batch answered it (`batches.rest`)."""

    @property
    def has_key(self) -> bool:
        """Whether the endpoint can be asked: its key is set, or it needs none."""
        name = self.settings.endpoint.api_key_env
        return name is None or bool(os.environ.get(name, "").strip())

    @property
    def in_batches(self) -> bool:
        """Whether the Batch API is asked first."""
        return self.settings.batches is not None and self.has_key


def prepare(settings: SynthesizeSettings) -> tuple[SeedReader, PriceTable, Step]:
    """Open the seeds and the prices, and identify the run.

    Raises:
        InputError: seeds, prices or prompts cannot be read, the output cannot be written, a step does not exist, or the limits
            cannot be kept.
    """
    seeds, table, *_ = check_all(
        lambda: SeedReader(settings),
        lambda: _prices(settings),
        lambda: templates.check(settings.prompts),
        lambda: _check_steps(settings),
    )
    named = {"seeds": seeds.path, "prompts": templates.DIRECTORY}
    if settings.prices is not None:
        named["prices"] = resolve_input(settings.prices, "prices")
    if settings.prompts is not None:
        named["own_prompts"] = resolve_input(settings.prompts, "prompts")
    return seeds, table, Step("synthesize", settings, settings.output, named)


def _prices(settings: SynthesizeSettings) -> PriceTable:
    table = prices.load(settings.prices)
    check_limits(settings.limits, models(settings), table)
    return table


def resolve(settings: SynthesizeSettings, seeds: SeedReader, table: PriceTable) -> Job:
    """Read the seeds once and locate the journals; InputError if seeds are bad, or a journal is missing."""
    replay = [each if is_uri(each) else str(resolve_input(each, "replay").absolute()) for each in settings.replay]
    return Job(settings, seeds, *seeds.survey(), table, folder_of(settings, "journal"), replay)


def check(job: Job) -> None:
    """Check what depends on the seeds and the journal: distractors, key, journal and waiting batches."""
    check_all(lambda: _check_distractors(job), lambda: _check_journal(job), lambda: _check_batches(job))


def _check_journal(job: Job) -> None:
    if not job.has_key:
        require_all_journaled(job, open_journal(job.journal, job.replay))
    else:
        require_access(job.journal, "journal")


def _check_batches(job: Job) -> None:
    if not isinstance(job.journal, Path):
        if job.in_batches:
            fault = f"the state of batches needs a directory, and journal={job.journal} is in an object store"
            remedy = "set journal=DIRECTORY on a file system that all nodes share, or batches=null"
            raise InputError.of("batches", None, fault, remedy)
    elif not job.in_batches and (waiting := batch_files.pending(job.journal / BATCHES)):
        fault = f"{len(waiting)} batches of an earlier run still wait to be collected"
        remedy = f"set batches={{}}, or remove {waiting[0]} to pay for its requests again"
        raise InputError.of("batches", "null", fault, remedy)


def _check_distractors(job: Job) -> None:
    settings, pool = job.settings, job.pool
    most = max(map(len, pool.relevant.values()))
    if len(pool) - most < settings.distractors:
        passages = f"{len(pool)} different passages to draw from, and {most} of them for one query"
        remedy = f"set distractors={len(pool) - most} or give more seeds"
        raise InputError.of("distractors", settings.distractors, f"seeds={settings.seeds} has only {passages}", remedy)


def models(settings: SynthesizeSettings) -> dict[str, ChatModel]:
    """Return name of the setting -> model."""
    cheap: dict[str, ChatModel] = {} if settings.cheap_judge is None else {"cheap_judge": settings.cheap_judge}
    steps = {f"steps.{step}": model for step, model in settings.steps.items()}
    return {"generator": settings.generator, **cheap, "judge": settings.judge, **steps}


def _check_steps(settings: SynthesizeSettings) -> None:
    faults = [f"steps.{step}: no such step: {nearest(step, STEPS)}" for step in settings.steps if step not in STEPS]
    if faults:
        raise InputError(*faults)


def check_limits(limits: Limits, asked: Mapping[str, ChatModel], table: PriceTable) -> None:
    """Require what limits need of the models (by setting): a budget a price, and like tokens per minute `max_tokens`."""
    faults = [
        f"limits.{limit}={getattr(limits, limit)}: {name}.max_tokens=null puts no bound on an answer; set it"
        for limit in ("budget_usd", "tokens_per_minute")
        for name, model in asked.items()
        if getattr(limits, limit) is not None and model.max_tokens is None
    ]
    faults += [
        f"limits.budget_usd={limits.budget_usd:g}: no price is known of {name}.model={model.model}; give its prices in a file and "
        "set prices=FILE"
        for name, model in asked.items()
        if limits.budget_usd is not None and table.price(model.model) is None
    ]
    if faults:
        raise InputError(*faults)


def require_all_journaled(job: Job, journal: Journal) -> None:
    """Check by a dry run that the journal holds every request, because there is no key; InputError if it does not."""
    missing: Counter[str] = Counter()  # model -> seeds that need a request to it

    async def rehearse() -> None:
        for seed in job.seeds:
            if request := await next_request(seed, job.pool, job.settings, journal):
                missing[request.model] += 1

    run_in_thread(rehearse())
    if missing:
        endpoint = job.settings.endpoint
        asked = f"{missing.total()} of {job.number} seeds need requests to {' and '.join(sorted(missing))}"
        remedy = f"export {endpoint.api_key_env}, or name finished journals in replay{missing_key_hint(endpoint)}"
        fault = f"not set, and {asked} that are in no journal"
        raise InputError.of("endpoint.api_key_env", endpoint.api_key_env, fault, remedy)


@dataclass
class Estimate:
    """What a run is expected to send at most, by `rehearsed` of its seeds; infinite without a bound, USD NaN without a price."""

    seeds: int
    rehearsed: int = 0
    calls: float = 0
    prompt_tokens: float = 0
    answer_tokens: float = 0
    usd: float = 0


def estimate(job: Job) -> Estimate:
    """Estimate what a run sends at most; InputError if a journal cannot be read.

    A row takes all steps from the first one that no journal answers, and a cheap judge answers twice before `judge`.
    """
    made, steps = Estimate(job.number), steps_of(job.settings)
    journal = open_journal(job.journal, job.replay)
    every = -(-made.seeds // SAMPLE)

    async def rehearse() -> None:
        for seed in islice(job.seeds, 0, None, every):
            made.rehearsed += 1
            if request := await next_request(seed, job.pool, job.settings, journal):
                for step in steps[steps.index(request.step) :]:
                    _count(made, job, seed, step)

    run_in_thread(rehearse())
    for name in ("calls", "prompt_tokens", "answer_tokens", "usd"):
        setattr(made, name, getattr(made, name) * made.seeds / made.rehearsed)
    return made


def _count(made: Estimate, job: Job, seed: Seed, step: str) -> None:
    """Add what a step of a row takes."""
    model, calls = model_of(job.settings, step)[1], 2 if step.startswith(CHEAP_JUDGE) else 1
    passages = 3 + job.settings.distractors if "judge" in step else 1  # generated ones are as long as the seed's
    size = PROMPT_BYTES + len(seed.query.encode()) + passages * len(seed.passage.encode())
    prompt, answer = calls * size / BYTES_PER_TOKEN, calls * (model.max_tokens or math.inf)
    of_prompt, of_answer, *_ = job.table.price(model.model) or (math.nan, math.nan)
    made.calls += calls
    made.prompt_tokens += prompt
    made.answer_tokens += answer
    made.usd += (BATCH_PRICE if job.in_batches else 1.0) * (of_prompt * prompt + of_answer * answer) / 1e6


def describe(settings: SynthesizeSettings) -> Iterator[str]:
    """Yield what a run would do, line by line; InputError as for a run, after the lines that could be made."""
    seeds, table, step = prepare(settings)
    if (yield from output_state(step)):
        return
    job = resolve(settings, seeds, table)
    yield f"seeds: {job.number:,} of {seeds.path}"
    made = estimate(job)
    sample = "" if made.rehearsed == made.seeds else f" (estimated from {made.rehearsed:,} of the seeds)"
    if not made.calls:
        yield f"calls: none, the journals answer all of them{sample}"
    else:
        yield f"calls: {made.calls:,.0f} at most, if every record is kept and no answer is malformed{sample}"
        unbound = [f"{name}.max_tokens" for name, model in models(settings).items() if not model.max_tokens]
        bound = f"at most {made.answer_tokens:,.0f} for answers"
        if not math.isfinite(made.answer_tokens):
            bound = f"no bound for answers; set {' and '.join(unbound)}"
        yield f"tokens: about {made.prompt_tokens:,.0f} for prompts, {bound}"
        if math.isfinite(made.usd):
            yield f"price: about {made.usd:,.2f} USD at most, at list prices of {table.as_of}"
        elif math.isfinite(made.answer_tokens):
            yield "price: unknown, because a model has no list price; give its prices in a file and set prices=FILE"
    check(job)
    if settings.limits.budget_usd is not None:
        spent = budget.spent_usd(job.journal, table)
        yield f"budget: {settings.limits.budget_usd:,.2f} USD, of which this journal has used {spent:,.2f}"
