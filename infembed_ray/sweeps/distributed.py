"""`infembed sweep`: run the trials as Ray tasks, `concurrent` at once.

Each trial is two steps with their own identities (a training, an evaluation), so a sweep that runs again skips finished
steps and runs the rest, whether the driver was killed, a node was lost, or the sweep was extended by a row or a seed. The
table shows failed trials, and the next run tries them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import ray

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.config.sweeps import SweepSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.evaluation import results
from infembed_ray.evaluation.distributed import run as evaluate
from infembed_ray.evaluation.results import Results
from infembed_ray.progress import counted, say, track
from infembed_ray.ray_cluster import connect
from infembed_ray.storage.places import address, place_of
from infembed_ray.storage.steps import Published
from infembed_ray.sweeps import table
from infembed_ray.sweeps.table import Outcome
from infembed_ray.sweeps.trials import Trial, combined, prepare
from infembed_ray.training.launch import run as train

TABLE = "table.md"
_DRIVER_CPUS = 0.01
"""CPUs of the process of a trial, which only waits for its workers."""


def run(settings: SweepSettings) -> Published:
    """Train and evaluate all trials that are not finished, and publish their table.

    Raises:
        InputError: a trial has bad input (before any work), or trials failed (after all have run).
    """
    planned, step = prepare(settings)
    if done := step.finished():
        return done
    connect()
    with step.publish() as staging:
        outcomes, trial_results = _run_trials(settings, planned)
        markdown = table.as_markdown(outcomes)
        (staging.path / TABLE).write_text(markdown, encoding="utf-8")
        say(markdown)
        failed = [o for o in outcomes if o.failure is not None]
        if failed:
            raise InputError(
                f"output={settings.output}: {len(failed)} of {len(outcomes)} trials failed, the first: {failed[0].failure}; "
                f"the table is in {staging.path / TABLE}; run the same command again to retry them"
            )
        results.write(staging.path, combined(planned, trial_results))
        staging.counts = {"trials": len(outcomes)}
    return step.published()


def _run_trials(settings: SweepSettings, planned: Sequence[Trial]) -> tuple[list[Outcome], list[Results]]:
    """Run all trials; return their outcomes, in order, and the results of those that succeeded."""
    waiting = deque(planned)
    say(f"sweep: {counted(len(planned), 'trial')}, {settings.concurrent} at once")
    # Ray repeats a trial whose node was lost; an exception of a trial is its outcome.
    task = ray.remote(num_cpus=_DRIVER_CPUS, max_retries=settings.train.max_failures)(_run_trial)
    running: dict[ray.ObjectRef, Trial] = {}
    ended: dict[str, tuple[str, str | None]] = {}
    with track("sweep", len(planned)) as advance:
        while waiting or running:
            while waiting and len(running) < settings.concurrent:
                trial = waiting.popleft()
                running[task.remote(trial)] = trial
            (done,), _ = ray.wait(list(running))
            trial = running.pop(done)
            try:
                ended[trial.name] = ray.get(done)
            except ray.exceptions.RayError as error:  # its process was lost
                ended[trial.name] = "", _cause(error)
            advance(note=f"{trial.name}{' failed' if ended[trial.name][1] else ''}")
    outcomes, trial_results = [], []
    for trial in planned:
        place, failure = ended[trial.name]
        measures = {}
        if failure is None:
            trial_results.append(results.read(place_of(place), trial.name))
            measures = table.measures_of(trial_results[-1].figures[trial.row])
        outcomes.append(Outcome(trial.row, trial.model, trial.seed, measures, failure))
    return outcomes, trial_results


def _run_trial(trial: Trial) -> tuple[str, str | None]:
    """Train and evaluate one trial on some node, as a driver does; return the place of its results, and why it failed."""
    try:
        model: RetrieverSettings | str | None = trial.untrained
        if trial.train is not None:
            published = train(trial.train)
            assert published is not None
            model = _place_of(published, trial.train.output)
        done = evaluate(trial.evaluate.model_copy(update={"models": {trial.row: model}}))
        return _place_of(done, trial.evaluate.output), None
    except Exception as error:  # the other trials continue, and the table shows the failure
        return "", _cause(error)


def _place_of(published: Published, output: str) -> str:
    """Return where other processes find an output."""
    return address(place_of(output) / published.manifest["identity"])


def _cause(error: BaseException) -> str:
    """Return the innermost cause in one line, without Ray's wrappers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return in_one_line(error)[:300]
