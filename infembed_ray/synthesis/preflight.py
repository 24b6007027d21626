"""Checks of a run before it starts Ray or pays for anything: settings, seeds, keys, journals and pending batches."""

from __future__ import annotations

import os
import secrets
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np

from infembed_ray.config.base import nearest
from infembed_ray.config.llm import ChatModel, Endpoint, Limits
from infembed_ray.config.synthesis import Canary, Selection, SynthesizeSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.llm import prices
from infembed_ray.llm.chat import Request, RunFailure
from infembed_ray.llm.client import run_in_thread
from infembed_ray.llm.dialects import Dialects
from infembed_ray.llm.endpoint import api_key, missing_key_hint
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.journal_store import JournalPlace, open_journal
from infembed_ray.llm.prices import PriceTable
from infembed_ray.progress import say, track
from infembed_ray.records.tables import Seed
from infembed_ray.storage.object_store import convert_errors, is_uri
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import Step, folder_of, require_access, require_writable, resolve_input
from infembed_ray.synthesis import batch_files, templates
from infembed_ray.synthesis.pipeline import STEPS, model_of, next_request, steps_of
from infembed_ray.synthesis.sources import SeedSurvey, Source

BATCHES = "batches"
"""Directory of the Batch API's files, in the journal's directory."""
PROBE = f".probe-{secrets.token_hex(4)}"
"""Object that shows whether a journal in an object store can be written."""


@dataclass(frozen=True)
class Job:
    """The resolved inputs of a run."""

    settings: SynthesizeSettings
    seeds: Iterable[Seed]
    survey: SeedSurvey
    table: PriceTable
    journal: JournalPlace
    replay: Sequence[str]
    """Paths and URIs. Paths are absolute, because actors have another working directory."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Key -> why a request must not be sent: no batch answered it (`batches.rest`)."""
    dialects: Dialects | None = None
    """Of the models, once this run has asked them."""

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Name of the setting -> endpoint."""
        return endpoints(self.settings)

    @property
    def has_key(self) -> bool:
        """Whether some endpoint can be asked: its key is set, or it needs none."""
        names = [None if endpoint.serve else endpoint.api_key_env for endpoint in self.endpoints.values()]
        return any(name is None or os.environ.get(name, "").strip() for name in names)

    @property
    def in_batches(self) -> bool:
        """Whether the Batch API is asked first."""
        return self.settings.batches is not None and self.has_key


def prepare(settings: SynthesizeSettings) -> tuple[Source, PriceTable, Step]:
    """Open the seeds and the prices, and identify the run.

    Raises:
        InputError: seeds, prices or prompts cannot be read, or the output cannot be written.
    """
    seeds, table, (encoder, names), _ = check_all(
        lambda: Source(settings),
        lambda: prices.load(settings.prices),
        lambda: _encoder_identity(settings.select),
        lambda: templates.check(settings.prompts),
    )
    named = {"seeds": seeds.path, "prompts": templates.DIRECTORY, **encoder}
    if settings.prices is not None:
        named["prices"] = resolve_input(settings.prices, "prices")
    if settings.prompts is not None:
        named["own_prompts"] = resolve_input(settings.prompts, "prompts")
    return seeds, table, Step("synthesize", settings, settings.output, named, names)


def _encoder_identity(selection: Selection | None) -> tuple[dict[str, Place], dict[str, str]]:
    if selection is None:
        return {}, {}
    from infembed_ray.modeling.checkpoint import locate

    found = locate(selection.encoder, "select.encoder")
    return found.inputs, found.names


def _choose(seeds: Source, selection: Selection) -> None:
    from infembed_ray.modeling.encoder import InstructionEncoder  # imports torch

    encoder = InstructionEncoder.from_pretrained(selection.encoder)
    with track("select", None) as advance:

        def embed(texts: Sequence[str]) -> np.ndarray:
            advance(len(texts), "seeds embedded")
            return encoder.encode_passages(texts, selection.batch_tokens)

        seeds.choose(selection.seeds, embed)


def resolve(settings: SynthesizeSettings, seeds: Source, table: PriceTable) -> Job:
    """Read the seeds once and locate the journals; warn if the prices are old.

    Raises:
        InputError: bad seeds, or a journal that is not there.
    """
    if warning := table.warning([model.model for model in models(settings).values()], settings.prices, date.today()):
        say(f"synthesize: {warning}")
    survey = seeds.survey()
    if settings.select is not None:
        _choose(seeds, settings.select)
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


def make_journal(job: Job) -> None:
    """Make the place of the journal; InputError if it cannot be written."""
    if isinstance(job.journal, Path):
        require_writable(job.journal, "journal")
        return
    with convert_errors(str(job.journal), "journal"):
        job.journal.write(PROBE, "")
        job.journal.delete(PROBE)


def has_pending_batches(job: Job) -> bool:
    """Whether batches of an earlier run wait to be collected: their requests must not be asked online."""
    return isinstance(job.journal, Path) and bool(batch_files.pending(job.journal / BATCHES))


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
    if job.in_batches:
        try:
            api_key(job.settings.endpoint)  # the Batch API is asked only there
        except RunFailure as failure:
            raise InputError(str(failure)) from failure
    if job.in_batches and job.settings.canary is not None and job.settings.canary.stop and has_pending_batches(job):
        raise InputError(
            "canary.stop=true: batches of an earlier run still wait to be collected, and its canary may not ask their requests "
            "again; set canary=null to go on with that run"
        )


def check_settings(settings: SynthesizeSettings, table: PriceTable) -> None:
    """Check what does not depend on the seeds.

    Raises:
        InputError: an endpoint has no URL, a step does not exist, or the limits cannot be kept.
    """
    check_all(
        lambda: check_urls(endpoints(settings)),
        lambda: _check_steps(settings),
        lambda: _check_self_hosted(settings),
        lambda: _check_in_flight(settings),
        lambda: check_limits(settings.limits, models(settings), table, settings.canary),
    )


def _check_distractors(job: Job) -> None:
    settings, passages = job.settings, len(job.survey.pool)
    if passages <= settings.distractors:
        raise InputError(
            f"distractors={settings.distractors}: seeds={settings.seeds} has only {passages} different passages to draw from; "
            f"set distractors={passages - 1} or give more seeds"
        )


def endpoints(settings: SynthesizeSettings) -> dict[str, Endpoint]:
    """Return name of the setting -> endpoint."""
    others = {f"more_endpoints.{number}": each for number, each in enumerate(settings.more_endpoints)}
    return {"endpoint": settings.endpoint, **others}


def models(settings: SynthesizeSettings) -> dict[str, ChatModel]:
    """Return name of the setting -> model."""
    cheap: dict[str, ChatModel] = {} if settings.cheap_judge is None else {"cheap_judge": settings.cheap_judge}
    steps = {f"steps.{step}": model for step, model in settings.steps.items()}
    return {"generator": settings.generator, **cheap, "judge": settings.judge, **steps}


def probes(settings: SynthesizeSettings) -> dict[str, Request]:
    """Return name of a model's setting -> a short request with its parameters; one of those with equal parameters."""
    requests = [
        (name, templates.probe(model)) for name, model in (model_of(settings, step) for step in steps_of(settings))
    ]
    return dict({request.key: (name, request) for name, request in reversed(requests)}.values())


