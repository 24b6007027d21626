"""Synthesis over Ray Data: seeds in; kept, rejected and dead-lettered rows out, in the order of the seeds.

Each actor has its own client, its own partition of the rows and its own journal segment. Ray Data has no affinity of rows to
actors, so each partition is a data set with a pool of one actor, and the run reads their union. One more actor, on the
driver's node, keeps the limits of all and hands out the rows.

Ray Data returns a task's rows together and re-runs a lost task whole, so a task is a few rows, many tasks run at once in an
actor, and the journal answers re-runs. Rows start in the order of their tasks, so tasks end one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infembed_ray import records
from infembed_ray.config.llm import Endpoint, Limits
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.llm import budget, prices
from infembed_ray.llm.chat import RunFailure
from infembed_ray.llm.client import ChatClient
from infembed_ray.llm.driver_watch import RAY_ENVIRONMENT, DriverWatch, Process, this_process
from infembed_ray.llm.journal_store import JournalPlace, open_journal, settle, wait_for_writers
from infembed_ray.llm.lease import Lease, RateLimiter
from infembed_ray.llm.partitions import Partition, route_of
from infembed_ray.llm.rate_limits import Grant, LeaseReport, LedgerStats, resources
from infembed_ray.object_store import Folder
from infembed_ray.progress import Advance, say, track
from infembed_ray.ray_cluster import connect
from infembed_ray.records import Seed
from infembed_ray.storage import Published, Staging
from infembed_ray.synthesis import self_hosted
from infembed_ray.synthesis.batch_files import leaving_out
from infembed_ray.synthesis.circuit_breaker import ALIKE, CircuitBreaker
from infembed_ray.synthesis.outputs import Outputs
from infembed_ray.synthesis.pipeline import Outcome, synthesize
from infembed_ray.synthesis.preflight import Job, check, prepare, resolve

ROWS_PER_TASK = 64
"""Most rows of a task: a task costs Ray Data as much CPU as dozens of requests."""
TASKS_PER_ACTOR = 4
"""Least tasks per actor, so that no actor idles while another has half of its work left."""
ROWS_PER_SLOT = 3
"""Rows in progress per request in flight; the others wait for a slot, a retry or the journal."""
ROWS_AHEAD = 12
"""Rows of an actor per request in flight: in progress, waiting to start, or waiting for the slowest row of their task."""
YOUNG_OBJECTS = 20_000
"""Allocations between two garbage collections of the youngest generation. Python's default of 700 promotes objects that
wait for an answer, and costs a tenth of the CPU."""
CPUS_PER_ACTOR = 0.5
"""An actor mostly waits for its endpoint."""
REPORTS_PER_WINDOW = 200
"""Renewals of a lease per window, so that it holds little unused; at least one every LONGEST_INTERVAL_S."""
LONGEST_INTERVAL_S = 0.5

_SEEDS = pa.schema([("index", pa.int64()), *((field.name, pa.string()) for field in fields(Seed))])
_RESULTS = pa.schema([("index", pa.int64()), ("outcome", pa.string())])  # null outcome: the row was not finished


def run(settings: SynthesizeSettings) -> Published:
    """Make records of seeds; see `SynthesizeSettings`.

    Publishes `records.parquet`, `rejected.parquet` and `dead_letter.parquet`, and with `settings.complement` also
    `complements.parquet`. The journal outlives the run: an interrupted run resumes from it and pays for no answer twice.
    A run that cannot go on (a refused key, a used-up budget) finishes and journals the requests in flight, and publishes
    nothing. A run that keeps no record publishes nothing either; the message names the directory with its rejected and
    dead-letter files.

    Raises:
        InputError: bad settings or seeds; no key although some requests are in no journal; or, during the run, endpoints
            that refuse the key, the model or all requests of a step or cannot be reached, a used-up budget, or no record
            that is kept.
    """
    seeds, table, step = prepare(settings)
    if done := step.finished():
        return done
    job = resolve(settings, seeds, table)
    if isinstance(job.journal, Folder) and not job.has_key:
        _settle_journal(job.journal)  # its answers must be in the store before they are counted
    check(job)
    with step.publish() as staging:  # from here on no other run of this output spends
        if job.has_key:
            _settle_journal(job.journal)
        spent_usd = 0.0 if settings.limits.budget_usd is None else budget.spent_usd(job.journal, table)
        if job.in_batches:
            # Only here: it imports the `openai` client, which takes a second.
            from infembed_ray.synthesis import batch_api

            report = batch_api.run(job, spent_usd)
            staging.facts["batches"] = report.figures()
            spent_usd += report.usd or 0.0
            job = replace(job, left_out=report.left_out)
        connect()
        tasks = (step.root / f".{step.identity}.seeds.arrow").absolute()
        hosting = self_hosted.hosting(settings.endpoint, step.identity) if settings.endpoint.serve else nullcontext()
        with hosting as hosted:
            if hosted is not None:
                job = replace(job, settings=settings.model_copy(update={"endpoint": hosted.endpoint}))
            with _coordinator(job, tasks, step.identity, spent_usd) as coordinator:
                _synthesize_all(job, tasks, coordinator, staging)
        if hosted is not None:
            staging.facts["self_hosted"] = hosted.figures(sum(staging.facts["tokens"].values()))
    if staging.counts["dead_letter"]:
        say(
            f"synthesize: to ask again for dead letters that no model answered, remove {step.remote or step.path} and rerun"
        )
    return step.published()


def _synthesize_all(job: Job, tasks: Path, coordinator: Any, staging: Staging) -> None:
    """Run all rows and write their outputs.

    Raises:
        InputError: some rows were not finished, or no record was kept.
    """
    unfinished = 0
    breaker = CircuitBreaker(job.settings, min(ALIKE, job.survey.seeds))
    budget_usd = job.settings.limits.budget_usd
    try:
        with (
            Outputs(staging.path, job.table) as outputs,
            track("synthesize", job.survey.seeds) as advance,
            _live_progress(coordinator, outputs, budget_usd, advance),
        ):
            for index, outcome in _fan_out(job, tasks, coordinator):
                if outcome is None:
                    unfinished += 1
                elif not unfinished:
                    outputs.add(index, outcome)
                    breaker.add(outcome)
                    advance()
    finally:
        tasks.unlink(missing_ok=True)
    if isinstance(job.journal, Folder):
        _settle_journal(job.journal)
    stats: LedgerStats = ray.get(coordinator.stats.remote())
    if budget_usd is not None:
        budget.note_unjournaled(job.journal, job.table, stats.committed_usd)
    if unfinished:
        raise InputError(
            f"{stats.failure}; {unfinished} of {job.survey.seeds} seeds are left undone and nothing is published; "
            "the journal keeps what was answered, the same command resumes"
        )
    staging.counts = outputs.counts()
    staging.facts |= {**outputs.facts(), "traffic": _traffic(stats), "left_out": dict(job.survey.left_out)}
    ended = sum(staging.counts[kind] for kind in ("kept", "rejected", "dead_letter"))
    assert ended == job.survey.seeds, f"{ended} of {job.survey.seeds} seeds came out"
    if not staging.counts["kept"]:
        raise InputError(_nothing_kept(staging, breaker.failure or outputs.first_failure))


def _settle_journal(journal: JournalPlace, partition: Partition | None = None) -> None:
    """Wait until no process writes to the journal; in an object store, also until it holds what all nodes wrote.

    Args:
        journal: of the run.
        partition: wait only for writers of this partition.

    Raises:
        InputError: the object store failed.
    """
    if isinstance(journal, Path):
        wait_for_writers(journal, partition)
        return
    connect()
    task = ray.remote(num_cpus=0)(settle)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    pinned = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes]
    for settled in [each.remote(journal, partition) for each in pinned]:
        try:
            ray.get(settled)
        except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError, ray.exceptions.WorkerCrashedError):
            say("synthesize: a node was lost; answers that it had not uploaded are asked for again")


def _nothing_kept(staging: Staging, why: str) -> str:
    counts = staging.counts
    files = f"{records.REJECTED_FILE} and {records.DEAD_LETTER_FILE} are in {staging.path}"
    return (
        f"0 of {counts['seeds']} seeds were kept ({counts['rejected']} rejected, {counts['dead_letter']} dead letters), so "
        f"nothing is published: {why}; {files}, the journal keeps every answer"
    )


# ---------------------------------------------------------------------------------------------- the coordinator


class _Coordinator(budget.DurableLedger):
    """The limits of a run and the rows of its tasks, which other nodes need no shared directory to read."""

    def __init__(self, limits: Limits, slots: int, spent_usd: float, journal: JournalPlace, tasks: Path) -> None:
        super().__init__(limits, slots, spent_usd, journal)
        self._file = tasks

    @cached_property
    def _tasks(self) -> pa.RecordBatchFileReader:
        return pa.ipc.open_file(pa.memory_map(str(self._file)))

    def rows(self, task: int) -> pa.RecordBatch:
        """Return the numbered seeds of a task."""
        return self._tasks.get_batch(task)


@contextlib.contextmanager
def _coordinator(job: Job, tasks: Path, identity: str, spent_usd: float) -> Iterator[Any]:
    """Start the coordinator as an actor on the driver's node: it then dies only together with the driver."""
    settings = job.settings
    slots = min(settings.limits.in_flight or settings.actors * settings.in_flight, settings.actors * settings.in_flight)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"synthesis-limits-{identity}-{uuid.uuid4().hex[:8]}"
    actor = ray.remote(num_cpus=0)(_Coordinator).options(name=name, scheduling_strategy=here)
    coordinator = actor.remote(settings.limits, slots, spent_usd, job.journal, tasks)
    try:
        yield coordinator
    except ray.exceptions.RayError as error:
        raise InputError(_failed(error)) from error
    finally:
        ray.kill(coordinator)


