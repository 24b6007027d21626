"""Checks of a run before it starts Ray or pays for anything: settings, seeds, keys, journals and pending batches."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infembed_ray.config.base import nearest
from infembed_ray.config.llm import ChatModel, Endpoint
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.llm.chat import RunFailure, Unjournaled
from infembed_ray.llm.client import replaying, run_in_thread
from infembed_ray.llm.driver_watch import DRAIN_S
from infembed_ray.llm.endpoint import missing_key_hint
from infembed_ray.llm.journal import Journal, has_writer, segments
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.rate_limits import LEASE_S
from infembed_ray.progress import say
from infembed_ray.storage import local_path, require_writable, resolve_input
from infembed_ray.synthesis import batch_files
from infembed_ray.synthesis.pipeline import STEPS, synthesize
from infembed_ray.synthesis.sources import SeedSurvey, Source

BATCHES = "batches"
"""Directory of the Batch API's files, in the journal's directory."""


@dataclass(frozen=True)
class Job:
    """The resolved inputs of a run."""

    settings: SynthesizeSettings
    seeds: Source
    survey: SeedSurvey
    table: PriceTable
    journal: Path
    """Absolute, because actors have another working directory."""
    replay: Sequence[Path]

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Name of the setting -> endpoint."""
        others = {f"more_endpoints.{number}": each for number, each in enumerate(self.settings.more_endpoints)}
        return {"endpoint": self.settings.endpoint, **others}

    @property
    def has_key(self) -> bool:
        """Whether some endpoint can be asked: its key is set, or it needs none."""
        names = [endpoint.api_key_env for endpoint in self.endpoints.values()]
        return any(name is None or os.environ.get(name, "").strip() for name in names)

    @property
    def in_batches(self) -> bool:
        """Whether the Batch API is asked first."""
        return self.settings.batches is not None and self.has_key


def resolve(settings: SynthesizeSettings, seeds: Source, table: PriceTable, root: Path) -> Job:
    """Read the seeds once and locate the journals.

    Args:
        settings: of the run.
        seeds: its seeds.
        table: its prices.
        root: the output directory, which holds the journal by default.

    Raises:
        InputError: bad seeds, or a journal that is not there.
    """
    survey = seeds.survey()
    journal = local_path(settings.journal, "journal") if settings.journal else root / "journal"
    replay = [resolve_input(path, "replay").absolute() for path in settings.replay]
    return Job(settings, seeds, survey, table, journal.absolute(), replay)


def check(job: Job) -> None:
    """Check everything that can be checked before the run.

    Raises:
        InputError: settings that contradict one another; no key although some requests are in no journal; a journal that
            cannot be written; or batches of an earlier run that this run would pay for again.
    """
    _check_settings(job)
    _check_limits(job)
    if job.has_key:
        require_writable(job.journal, "journal")
        _wait_for_writers(job.journal)
    else:
        require_all_journaled(job, Journal(job.journal, job.replay))
    if not job.in_batches and (waiting := batch_files.pending(job.journal / BATCHES)):
        raise InputError(
            f"batches=null: {len(waiting)} batches of an earlier run still wait to be collected; set batches={{}}, or "
            f"remove {waiting[0]} to pay for its requests again"
        )


def _check_settings(job: Job) -> None:
    settings, passages = job.settings, len(job.survey.pool)
    if passages <= settings.distractors:
        raise InputError(
            f"distractors={settings.distractors}: seeds={job.seeds.path} has only {passages} different passages to draw from; "
            f"set distractors={passages - 1} or give more seeds"
        )
    for name, endpoint in job.endpoints.items():
        if not endpoint.base_url.startswith(("http://", "https://")):
            raise InputError(f"{name}.base_url={endpoint.base_url}: no URL; write it like https://host/v1")
    for step in settings.steps:
        if step not in STEPS:
            raise InputError(f"steps.{step}: no such step: {nearest(step, STEPS)}")


def _check_limits(job: Job) -> None:
    """A budget needs the price and the token limit of every model; tokens a minute need the token limit."""
    settings, limits = job.settings, job.settings.limits
    models: dict[str, ChatModel] = {"generator": settings.generator, "judge": settings.judge}
    models |= {f"steps.{step}": model for step, model in settings.steps.items()}
    for limit in ("budget_usd", "tokens_per_minute"):
        for name, model in models.items():
            if getattr(limits, limit) is not None and model.max_tokens is None:
                raise InputError(
                    f"limits.{limit}={getattr(limits, limit)}: {name}.max_tokens=null puts no bound on an answer; set it"
                )
    for name, model in models.items():
        if limits.budget_usd is not None and job.table.price(model.model) is None:
            raise InputError(
                f"limits.budget_usd={limits.budget_usd:g}: no price is known of {name}.model={model.model}; "
                "give its prices in a file and set prices=FILE"
            )


def _wait_for_writers(journal: Path) -> None:
    """Wait for actors of a killed driver, which journal their answers in flight (module `driver_watch`)."""
    deadline = time.monotonic() + DRAIN_S + LEASE_S
    while any(map(has_writer, segments([journal]))):
        if time.monotonic() > deadline:
            say(f"synthesize: another run also writes to journal={journal}; both may send the same requests")
            return
        time.sleep(0.1)


def require_all_journaled(job: Job, journal: Journal) -> None:
    """Check by a dry run that the journal holds every request, because there is no key.

    Raises:
        InputError: some requests are in no journal, or a journal cannot be read.
    """
    missing: Counter[str] = Counter()

    async def rehearse() -> None:
        for seed in job.seeds:
            try:
                await synthesize(seed, job.survey.pool, job.settings, replaying(journal))
            except Unjournaled as unjournaled:
                missing[unjournaled.request.model] += 1

    try:
        run_in_thread(rehearse())
    except RunFailure as failure:
        raise InputError(str(failure)) from failure
    if missing:
        endpoint = job.settings.endpoint
        raise InputError(
            f"endpoint.api_key_env={endpoint.api_key_env}: not set, and {missing.total()} of {job.survey.seeds} seeds "
            f"need requests to {' and '.join(sorted(missing))} that are in no journal; "
            f"export {endpoint.api_key_env}, or name finished journals in replay{missing_key_hint(endpoint)}"
        )