def _check_steps(settings: SynthesizeSettings) -> None:
    faults = [f"steps.{step}: no such step: {nearest(step, STEPS)}" for step in settings.steps if step not in STEPS]
    if faults:
        raise InputError(*faults)


def _check_in_flight(settings: SynthesizeSettings) -> None:
    shared, actors = settings.limits.in_flight, settings.actors
    if shared is not None and shared < actors:
        raise InputError(f"limits.in_flight={shared}: too few for actors={actors}; set actors={shared}, or raise it")


def _check_self_hosted(settings: SynthesizeSettings) -> None:
    faults = [
        f"{name}.serve: only endpoint can start a model; leave it out"
        for name, endpoint in endpoints(settings).items()
        if endpoint.serve is not None and name != "endpoint"
    ]
    served = settings.endpoint.serve
    if served is not None:
        asked = {name: model.model for name, model in (model_of(settings, step) for step in steps_of(settings))}
        faults += [
            f"{name}.model={model}: endpoint.serve.model={served.model} starts only that model; name it, or start a server "
            "of your own and give its endpoint.base_url"
            for name, model in asked.items()
            if model != served.model
        ]
        if settings.batches is not None:
            faults.append("batches: a self-hosted model (endpoint.serve) has no Batch API; set batches=null")
    if faults:
        raise InputError(*faults)


def check_urls(named: Mapping[str, Endpoint]) -> None:
    """Check the URLs of endpoints, given by the names of their settings; InputError if a base URL is none."""
    faults = [
        f"{name}.base_url={endpoint.base_url}: no URL; write it like https://host/v1"
        for name, endpoint in named.items()
        if not _is_url(endpoint.base_url)
    ]
    if faults:
        raise InputError(*faults)


def _is_url(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and text == text.strip()
    except ValueError:
        return False


def check_limits(
    limits: Limits, asked: Mapping[str, ChatModel], table: PriceTable, canary: Canary | None = None
) -> None:
    """A limit in USD needs the price of every model; a budget and tokens a minute need the token limit, too.

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
    most_usd = {"limits.budget_usd": limits.budget_usd}
    if canary is not None:
        most_usd["canary.max_usd_per_1000_kept"] = canary.max_usd_per_1000_kept
    faults += [
        f"{limit}={usd:g}: no price is known of {name}.model={model.model}; give its prices in a file and set prices=FILE"
        for limit, usd in most_usd.items()
        for name, model in asked.items()
        if usd is not None and table.price(model.model) is None
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


def all_journaled(job: Job) -> bool:
    """Return whether the journal holds every request, so that no model is asked.

    Raises:
        InputError: a journal cannot be read.
    """
    return not _unanswered(job, open_journal(job.journal, job.replay), most=1)


def _unanswered(job: Job, journal: Journal, most: int | None = None) -> Counter[str]:
    """Return model -> seeds that need a request to it that no journal answers; stop after `most` of them."""
    missing: Counter[str] = Counter()

    async def rehearse() -> None:
        for seed in job.seeds:
            request = await next_request(seed, job.survey.pool, job.settings, journal)
            if request is not None:
                missing[request.model] += 1
                if missing.total() == most:
                    return

    try:
        run_in_thread(rehearse())
    except RunFailure as failure:
        raise InputError(str(failure)) from failure
    return missing