def _failed(error: ray.exceptions.RayError) -> str:
    reason = " ".join(str(error).partition("\n\nThe above exception")[0].split())[-300:]
    return f"an actor of the run failed ({reason}); run the same command again, the journal resumes"


def _rate_limiter(settings: SynthesizeSettings, coordinator: Any) -> RateLimiter:
    """Return the rate limiter of this actor."""

    async def exchange(report: LeaseReport) -> Grant:
        try:
            grant: Grant = await coordinator.exchange.remote(report)
        except ray.exceptions.RayError as error:
            raise RunFailure(_failed(error)) from error
        return grant

    window_s = settings.limits.window_s
    lease = Lease(uuid.uuid4().hex, resources(settings.limits), settings.in_flight, window_s)
    return RateLimiter(lease, exchange, min(LONGEST_INTERVAL_S, window_s / REPORTS_PER_WINDOW))


@contextlib.contextmanager
def _live_progress(coordinator: Any, outputs: Outputs, budget_usd: float | None, advance: Advance) -> Iterator[None]:
    """Update the progress note each second, also while no row ends; print the actors' warnings."""
    ended = threading.Event()

    def watch() -> None:
        printed: set[str] = set()
        answered, then = 0, time.monotonic()
        while not ended.wait(1.0):
            try:
                stats: LedgerStats = ray.get(coordinator.stats.remote())
            except ray.exceptions.RayError:
                return  # the actors report it
            now, traffic = time.monotonic(), stats.traffic
            rate, answered, then = (traffic.answered - answered) / (now - then), traffic.answered, now
            spent = "" if budget_usd is None else f", {stats.spent_usd:.2f} of {budget_usd:g} USD"
            load = f"{rate:.0f}/s, {stats.in_flight} in flight, {traffic.rate_limited} x 429{spent}"
            advance(0, note=f"{outputs.note()}; {load}")
            for warning in stats.warnings:
                if warning not in printed:
                    printed.add(warning)
                    say(f"synthesize: {warning}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        advance(0, note=outputs.note())


def _traffic(stats: LedgerStats) -> dict[str, Any]:
    """Return the manifest's figures of the endpoints."""
    traffic = stats.traffic
    return {
        "answered": traffic.answered,
        "rate_limited": traffic.rate_limited,
        "failed": traffic.failed,
        "latency_s": {name: traffic.latency_s(share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "warnings": list(stats.warnings),
    }


# -------------------------------------------------------------------------------------------------- the fan-out


def _fan_out(job: Job, file: Path, coordinator: Any) -> Iterator[tuple[int, Outcome | None]]:
    """Yield (index of the seed, outcome) of all seeds as they complete; None where a seed was not finished.

    The seeds are written to `file`, which the coordinator reads.
    """
    settings = job.settings
    rows = max(1, min(ROWS_PER_TASK, settings.in_flight // 2, job.survey.seeds // (TASKS_PER_ACTOR * settings.actors)))
    tasks = _write_tasks(file, job.seeds, rows, settings.actors)
    driver = this_process()
    shared = ray.put((job.survey.pool, job.left_out))

    def branch(partition: Partition) -> ray.data.Dataset:
        numbers = tasks[partition]
        at_once = min(-(-settings.in_flight * ROWS_AHEAD // rows), len(numbers))
        return ray.data.from_blocks([pa.table({"task": [number]}) for number in numbers]).map_batches(
            _Synthesizer,
            fn_constructor_args=(
                settings,
                list(job.endpoints.values()),
                partition,
                shared,
                job.journal,
                job.replay,
                coordinator,
                driver,
            ),
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(
                size=1, max_concurrent_calls_per_actor=at_once, max_tasks_in_flight_per_actor=at_once
            ),
            num_cpus=CPUS_PER_ACTOR,
            # Only actors that drain need it (module `driver_watch`): an environment of its own costs an actor a new process.
            **({"runtime_env": {"env_vars": RAY_ENVIRONMENT}} if driver and not os.environ.get("RAY_ADDRESS") else {}),
        )

    first, *others = map(branch, tasks)
    results = first.union(*others) if others else first
    shown: set[str] = set()
    for batch in results.iter_batches(batch_size=None, batch_format="pyarrow"):
        for result in batch.to_pylist():
            outcome = None if result["outcome"] is None else Outcome.from_json(result["outcome"])
            if outcome is not None and outcome.traceback is not None and outcome.row["error"] not in shown:
                shown.add(outcome.row["error"])
                say(f"synthesize: seed {outcome.row['id']} is a dead letter: {outcome.traceback}")
            yield result["index"], outcome


def _write_tasks(file: Path, seeds: Iterable[Seed], rows: int, actors: int) -> dict[Partition, list[int]]:
    """Write the numbered seeds, one record batch of at most `rows` per task; return the tasks of each partition.

    The coordinator maps the file, so neither a process nor the object store grows with the seeds.
    """
    waiting: defaultdict[Partition, list[dict[str, Any]]] = defaultdict(list)
    tasks: defaultdict[Partition, list[int]] = defaultdict(list)
    numbers = itertools.count()
    with pa.ipc.new_file(str(file), _SEEDS) as stream:

        def write(partition: Partition) -> None:
            stream.write_batch(pa.RecordBatch.from_pylist(waiting.pop(partition), _SEEDS))
            tasks[partition].append(next(numbers))

        for index, seed in enumerate(seeds):
            partition = Partition.route(route_of(seed.query, seed.passage), actors)
            waiting[partition].append({"index": index, **records.columns_of(seed)})
            if len(waiting[partition]) == rows:
                write(partition)
        for partition in list(waiting):
            write(partition)
    return tasks


class _Synthesizer:
    """Processes the rows of tasks concurrently. Ray Data keeps one instance in each actor."""

    def __init__(
        self,
        settings: SynthesizeSettings,
        endpoints: Sequence[Endpoint],
        partition: Partition,
        shared: ray.ObjectRef,
        journal: JournalPlace,
        replay: Sequence[str],
        coordinator: Any,
        driver: Process | None,
    ) -> None:
        self._settings = settings
        self._coordinator = coordinator
        self._pool, left_out = ray.get(shared)
        self._limiter = _rate_limiter(settings, coordinator)
        if ray.get_runtime_context().was_current_actor_reconstructed and isinstance(journal, Folder):
            _settle_journal(journal, partition)  # its predecessor may have been on another node
        self._journal = open_journal(journal, replay, partition, settings.journal_upload, self._limiter.warn)
        self._client = ChatClient(endpoints, self._journal, self._limiter, prices.load(settings.prices))
        self._breaker = CircuitBreaker(settings)
        self._complete = self._breaker.watch(leaving_out(self._client.complete, left_out))
        self._driver = DriverWatch(driver, self._limiter, self._client, self._journal)
        self._rows = asyncio.Semaphore(settings.in_flight * ROWS_PER_SLOT)
        self._running = 0
        gc.freeze()  # exempts the imported modules
        gc.set_threshold(YOUNG_OBJECTS)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        self._driver.watch()
        self._journal.refresh()  # the task may have been lost with this actor's predecessor
        self._running += 1
        try:
            results = await self._results(batch["task"].to_pylist())
            if self._driver.died:  # Ray could not store a result, and would end this process before it has drained
                await asyncio.Event().wait()
        finally:
            self._running -= 1
        if not self._running:
            await self._client.close()  # an actor does not know which task is its last
            await asyncio.to_thread(self._journal.flush)
        return pa.Table.from_pylist(results, schema=_RESULTS)

    async def _results(self, numbers: list[int]) -> list[dict[str, Any]]:
        try:
            tasks = await asyncio.gather(*(self._coordinator.rows.remote(number) for number in numbers))
        except ray.exceptions.RayError as error:  # raising it would kill the actors before their requests are answered
            self._limiter.fail(_failed(error))
            return [{"index": None, "outcome": None}]
        return await asyncio.gather(*(self._result(**row) for task in tasks for row in task.to_pylist()))

    async def _result(self, index: int, **seed: str) -> dict[str, Any]:
        async with self._rows:
            if self._limiter.failure is None:
                with contextlib.suppress(RunFailure):
                    outcome = await synthesize(Seed(**seed), self._pool, self._settings, self._complete)
                    if failure := self._breaker.add(outcome):
                        self._limiter.fail(failure)
                    return {"index": index, "outcome": outcome.to_json()}
        return {"index": index, "outcome": None}
