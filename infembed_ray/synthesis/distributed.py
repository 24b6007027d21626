"""Synthesis over Ray Data: seeds in, kept, rejected and dead-lettered rows out, in the order of the seeds.

Each actor asks through one client and one journal segment of its own. Ray Data finishes a task's rows in order and
re-runs a lost task whole; so a task is a few rows, many run at once in an actor, and the journal answers the re-runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data

from infembed_ray import records
from infembed_ray.config import SynthesizeSettings
from infembed_ray.distributed import connect
from infembed_ray.errors import InputError
from infembed_ray.progress import say, track
from infembed_ray.records import Seed
from infembed_ray.storage import Published, Step, existing, local_path, require_writable
from infembed_ray.synthesis import templates
from infembed_ray.synthesis.chat import RunFailure, Unjournaled
from infembed_ray.synthesis.client import ChatClient, replaying
from infembed_ray.synthesis.journal import Journal
from infembed_ray.synthesis.outputs import Outputs
from infembed_ray.synthesis.steps import Outcome, Spend, synthesize

ROWS_PER_TASK = 8
ROWS_PER_SLOT = 2
"""Rows in work for each request an actor may have in flight; the others wait for a slot, a retry or the journal."""
CPUS_PER_ACTOR = 0.5
"""An actor mostly waits for its endpoint."""

_SEEDS = pa.schema([("index", pa.int64()), *((field.name, pa.string()) for field in dataclasses.fields(Seed))])
_RESULTS = pa.schema([("index", pa.int64()), ("outcome", pa.string()), ("failure", pa.string())])


def run(settings: SynthesizeSettings) -> Published:
    """Make records of seeds; see `SynthesizeSettings`.

    Publishes `records.parquet`, `rejected.parquet` and `dead_letter.parquet`. The journal outlives the run: an
    interrupted one resumes where it was, and no answer is paid for twice.

    Raises:
        InputError: bad settings or seeds; no key while some requests are in no journal; or, during the run, an
            endpoint that refuses the key or the model, or cannot be reached.
    """
    seeds_path = existing(settings.seeds, "seeds")
    step = Step("synthesize", settings, settings.output, {"seeds": seeds_path, "prompts": templates.DIRECTORY})
    if done := step.finished():
        return done
    every = records.read(seeds_path, Seed, "seeds", settings.columns)
    seeds = every[: settings.limit]
    # Distractors come from the whole file: with another `limit` the judge is asked the very same.
    pool = list(dict.fromkeys(seed.passage for seed in every))
    # Absolute: the actors' working directory is not this process's.
    journal = (local_path(settings.journal, "journal") if settings.journal else step.root / "journal").absolute()
    replay = [existing(path, "replay").absolute() for path in settings.replay]
    _validate(settings, seeds_path, pool)
    if _has_key(settings):
        require_writable(journal, "journal")
    else:
        _require_all_journaled(settings, seeds, pool, Journal(journal, replay))

    connect()
    with step.publish() as staging:
        with Outputs(staging.path) as outputs, track("synthesize", len(seeds)) as advance:
            for index, outcome in _fan_out(settings, seeds, pool, journal, replay):
                outputs.add(index, outcome)
                advance(note=outputs.note())
        staging.counts, staging.facts = outputs.counts(), outputs.facts()
        ended = sum(staging.counts[kind] for kind in ("kept", "rejected", "dead_letter"))
        assert ended == len(seeds), f"{ended} of {len(seeds)} seeds came out"
    if staging.counts["dead_letter"]:
        say(f"synthesize: dead letters that no model answered are asked again after removing {step.path}")
    return step.published()


def _validate(settings: SynthesizeSettings, seeds: Path, pool: Sequence[str]) -> None:
    if len(pool) <= settings.distractors:
        raise InputError(
            f"distractors={settings.distractors}: seeds={seeds} has only {len(pool)} different passages to draw from; "
            f"set distractors={len(pool) - 1} or give more seeds"
        )
    if not settings.endpoint.base_url.startswith(("http://", "https://")):
        raise InputError(f"endpoint.base_url={settings.endpoint.base_url}: no URL; write it like https://host/v1")


def _has_key(settings: SynthesizeSettings) -> bool:
    name = settings.endpoint.api_key_env
    return name is None or bool(os.environ.get(name, "").strip())


def _require_all_journaled(
    settings: SynthesizeSettings, seeds: Sequence[Seed], pool: Sequence[str], journal: Journal
) -> None:
    """Without a key, the journals must hold every request: a dry pass over them, before any work."""
    missing: Counter[str] = Counter()

    async def rehearse() -> None:
        for seed in seeds:
            try:
                await synthesize(seed, pool, settings, replaying(journal))
            except Unjournaled as request:
                missing[request.model] += 1

    with ThreadPoolExecutor(1) as thread:  # asyncio.run fails in the thread of a notebook, which has a loop
        thread.submit(asyncio.run, rehearse()).result()
    if missing:
        raise InputError(
            f"endpoint.api_key_env={settings.endpoint.api_key_env}: not set, and {missing.total()} of {len(seeds)} seeds "
            f"need requests to {' and '.join(sorted(missing))} that are in no journal; "
            f"export {settings.endpoint.api_key_env}, or name finished journals in replay"
        )


def _fan_out(
    settings: SynthesizeSettings, seeds: Sequence[Seed], pool: Sequence[str], journal: Path, replay: Sequence[Path]
) -> Iterator[tuple[int, Outcome]]:
    """(index of the seed, outcome) of all seeds, as they complete."""
    rows = [{"index": index, **records.columns_of(seed)} for index, seed in enumerate(seeds)]
    table = pa.Table.from_pylist(rows, schema=_SEEDS)
    tasks = [table.slice(start, ROWS_PER_TASK) for start in range(0, len(rows), ROWS_PER_TASK)]
    at_once = -(-settings.in_flight * ROWS_PER_SLOT // ROWS_PER_TASK)
    results = ray.data.from_arrow(tasks).map_batches(
        _Synthesizer,
        fn_constructor_args=(settings, ray.put(pool), journal, replay),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=min(settings.actors, len(tasks)),
            max_concurrent_calls_per_actor=at_once,
            max_tasks_in_flight_per_actor=at_once,
        ),
        num_cpus=CPUS_PER_ACTOR,
    )
    for batch in results.iter_batches(batch_size=None, batch_format="pyarrow"):
        for result in batch.to_pylist():
            if result["failure"] is not None:
                raise InputError(f"{result['failure']}; the journal keeps what was answered, the same command resumes")
            yield result["index"], _outcome(result["outcome"])


class _Synthesizer:
    """The rows of one task, side by side. Ray Data keeps one of these in each actor."""

    def __init__(
        self, settings: SynthesizeSettings, pool: ray.ObjectRef, journal: Path, replay: Sequence[Path]
    ) -> None:
        self._settings = settings
        self._pool: Sequence[str] = ray.get(pool)
        self._journal = Journal(journal, replay)
        self._client = ChatClient(settings.endpoint, self._journal, settings.in_flight)
        self._running = 0

    async def __call__(self, batch: pa.Table) -> pa.Table:
        self._journal.refresh()  # this may be the task of an actor that died
        self._running += 1
        try:
            results = await asyncio.gather(*(self._result(**row) for row in batch.to_pylist()))
        except RunFailure as failure:
            results = [{"index": None, "outcome": None, "failure": str(failure)}]
        self._running -= 1
        if not self._running:
            await self._client.close()  # an actor is not told when its last task is done
        return pa.Table.from_pylist(results, schema=_RESULTS)

    async def _result(self, index: int, **seed: str) -> dict[str, Any]:
        outcome = await synthesize(Seed(**seed), self._pool, self._settings, self._client.complete)
        return {"index": index, "outcome": json.dumps(dataclasses.asdict(outcome)), "failure": None}


def _outcome(text: str) -> Outcome:
    values = json.loads(text)
    return Outcome(values["kind"], values["row"], Spend(**values["paid"]), Spend(**values["replayed"]))
