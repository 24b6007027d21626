"""The seeds, and checks of a run before it starts Ray or pays for anything: settings, seeds, keys, journals, pending batches."""

from __future__ import annotations

import hashlib
import heapq
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
from infembed_ray.llm import prices
from infembed_ray.llm.client import run_in_thread
from infembed_ray.llm.endpoint import missing_key_hint
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.journal_store import open_journal
from infembed_ray.llm.prices import PriceTable
from infembed_ray.records import tables
from infembed_ray.records.files import BadRows
from infembed_ray.records.tables import Seed
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import Step, folder_of, require_access, resolve_input
from infembed_ray.synthesis import batch_files, templates
from infembed_ray.synthesis.pipeline import STEPS, next_request

POOL_SIZE = 10_000
"""Most passages to draw distractors from."""
BATCHES = "batches"
"""Directory of the Batch API's files, in the journal's directory."""


@dataclass(frozen=True)
class SeedSurvey:
    """What is known of the seeds before any request is sent."""

    seeds: int
    pool: tuple[str, ...]
    """Passages to draw distractors from: all distinct ones in seed order, or a sample of POOL_SIZE."""


class SeedReader:
    """The seeds of a run. Each iteration reads the files again, in the same order, up to `settings.limit`."""

    def __init__(self, settings: SynthesizeSettings) -> None:
        self._settings = settings
        self.path = resolve_input(settings.seeds, "seeds")
        self.bad = BadRows("seeds")
        """Rows that the last iteration could not use."""

    def __iter__(self) -> Iterator[Seed]:
        return islice(self._all(), self._settings.limit)

    def survey(self) -> SeedSurvey:
        """Read all seeds once. Passages beyond the limit are in the pool too, so the judge's requests do not depend on it.

        Raises:
            InputError: as `tables.stream`.
        """
        count, pool = 0, _PassageSample(POOL_SIZE)
        for seed in self._all():
            count += 1
            pool.add(seed.passage)
        return SeedSurvey(min(count, self._settings.limit or count), pool.passages())

    def _all(self) -> Iterator[Seed]:
        settings = self._settings
        self.bad = BadRows("seeds", settings.on_bad_row == "reject")
        return tables.stream(self.path, Seed, "seeds", settings.columns, settings.split, self.bad)


class _PassageSample:
    """The distinct passages with the smallest hashes: a sample in bounded memory that does not depend on the order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: dict[bytes, str] = {}  # by hash, in the order in which they were first added

    def add(self, passage: str) -> None:
        self._kept.setdefault(hashlib.blake2b(passage.encode(), digest_size=8).digest(), passage)
        if len(self._kept) >= 2 * self._size:
            self._prune()

    def passages(self) -> tuple[str, ...]:
        """Return the sample in the order in which its passages were first added."""
        self._prune()
        return tuple(self._kept.values())

    def _prune(self) -> None:
        smallest = set(heapq.nsmallest(self._size, self._kept))
        self._kept = {digest: passage for digest, passage in self._kept.items() if digest in smallest}


@dataclass(frozen=True)
class Job:
    """The resolved inputs of a run."""

    settings: SynthesizeSettings
    seeds: Iterable[Seed]
    survey: SeedSurvey
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
        InputError: seeds, prices or prompts cannot be read, or the output cannot be written.
    """
    seeds, table, _ = check_all(
        lambda: SeedReader(settings),
        lambda: prices.load(settings.prices),
        lambda: templates.check(settings.prompts),
    )
    named = {"seeds": seeds.path, "prompts": templates.DIRECTORY}
    if settings.prices is not None:
        named["prices"] = resolve_input(settings.prices, "prices")
    if settings.prompts is not None:
        named["own_prompts"] = resolve_input(settings.prompts, "prompts")
    return seeds, table, Step("synthesize", settings, settings.output, named)


def resolve(settings: SynthesizeSettings, seeds: SeedReader, table: PriceTable) -> Job:
    """Read the seeds once and locate the journals.

    Raises:
        InputError: bad seeds, or a journal that is not there.
    """
    survey = seeds.survey()
    replay = [each if is_uri(each) else str(resolve_input(each, "replay").absolute()) for each in settings.replay]
    return Job(settings, seeds, survey, table, folder_of(settings, "journal"), replay)


def check(job: Job) -> None:
    """Check everything that can be checked before the run.

    Raises:
        InputError: settings that contradict one another; no key although some requests are in no journal; a journal that
            cannot be written; or batches of an earlier run that this run would pay for again.
    """
    check_all(
        lambda: check_settings(job.settings, job.table),
        lambda: _check_distractors(job),
        lambda: _check_journal(job),
        lambda: _check_batches(job),
    )


def _check_journal(job: Job) -> None:
    if not job.has_key:
        require_all_journaled(job, open_journal(job.journal, job.replay))
    else:
        require_access(job.journal, "journal")


def _check_batches(job: Job) -> None:
    if not isinstance(job.journal, Path):
        if job.in_batches:
            raise InputError(
                f"batches: the state of batches needs a directory, and journal={job.journal} is in an object store; set "
                "journal=DIRECTORY on a file system that all nodes share, or batches=null"
            )
    elif not job.in_batches and (waiting := batch_files.pending(job.journal / BATCHES)):
        raise InputError(
            f"batches=null: {len(waiting)} batches of an earlier run still wait to be collected; set batches={{}}, or "
            f"remove {waiting[0]} to pay for its requests again"
        )


def check_settings(settings: SynthesizeSettings, table: PriceTable) -> None:
    """Check what does not depend on the seeds.

    Raises:
        InputError: a step does not exist, or the limits cannot be kept.
    """
    check_all(
        lambda: _check_steps(settings),
        lambda: check_limits(settings.limits, models(settings), table),
    )


def _check_distractors(job: Job) -> None:
    settings, passages = job.settings, len(job.survey.pool)
    if passages <= settings.distractors:
        raise InputError(
            f"distractors={settings.distractors}: seeds={settings.seeds} has only {passages} different passages to draw from; "
            f"set distractors={passages - 1} or give more seeds"
        )


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
    """A budget needs the price of every model; like a limit of tokens per minute, it also needs `max_tokens`.

    Args:
        asked: name of the setting -> model.

    Raises:
        InputError: a limit cannot be kept.
    """
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
    """Check by a dry run that the journal holds every request, because there is no key.

    Raises:
        InputError: some requests are in no journal, or a journal cannot be read.
    """
    if missing := _unanswered(job, journal):
        endpoint = job.settings.endpoint
        raise InputError(
            f"endpoint.api_key_env={endpoint.api_key_env}: not set, and {missing.total()} of {job.survey.seeds} seeds "
            f"need requests to {' and '.join(sorted(missing))} that are in no journal; "
            f"export {endpoint.api_key_env}, or name finished journals in replay{missing_key_hint(endpoint)}"
        )


def _unanswered(job: Job, journal: Journal) -> Counter[str]:
    """Return model -> seeds that need a request to it that no journal answers."""
    missing: Counter[str] = Counter()

    async def rehearse() -> None:
        for seed in job.seeds:
            request = await next_request(seed, job.survey.pool, job.settings, journal)
            if request is not None:
                missing[request.model] += 1

    run_in_thread(rehearse())
    return missing
