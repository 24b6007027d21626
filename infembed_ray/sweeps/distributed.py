"""`infembed sweep`: its trials under Ray Tune, which starts as many at once as the cluster has room for.

Resuming is not Tune's: every trial is two steps with identities of their own (a training, an evaluation), so a sweep that
is run again finds what is finished and does the rest, whether the driver was killed, a node was lost or the sweep was
extended by a row or a seed. A trial that fails is told of in the table and tried again with the next run.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import tune

from infembed_ray import storage
from infembed_ray.config import RetrieverSettings, SweepSettings
from infembed_ray.distributed import connect
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.evaluation import results
from infembed_ray.evaluation.distributed import run as evaluate
from infembed_ray.evaluation.results import Results
from infembed_ray.progress import say, track
from infembed_ray.storage import Published
from infembed_ray.sweeps import table
from infembed_ray.sweeps.table import Outcome
from infembed_ray.sweeps.trials import Trial, inputs, together, trials
from infembed_ray.training.launch import run as train

TABLE, CSV = "table.md", "table.csv"
_LOGS = "ray_tune"
_QUIET = {"RAY_AIR_NEW_OUTPUT": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1"}
"""Tune's own report of a run, which it prints whatever its verbosity, and its own logs of trials: ours replace them."""
_DRIVER_CPUS = 0.01
"""Of a trial itself: it waits for its workers, which take what they need beside it."""


def run(settings: SweepSettings) -> Published:
    """Train and evaluate all trials that are not finished, and publish their table.

    Raises:
        InputError: before any work, for anything wrong with any trial; after all of it, if some failed.
    """
    planned = trials(settings)
    step = storage.Step("sweep", settings, settings.output, *inputs(settings, planned))
    if done := step.finished():
        return done
    connect()
    with step.publish() as staging:
        say(f"sweep: {len(planned)} trials, {_at_once(settings, planned)} at once")
        outcomes, found = _all(settings, planned, staging.path)
        markdown = table.as_markdown(outcomes)
        (staging.path / TABLE).write_text(markdown, encoding="utf-8")
        (staging.path / CSV).write_text(table.as_csv(outcomes), encoding="utf-8")
        say(markdown)
        failed = [o for o in outcomes if o.failure is not None]
        if failed:
            raise InputError(
                f"output={settings.output}: {len(failed)} of {len(outcomes)} trials failed, the first: {failed[0].failure}; "
                f"the table is in {staging.path / TABLE}; the same command tries them again"
            )
        results.write(staging.path, together(planned, found))
        staging.counts = {"trials": len(outcomes)}
    return step.published()


def _all(settings: SweepSettings, planned: Sequence[Trial], directory: Path) -> tuple[list[Outcome], list[Results]]:
    """Run all trials; one outcome each, in their order, and the results of those that did not fail."""
    logs = directory / _LOGS
    os.environ |= _QUIET
    with track("sweep", len(planned)) as advance:
        tuner = tune.Tuner(
            tune.with_resources(_drive, {"CPU": _DRIVER_CPUS}),
            param_space={"trial": tune.grid_search(list(planned))},
            # One process after the other trial: what it imports takes longer than many a trial has to do.
            tune_config=tune.TuneConfig(max_concurrent_trials=_at_once(settings, planned), reuse_actors=True),
            run_config=tune.RunConfig(
                name=f"{time.time_ns()}",  # never an earlier attempt's: resuming is the trials' own
                storage_path=str(logs),
                # Of trials whose process was lost with its node; what a trial raises is its outcome.
                failure_config=tune.FailureConfig(max_failures=settings.train.max_failures),
                verbose=0,
                callbacks=[_Progress(advance)],
            ),
        )
        fitted = tuner.fit()
    outcomes, found = [], []
    for trial, result in zip(planned, fitted, strict=True):
        # With an error its process is gone: what a trial itself raises is in what it returns.
        failure = _cause(result.error) if result.error is not None else result.metrics["failure"]
        measures = {}
        if failure is None:
            found.append(results.read(Path(result.metrics["results"]), trial.name))
            measures = table.measures_of(found[-1].figures[trial.row])
        outcomes.append(Outcome(trial.row, trial.model, trial.seed, measures, failure))
    shutil.rmtree(logs, ignore_errors=True)
    return outcomes, found


class _Progress(tune.Callback):
    """Says when a trial is done."""

    def __init__(self, advance: Any) -> None:
        self._advance = advance

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._advance(note=trial.config["trial"].name)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._advance(note=f"{trial.config['trial'].name} failed")


def _drive(config: dict[str, Any]) -> dict[str, Any]:
    """One trial, in a process of its own on some node; it starts Ray Train and Ray Data as any driver does."""
    trial: Trial = config["trial"]
    try:
        model: RetrieverSettings | str | None = trial.untrained
        if trial.train is not None:
            published = train(trial.train)
            assert published is not None
            model = str(published.path)
        done = evaluate(trial.evaluate.model_copy(update={"models": {trial.row: model}}))
        return {"results": str(done.path), "failure": None}
    except Exception as error:  # whatever it is, the other trials go on and the table says so
        return {"failure": _cause(error)}


def _at_once(settings: SweepSettings, planned: Sequence[Trial]) -> int:
    """As many trials as the cluster holds the workers of, now; at least one, for which an autoscaler may make room."""
    if settings.concurrent is not None:
        return settings.concurrent
    needs: dict[str, float] = {}
    for trial in planned:
        for name, amount in _needs(trial).items():
            needs[name] = max(needs.get(name, 0.0), amount)
    there = ray.cluster_resources()
    room = [int(there.get(name, 0.0) / amount) for name, amount in needs.items() if amount]
    return max(1, min([*room, len(planned)]))


def _needs(trial: Trial) -> dict[str, float]:
    """What a trial takes at most, in its training or its evaluation."""
    cpus, gpus = float(trial.evaluate.actors), trial.evaluate.actors * trial.evaluate.gpus_per_actor
    if trial.train is not None:
        cpus = max(cpus, trial.train.workers * trial.train.cpus_per_worker)
        gpus = max(gpus, trial.train.workers * trial.train.gpus_per_worker)
    return {"CPU": cpus + _DRIVER_CPUS, "GPU": gpus}


def _cause(error: BaseException) -> str:
    """The innermost cause: what Ray wraps around it is the same every time."""
    while error.__cause__ is not None:
        error = error.__cause__
    return in_one_line(error)[:300]
