"""Synthesis over Ray Data: seeds in; kept, rejected and dead-lettered rows out, in the order of the seeds.

Each actor has its own client, partition of the rows and journal segment: a data set with a pool of one actor, since Ray Data
has no affinity of rows to actors. One more actor on the driver's node keeps the limits of all and hands out the rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import itertools
import os
import pickle
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infembed_ray import ray_compat
from infembed_ray.config.llm import Limits
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.llm import budget, prices
from infembed_ray.llm.chat import RunFailure
from infembed_ray.llm.client import RAY_ENVIRONMENT, ChatClient, DriverWatch, run_in_thread
from infembed_ray.llm.journal_store import open_journal, settle, wait_for_writers
from infembed_ray.llm.ledger import Grant, LeaseReport, Ledger, LedgerStats, RateLimiter
from infembed_ray.progress import Advance, in_thread, say, track
from infembed_ray.ray_cluster import connect
from infembed_ray.records.files import write_bad_rows
from infembed_ray.records.tables import Seed
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import Published, Step, require_writable
from infembed_ray.synthesis.batch_files import leaving_out
from infembed_ray.synthesis.outputs import Outputs, described
from infembed_ray.synthesis.pipeline import CircuitBreaker, Outcome, synthesize
from infembed_ray.synthesis.preflight import BATCHES, Job, check, prepare, resolve
from infembed_ray.telemetry import report

if TYPE_CHECKING:
    from infembed_ray.synthesis.batch_api import BatchReport

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

_SEEDS = pa.schema([("index", pa.int64()), *((field.name, pa.string()) for field in fields(Seed))])
_RESULTS = pa.schema([("index", pa.int64()), ("outcome", pa.binary())])  # null outcome: the row was not finished


def run(settings: SynthesizeSettings) -> Published:
    """Make records of seeds; see `SynthesizeSettings`.

    Publishes `records.parquet`, `rejected.parquet` and `dead_letter.parquet`, and with `settings.complement` also
    `complements.parquet`. The journal outlives the run: an interrupted run resumes from it and pays for no answer twice.
    A run that cannot go on (a refused key, a used-up budget, an endpoint that stopped answering) finishes and journals the
    requests in flight, and publishes nothing. A run with too many dead letters, or that keeps no record, publishes nothing
    either; the message names the directory with its rejected and dead-letter files.

    Raises:
        InputError: bad settings or seeds, no key although some requests are in no journal, or a run that published nothing.
    """
    seeds, table, step = prepare(settings)
    if done := step.finished():
        return done
    job = resolve(settings, seeds, table)
    if isinstance(job.journal, Folder) and not job.has_key:
        _settle_journal(job.journal)  # its answers must be in the store before they are counted
    check(job)
    if job.has_key:
        require_writable(job.journal, "journal")
    limits = settings.limits if job.has_key else Limits()
    with step.publish() as staging, budget.held(limits, job.journal):  # no other run of it spends now
        write_bad_rows(staging.path, seeds.bad)
        if job.has_key:
            _settle_journal(job.journal)
        spent_usd = 0.0 if settings.limits.budget_usd is None else budget.resume(job.journal, table)
        if job.in_batches:
            report = _ask_in_batches(job, spent_usd)
            staging.facts["batches"] = report.figures()
            spent_usd = 0.0 if settings.limits.budget_usd is None else budget.spent_usd(job.journal, table)
            job = replace(job, left_out=report.left_out)
        with Outputs(staging.path, table) as outputs:
            stats = _run_rows(job, step, outputs, spent_usd)
        staging.counts = outputs.counts()
        staging.facts |= {**outputs.facts(), "traffic": stats.facts()}
        ended = sum(staging.counts[kind] for kind in ("kept", "rejected", "dead_letter"))
        assert ended == job.number, f"{ended} of {job.number} seeds came out"
        outputs.require_few_dead_letters(settings.max_dead_letters)
        outputs.require_kept()
    if staging.facts["cheap_judge"] is not None:
        say(f"synthesize: {described(staging.facts['cheap_judge'])}")
    if staging.counts["dead_letter"]:
        say(f"synthesize: to ask again for dead letters without an answer, remove {step.remote or step.path} and rerun")
    return step.published()


def _ask_in_batches(job: Job, spent_usd: float) -> BatchReport:
    """Ask the Batch API, so that the online run finds its answers in the journal; return its report."""
    from infembed_ray.synthesis import batch_api  # only here: it imports the `openai` client, which takes a second

    assert isinstance(job.journal, Path)  # see `preflight.check`
    directory = job.journal / BATCHES

    async def ask() -> BatchReport:
        journal = open_journal(job.journal, job.replay)
        try:
            return await batch_api.answer_in_batches(job.seeds, job.pool, job.settings, journal, directory, spent_usd)
        finally:
            journal.close()

    return run_in_thread(ask())


def _run_rows(job: Job, step: Step, outputs: Outputs, spent_usd: float) -> LedgerStats:
    """Run all rows and write their outputs; return the state at the end; InputError if some rows were not finished."""
    connect()
    unfinished, seeds = 0, job.number
    budget_usd = job.settings.limits.budget_usd
    tasks = (step.root / f".{step.identity}.seeds.arrow").absolute()
    with _coordinator(job, tasks, step.identity, spent_usd) as coordinator:
        try:
            with (
                track("synthesize", seeds) as advance,
                live_progress(lambda: _stats(coordinator), lambda: outputs.note(seeds), budget_usd, advance),
            ):
                for index, outcome in _fan_out(job, tasks, coordinator):
                    if outcome is None:
                        unfinished += 1
                    elif not unfinished:
                        outputs.add(index, outcome)
                        advance()
        finally:
            tasks.unlink(missing_ok=True)
        if isinstance(job.journal, Folder):
            _settle_journal(job.journal)
        stats: LedgerStats = ray.get(coordinator.stats.remote())
    if budget_usd is not None:
        budget.note_unjournaled(job.journal, job.table, stats.committed_usd)
    if unfinished:
        left = f"{unfinished} of {seeds} seeds are left undone and nothing is published"
        raise InputError(f"{stats.failure}; {left}; the journal keeps what was answered, the same command resumes")
    return stats


def _stats(coordinator: Any) -> LedgerStats | None:
    """Return the state of the run; None if the coordinator is lost, which the actors report."""
    with contextlib.suppress(ray.exceptions.RayError):
        return ray.get(coordinator.stats.remote())
    return None


def _settle_journal(journal: Place, partition: str | None = None) -> None:
    """Wait until no process writes to (a partition of) the journal; in an object store, until it holds what all nodes wrote."""
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


# ---------------------------------------------------------------------------------------------- the coordinator


@contextlib.contextmanager
def _coordinator(job: Job, tasks: Path, identity: str, spent_usd: float) -> Iterator[Any]:
    """Start the coordinator as an actor on the driver's node: it then dies only together with the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"synthesis-limits-{identity}-{uuid.uuid4().hex[:8]}"
    actor = ray.remote(num_cpus=0)(Coordinator).options(name=name, scheduling_strategy=here)
    coordinator = actor.remote(job.settings.limits, spent_usd, job.journal, tasks)
    try:
        yield coordinator
    except ray.exceptions.RayError as error:
        raise InputError(_failed(error)) from error
    finally:
        ray.kill(coordinator)


