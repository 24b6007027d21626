"""Synthesis over Ray Data: seeds in, kept, rejected and dead-lettered rows out, in the order of the seeds.

Each actor asks through one client and one journal segment of its own; one more actor keeps the limits of all. Ray Data
finishes a task's rows in order and re-runs a lost task whole; so a task is a few rows, many run at once in an actor,
and the journal answers the re-runs. Rows take their turn in the order of their tasks, so tasks end one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infembed_ray import records
from infembed_ray.config import ChatModel, Endpoint, SynthesizeSettings, nearest
from infembed_ray.distributed import connect
from infembed_ray.errors import InputError
from infembed_ray.progress import Advance, say, track
from infembed_ray.records import Seed
from infembed_ray.storage import Published, Staging, Step, existing, local_path, require_writable
from infembed_ray.synthesis import batch_api, budget, prices, templates
from infembed_ray.synthesis.breaker import ALIKE, Breaker
from infembed_ray.synthesis.chat import RunFailure, Unjournaled
from infembed_ray.synthesis.client import ChatClient, finish, replaying, without_key
from infembed_ray.synthesis.journal import Journal, has_writer, segments
from infembed_ray.synthesis.limits import LEASE_S, Figures, Gate, Grant, Lease, Report, resources
from infembed_ray.synthesis.orphan import DRAIN_S, RAY_ENVIRONMENT, Orphan, Process, this_process
from infembed_ray.synthesis.outputs import Outputs
from infembed_ray.synthesis.prices import PriceTable
from infembed_ray.synthesis.sources import Source
from infembed_ray.synthesis.steps import STEPS, Outcome, Spend, synthesize

ROWS_PER_TASK = 64
"""At the most: a task costs Ray Data as much CPU as dozens of requests do."""
TASKS_PER_ACTOR = 4
"""At the least, so that no actor is idle while another is not half done."""
ROWS_PER_SLOT = 3
"""Rows in work for each request an actor may have in flight; the others wait for a slot, a retry or the journal."""
ROWS_AHEAD = 12
"""Rows an actor has for each of these requests: in work, waiting for their turn, or for the slowest of their task."""
YOUNG_OBJECTS = 20_000
"""Objects between two looks of the garbage collector at the youngest: by its default of 700, it takes what waits for an
answer to be old, and a tenth of the CPU."""
CPUS_PER_ACTOR = 0.5
"""An actor mostly waits for its endpoint."""
REPORTS_PER_WINDOW = 200
"""How often a lease is renewed, so that what it holds unused is little; but at least every..."""
LONGEST_INTERVAL_S = 0.5
BATCHES = "batches"
"""The directory of the Batch API's files in a journal's."""

_SEEDS = pa.schema([("index", pa.int64()), *((field.name, pa.string()) for field in fields(Seed))])
_RESULTS = pa.schema([("index", pa.int64()), ("outcome", pa.string())])  # no outcome: the row is left undone


def run(settings: SynthesizeSettings) -> Published:
    """Make records of seeds; see `SynthesizeSettings`.

    Publishes `records.parquet`, `rejected.parquet` and `dead_letter.parquet`, and with `settings.complement` also
    `complements.parquet`. The journal outlives the run: an interrupted one resumes where it was, and no answer is paid
    for twice. A run that cannot go on (a refused key, a budget used up) lets the requests in flight finish, journals
    their answers, says how many seeds are left undone, and publishes nothing. A run that keeps no record publishes
    nothing either; its rejected and dead-letter files are left in the directory that the message names.

    Raises:
        InputError: bad settings or seeds; no key while some requests are in no journal; or, during the run, endpoints
            that refuse the key, the model or all requests of a step or cannot be reached, a budget that is used up, or
            no record that is kept.
    """
    seeds = Source(settings)
    named = {"seeds": seeds.path, "prompts": templates.DIRECTORY}
    table = prices.load(settings.prices)
    if settings.prices is not None:
        named["prices"] = existing(settings.prices, "prices")
    step = Step("synthesize", settings, settings.output, named)
    if done := step.finished():
        return done
    # Distractors come from all seeds: with another `limit` the judge is asked the very same.
    survey = seeds.survey()
    # Absolute: the actors' working directory is not this process's.
    journal = (local_path(settings.journal, "journal") if settings.journal else step.root / "journal").absolute()
    replay = [existing(path, "replay").absolute() for path in settings.replay]
    _validate(settings, seeds.path, survey.pool, table)
    if _has_key(settings):
        require_writable(journal, "journal")
        _await_writers(journal)
    else:
        _require_all_journaled(settings, seeds, survey.seeds, survey.pool, Journal(journal, replay))
    spent_usd = 0.0 if settings.limits.budget_usd is None else budget.spent_usd(journal, table)
    in_batches = settings.batches is not None and _has_key(settings)
    if not in_batches and (waiting := batch_api.pending(journal / BATCHES)):
        raise InputError(
            f"batches=null: {len(waiting)} batches of an earlier run still wait to be collected; set batches={{}}, or "
            f"remove {waiting[0]} to pay for what it asked again"
        )

    undone = 0
    breaker = Breaker(settings, min(ALIKE, survey.seeds))
    with contextlib.ExitStack() as held:
        staging = held.enter_context(step.publish())
        if in_batches:
            batched = _ask_in_batches(settings, seeds, survey.pool, journal, replay, spent_usd)
            staging.facts["batches"] = asdict(batched)
            spent_usd += batched.usd or 0.0
        connect()
        limits = held.enter_context(_limits(settings, step.identity, spent_usd, journal))
        tasks = (step.root / f".{step.identity}.seeds.arrow").absolute()
        held.callback(tasks.unlink, missing_ok=True)
        with (
            Outputs(staging.path, table) as outputs,
            track("synthesize", survey.seeds) as advance,
            _live(limits, outputs, settings.limits.budget_usd, advance),
        ):
            for index, outcome in _fan_out(settings, tasks, seeds, survey.seeds, survey.pool, journal, replay, limits):
                if outcome is None:
                    undone += 1
                elif not undone:
                    outputs.add(index, outcome)
                    breaker.add(outcome)
                    advance()
        figures: Figures = ray.get(limits.figures.remote())
        if settings.limits.budget_usd is not None:
            budget.note_unjournaled(journal, table, figures.committed_usd)
        if undone:
            raise InputError(
                f"{figures.failure}; {undone} of {survey.seeds} seeds are left undone and nothing is published; "
                "the journal keeps what was answered, the same command resumes"
            )
        staging.counts = outputs.counts()
        staging.facts |= {**outputs.facts(), "traffic": _traffic(figures), "left_out": dict(survey.left_out)}
        ended = sum(staging.counts[kind] for kind in ("kept", "rejected", "dead_letter"))
        assert ended == survey.seeds, f"{ended} of {survey.seeds} seeds came out"
        if not staging.counts["kept"]:
            raise InputError(_nothing_kept(staging, breaker.failure or outputs.first_failure))
    if staging.counts["dead_letter"]:
        say(f"synthesize: dead letters that no model answered are asked again after removing {step.path}")
    return step.published()


# ------------------------------------------------------------------------------------------- before work starts


def _endpoints(settings: SynthesizeSettings) -> dict[str, Endpoint]:
    """Name in the settings -> endpoint."""
    others = {f"more_endpoints.{number}": each for number, each in enumerate(settings.more_endpoints)}
    return {"endpoint": settings.endpoint, **others}


def _validate(settings: SynthesizeSettings, seeds: Path, pool: Sequence[str], table: PriceTable) -> None:
    if len(pool) <= settings.distractors:
        raise InputError(
            f"distractors={settings.distractors}: seeds={seeds} has only {len(pool)} different passages to draw from; "
            f"set distractors={len(pool) - 1} or give more seeds"
        )
    for name, endpoint in _endpoints(settings).items():
        if not endpoint.base_url.startswith(("http://", "https://")):
            raise InputError(f"{name}.base_url={endpoint.base_url}: no URL; write it like https://host/v1")
    for step in settings.steps:
        if step not in STEPS:
            raise InputError(f"steps.{step}: no such step: {nearest(step, STEPS)}")
    limits = settings.limits
    models: dict[str, ChatModel] = {"generator": settings.generator, "judge": settings.judge}
    models |= {f"steps.{step}": model for step, model in settings.steps.items()}
    for limit in ("budget_usd", "tokens_per_minute"):
        for name, model in models.items():
            if getattr(limits, limit) is not None and model.max_tokens is None:
                raise InputError(
                    f"limits.{limit}={getattr(limits, limit)}: {name}.max_tokens=null puts no bound on an answer; set it"
                )
    for name, model in models.items():
        if limits.budget_usd is not None and table.price(model.model) is None:
            raise InputError(
                f"limits.budget_usd={limits.budget_usd:g}: no price is known of {name}.model={model.model}; "
                "give its prices in a file and set prices=FILE"
            )


def _has_key(settings: SynthesizeSettings) -> bool:
    names = [endpoint.api_key_env for endpoint in _endpoints(settings).values()]
    return any(name is None or os.environ.get(name, "").strip() for name in names)


def _await_writers(journal: Path) -> None:
    """Wait for the actors of a killed driver, which journal their answers in flight (see `orphan`)."""
    deadline = time.monotonic() + DRAIN_S + LEASE_S
    while any(map(has_writer, segments([journal]))):
        if time.monotonic() > deadline:
            say(f"synthesize: another run writes to journal={journal}, too; what both need both may ask")
            return
        time.sleep(0.1)


def _nothing_kept(staging: Staging, why: str) -> str:
    counts = staging.counts
    files = f"{records.REJECTED_FILE} and {records.DEAD_LETTER_FILE} are in {staging.path}"
    return (
        f"0 of {counts['seeds']} seeds were kept ({counts['rejected']} rejected, {counts['dead_letter']} dead letters), so "
        f"nothing is published: {why}; {files}, the journal keeps every answer"
    )


def _require_all_journaled(
    settings: SynthesizeSettings, seeds: Iterable[Seed], number: int, pool: Sequence[str], journal: Journal
) -> None:
    """Without a key, the journals must hold every request: a dry pass over them, before any work."""
    missing: Counter[str] = Counter()

    async def rehearse() -> None:
        for seed in seeds:
            try:
                await synthesize(seed, pool, settings, replaying(journal))
            except Unjournaled as unjournaled:
                missing[unjournaled.request.model] += 1

    try:
        finish(rehearse())
    except RunFailure as failure:
        raise InputError(str(failure)) from failure
    if missing:
        raise InputError(
            f"endpoint.api_key_env={settings.endpoint.api_key_env}: not set, and {missing.total()} of {number} seeds "
            f"need requests to {' and '.join(sorted(missing))} that are in no journal; "
            f"export {settings.endpoint.api_key_env}, or name finished journals in replay{without_key(settings.endpoint)}"
        )


# -------------------------------------------------------------------------------------------------- the batches


def _ask_in_batches(
    settings: SynthesizeSettings,
    seeds: Iterable[Seed],
    pool: Sequence[str],
    journal: Path,
    replay: Sequence[Path],
    spent_usd: float,
) -> batch_api.Report:
    """Have the Batch API answer what it will, so that the online run finds it in the journal."""

    async def ask() -> batch_api.Report:
        own = Journal(journal, replay)
        try:
            return await batch_api.answer_in_batches(seeds, pool, settings, own, journal / BATCHES, spent_usd)
        finally:
            own.close()

    try:
        return finish(ask())
    except RunFailure as failure:
        raise InputError(str(failure)) from failure


# --------------------------------------------------------------------------------------------------- the limits


@contextlib.contextmanager
def _limits(settings: SynthesizeSettings, identity: str, spent_usd: float, journal: Path) -> Iterator[Any]:
    """The one actor that keeps the run's limits, on the driver's node: what it knows is lost only with the driver."""
    slots = min(settings.limits.in_flight or settings.actors * settings.in_flight, settings.actors * settings.in_flight)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"synthesis-limits-{identity}-{uuid.uuid4().hex[:8]}"
    actor = ray.remote(num_cpus=0)(budget.NotedLedger).options(name=name, scheduling_strategy=here)
    keeper = actor.remote(settings.limits, slots, spent_usd, journal)
    try:
        yield keeper
    finally:
        ray.kill(keeper)


def _gate(settings: SynthesizeSettings, limits: Any) -> Gate:
    """This process's part of the limits."""

    async def exchange(report: Report) -> Grant:
        try:
            grant: Grant = await limits.exchange.remote(report)
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())[:300]
            raise RunFailure(
                f"the actor that keeps the limits failed ({reason}); run the same command again, the journal resumes"
            ) from error
        return grant

    window_s = settings.limits.window_s
    lease = Lease(uuid.uuid4().hex, resources(settings.limits), settings.in_flight, window_s)
    return Gate(lease, exchange, min(LONGEST_INTERVAL_S, window_s / REPORTS_PER_WINDOW))