def _failed(error: ray.exceptions.RayError) -> str:
    return f"an actor of the run failed ({in_one_line(error, 'synthesize')}); run the same command again, the journal resumes"


# -------------------------------------------------------------------------------------------------- the fan-out


def _fan_out(job: Job, file: Path, coordinator: Any) -> Iterator[tuple[int, Outcome | None]]:
    """Yield (index, outcome) of all seeds, written to `file`, as they complete; None where a seed was not finished."""
    settings = job.settings
    rows = max(1, min(ROWS_PER_TASK, settings.in_flight // 2, job.number // (TASKS_PER_ACTOR * settings.actors)))
    tasks = write_tasks(file, job.seeds, rows, settings.actors)
    # A cluster that another process started outlives this one.
    drains = not os.environ.get("RAY_ADDRESS")
    driver = (ray.get_runtime_context().get_node_id(), os.getpid()) if drains else None
    shared = ray.put((job.pool, job.left_out))

    def branch(partition: str) -> ray.data.Dataset:
        numbers = tasks[partition]
        at_once = min(-(-settings.in_flight * ROWS_AHEAD // rows), len(numbers))
        return ray.data.from_blocks([pa.table({"task": [number]}) for number in numbers]).map_batches(
            _Synthesizer,
            fn_constructor_args=(settings, partition, shared, job.journal, job.replay, coordinator, driver),
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(
                size=1, max_concurrent_calls_per_actor=at_once, max_tasks_in_flight_per_actor=at_once
            ),
            num_cpus=CPUS_PER_ACTOR,
            ray_remote_args_fn=ray_compat.retries,
            # Only actors that drain need it (`DriverWatch`): an environment of its own costs an actor a new process.
            **({"runtime_env": {"env_vars": RAY_ENVIRONMENT}} if driver else {}),
        )

    first, *others = map(branch, tasks)
    results = first.union(*others) if others else first
    shown: set[str] = set()
    for batch in results.iter_batches(batch_size=None, batch_format="pyarrow"):
        for result in batch.to_pylist():
            outcome: Outcome | None = None if result["outcome"] is None else pickle.loads(result["outcome"])
            if outcome is not None and outcome.traceback is not None and outcome.row["error"] not in shown:
                shown.add(outcome.row["error"])
                say(f"synthesize: seed {outcome.row['id']} is a dead letter: {outcome.traceback}")
            yield result["index"], outcome


class _Synthesizer:
    """Processes the rows of tasks concurrently. Ray Data keeps one instance in each actor."""

    def __init__(
        self,
        settings: SynthesizeSettings,
        partition: str,
        shared: ray.ObjectRef,
        journal: Place,
        replay: Sequence[str],
        coordinator: Any,
        driver: tuple[str, int] | None,
    ) -> None:
        self._settings = settings
        self._coordinator = coordinator
        self._pool, left_out = ray.get(shared)
        self._limiter = RateLimiter(settings.limits, settings.in_flight, self._exchange)
        if ray.get_runtime_context().was_current_actor_reconstructed and isinstance(journal, Folder):
            _settle_journal(journal, partition)  # its predecessor may have been on another node
        self._journal = open_journal(journal, replay, partition, settings.journal_upload_s, self._limiter.warn)
        table = prices.load(settings.prices)
        self._client = ChatClient(settings.endpoint, self._journal, self._limiter, table)
        self._breaker = CircuitBreaker(settings)
        self._complete = self._breaker.watch(leaving_out(self._client.complete, left_out))
        node, process = driver or ("", None)
        watched = process if node == ray.get_runtime_context().get_node_id() else None
        self._driver = DriverWatch(watched, self._limiter, self._client, self._journal)
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
        return pa.Table.from_pylist(results, schema=_RESULTS)

    async def _exchange(self, report: LeaseReport) -> Grant:
        try:
            grant: Grant = await self._coordinator.exchange.remote(report)
        except ray.exceptions.RayError as error:
            raise RunFailure(_failed(error)) from error
        return grant

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
                    return {"index": index, "outcome": pickle.dumps(outcome)}
        return {"index": index, "outcome": None}


def write_tasks(file: Path, seeds: Iterable[Seed], rows: int, actors: int) -> dict[str, list[int]]:
    """Write the numbered seeds, one record batch of at most `rows` per task; return the tasks of each partition.

    The coordinator maps the file, so neither a process nor the object store grows with the seeds.
    """
    waiting: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    tasks: defaultdict[str, list[int]] = defaultdict(list)
    numbers = itertools.count()
    with pa.ipc.new_file(str(file), _SEEDS) as stream:

        def write(partition: str) -> None:
            stream.write_batch(pa.RecordBatch.from_pylist(waiting.pop(partition), _SEEDS))
            tasks[partition].append(next(numbers))

        for index, seed in enumerate(seeds):
            partition = partition_of(seed, actors)
            waiting[partition].append({"index": index, **vars(seed)})
            if len(waiting[partition]) == rows:
                write(partition)
        for partition in list(waiting):
            write(partition)
    return tasks


def partition_of(seed: Seed, actors: int) -> str:
    """Return the partition of a seed, for example `3of8`: a hash of its texts, since equal texts share answers."""
    digest = hashlib.blake2b(f"{seed.query}\0{seed.passage}".encode(), digest_size=4).hexdigest()
    return f"{int(digest, 16) % actors + 1}of{actors}"


class Coordinator(Ledger):
    """The ledger of a run. It also hands out the rows of `write_tasks`, because other nodes may share no directory."""

    def __init__(self, limits: Limits, spent_usd: float, journal: Place, tasks: Path) -> None:
        super().__init__(limits, spent_usd, note=partial(budget.note_at_most, journal))
        self._file = tasks

    @cached_property
    def _tasks(self) -> pa.RecordBatchFileReader:
        return pa.ipc.open_file(pa.memory_map(str(self._file)))

    def rows(self, task: int) -> pa.RecordBatch:
        """Return the numbered seeds of a task."""
        return self._tasks.get_batch(task)


@contextlib.contextmanager
def live_progress(
    stats: Callable[[], LedgerStats | None], forecast: Callable[[], str], budget_usd: float | None, advance: Advance
) -> Iterator[None]:
    """Update the progress note each second, also while no row ends (`forecast` is "" then); print the actors' warnings."""

    def watch(ended: threading.Event) -> None:
        printed: set[str] = set()
        answered, then, over = 0, time.monotonic(), False
        while not over:
            over = ended.wait(1.0)
            if (state := stats()) is None:
                return
            now, traffic, rows = time.monotonic(), state.traffic, forecast()
            rate, answered, then = (traffic.answered - answered) / (now - then), traffic.answered, now
            spent = "" if budget_usd is None else f", {state.spent_usd:.2f} of the budget's {budget_usd:g} USD"
            load = f"{rate:.0f}/s, {state.in_flight} in flight, {traffic.rate_limited} x 429{spent}"
            begun = rows or state.in_flight or traffic.answered or traffic.rate_limited or traffic.failed
            advance(0, note=f"{rows or 'no row has ended'}; {load}" if begun else "starting the actors on Ray")
            left = None if budget_usd is None else budget_usd - state.spent_usd
            calls = {"answered": answered, "rate_limited": traffic.rate_limited, "failed": traffic.failed}
            report(synthesis_in_flight=state.in_flight, synthesis_calls_total=calls)
            report(synthesis_budget_usd=budget_usd, synthesis_budget_left_usd=left)
            for warning in state.warnings:
                if warning not in printed:
                    printed.add(warning)
                    say(f"synthesize: {warning}")

    try:
        with in_thread(watch):
            yield
    finally:
        advance(0, note=forecast())