@contextlib.contextmanager
def _live(limits: Any, outputs: Outputs, budget_usd: float | None, advance: Advance) -> Iterator[None]:
    """Keep the note beside the bar up to date, also while no row ends; say the actors' warnings."""
    ended = threading.Event()

    def watch() -> None:
        said: set[str] = set()
        answered, then = 0, time.monotonic()
        while not ended.wait(1.0):
            try:
                figures: Figures = ray.get(limits.figures.remote())
            except ray.exceptions.RayError:
                return  # the actors say so
            now, traffic = time.monotonic(), figures.traffic
            rate, answered, then = (traffic.answered - answered) / (now - then), traffic.answered, now
            spent = "" if budget_usd is None else f", {figures.spent_usd:.2f} of {budget_usd:g} USD"
            asking = f"{rate:.0f}/s, {figures.in_flight} in flight, {traffic.rate_limited} x 429{spent}"
            advance(0, note=f"{outputs.note()}; {asking}")
            for warning in figures.warnings:
                if warning not in said:
                    said.add(warning)
                    say(f"synthesize: {warning}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        advance(0, note=outputs.note())


def _traffic(figures: Figures) -> dict[str, Any]:
    """How the endpoints fared, for the manifest."""
    traffic = figures.traffic
    return {
        "answered": traffic.answered,
        "rate_limited": traffic.rate_limited,
        "failed": traffic.failed,
        "latency_s": {name: traffic.latency_s(share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "warnings": list(figures.warnings),
    }


# -------------------------------------------------------------------------------------------------- the fan-out


def _fan_out(
    settings: SynthesizeSettings,
    file: Path,
    seeds: Iterable[Seed],
    number: int,
    pool: Sequence[str],
    journal: Path,
    replay: Sequence[Path],
    limits: Any,
) -> Iterator[tuple[int, Outcome | None]]:
    """(index of the seed, outcome) of all seeds, as they complete; without an outcome where it is left undone.

    The seeds are written to `file`, which all nodes must see.
    """
    rows = max(1, min(ROWS_PER_TASK, settings.in_flight // 2, number // (TASKS_PER_ACTOR * settings.actors)))
    tasks = _write_tasks(file, seeds, rows)
    driver = this_process()
    at_once = min(-(-settings.in_flight * ROWS_AHEAD // rows), tasks)
    results = ray.data.from_blocks([pa.table({"task": [number]}) for number in range(tasks)]).map_batches(
        _Synthesizer,
        fn_constructor_args=(settings, file, ray.put(pool), journal, replay, limits, driver),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=min(settings.actors, tasks),
            max_concurrent_calls_per_actor=at_once,
            max_tasks_in_flight_per_actor=at_once,
        ),
        num_cpus=CPUS_PER_ACTOR,
        # A cluster that outlives the driver ends the actors itself. An environment of its own costs an actor a new process.
        # Where no actor can watch the driver, Ray's own check must come early.
        **({"runtime_env": {"env_vars": RAY_ENVIRONMENT}} if driver and not os.environ.get("RAY_ADDRESS") else {}),
    )
    shown: set[str] = set()
    for batch in results.iter_batches(batch_size=None, batch_format="pyarrow"):
        for result in batch.to_pylist():
            outcome = None if result["outcome"] is None else _outcome(result["outcome"])
            if outcome is not None and outcome.traceback is not None and outcome.row["error"] not in shown:
                shown.add(outcome.row["error"])
                say(f"synthesize: seed {outcome.row['id']} is a dead letter: {outcome.traceback}")
            yield result["index"], outcome


def _write_tasks(file: Path, seeds: Iterable[Seed], rows: int) -> int:
    """Write the seeds, numbered, so many rows a task; returns the number of tasks.

    To a file that the actors map: what this process and the object store hold does not grow with the seeds.
    """
    tasks = 0
    numbered = enumerate(seeds)
    with pa.ipc.new_file(str(file), _SEEDS) as stream:
        while task := list(islice(numbered, rows)):
            values = [{"index": index, **records.columns_of(seed)} for index, seed in task]
            stream.write_batch(pa.RecordBatch.from_pylist(values, _SEEDS))
            tasks += 1
    return tasks


class _Synthesizer:
    """The rows of one task, side by side. Ray Data keeps one of these in each actor."""

    def __init__(
        self,
        settings: SynthesizeSettings,
        tasks: Path,
        pool: ray.ObjectRef,
        journal: Path,
        replay: Sequence[Path],
        limits: Any,
        driver: Process | None,
    ) -> None:
        self._settings = settings
        self._tasks = pa.ipc.open_file(pa.memory_map(str(tasks)))
        self._pool: Sequence[str] = ray.get(pool)
        self._journal = Journal(journal, replay)
        self._gate = _gate(settings, limits)
        endpoints = list(_endpoints(settings).values())
        self._client = ChatClient(endpoints, self._journal, self._gate, prices.load(settings.prices))
        self._breaker = Breaker(settings)
        self._complete = self._breaker.watch(self._client.complete)
        self._orphan = Orphan(driver, self._gate, self._client, self._journal)
        self._turn = asyncio.Semaphore(settings.in_flight * ROWS_PER_SLOT)
        self._running = 0
        gc.freeze()  # what is imported stays
        gc.set_threshold(YOUNG_OBJECTS)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        self._orphan.watch()
        self._journal.refresh()  # this may be the task of an actor that died
        self._running += 1
        rows = [row for task in batch["task"].to_pylist() for row in self._tasks.get_batch(task).to_pylist()]
        results = await asyncio.gather(*(self._result(**row) for row in rows))
        if self._orphan.orphaned:  # a result could not be stored, and Ray would end this process for it
            await asyncio.Event().wait()
        self._running -= 1
        if not self._running:
            await self._client.close()  # an actor is not told when its last task is done
        return pa.Table.from_pylist(results, schema=_RESULTS)

    async def _result(self, index: int, **seed: str) -> dict[str, Any]:
        async with self._turn:
            if self._gate.failure is None:
                with contextlib.suppress(RunFailure):
                    outcome = await synthesize(Seed(**seed), self._pool, self._settings, self._complete)
                    if failure := self._breaker.add(outcome):
                        self._gate.fail(failure)
                    return {"index": index, "outcome": json.dumps(_values(outcome))}
        return {"index": index, "outcome": None}


def _values(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain values; `dataclasses.asdict` would copy them all."""
    return {**vars(outcome), "paid": vars(outcome.paid), "replayed": vars(outcome.replayed)}


def _outcome(text: str) -> Outcome:
    values = json.loads(text)
    return Outcome(**{**values, "paid": Spend(**values["paid"]), "replayed": Spend(**values["replayed"])})
