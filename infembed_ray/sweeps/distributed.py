"""`infembed sweep`: run the trials as Ray tasks, `concurrent` at once, and publish their report.

Each trial is two steps with their own identities (a training, an evaluation), so a sweep that runs again skips finished
steps and runs the rest, whether the driver was killed, a node was lost, or the sweep was extended by a row or a seed.
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
from infembed_ray.evaluation.paper import results_report
from infembed_ray.progress import counted, say, track
from infembed_ray.ray_cluster import connect
from infembed_ray.storage.places import Place, address, place_of
from infembed_ray.storage.run_state import recorded
from infembed_ray.storage.steps import Published, Step, open_place, require_writable
from infembed_ray.sweeps.trials import Trial, combined, trials
from infembed_ray.training.launch import run as train

_DRIVER_CPUS = 0.01
"""CPUs of the process of a trial, which only waits for its workers."""


def run(settings: SweepSettings) -> Published:
    """Train and evaluate all trials that are not finished, and publish their results and report.

    Raises:
        InputError: a trial has bad input (before any work), or trials failed (after all have run).
    """
    planned = trials(settings)
    output = open_place(settings.output, "output")
    require_writable(output, "output")
    connect()
    with recorded(output, "sweep", "sweep"):
        places = _run_trials(settings, planned)
        step = Step("sweep", settings, settings.output, places)
        if done := step.finished():
            return done
        figures = combined(planned, [results.read(place, name) for name, place in places.items()])
        with step.publish() as staging:
            report = results_report.write(staging.path, settings.output, figures)
            staging.counts = {"trials": len(planned)}
        say(report.as_text())
        return step.published()


def _run_trials(settings: SweepSettings, planned: Sequence[Trial]) -> dict[str, Place]:
    """Run all trials, `concurrent` at once; return the places of their results by their names, in their order."""
    waiting = deque(planned)
    say(f"sweep: {counted(len(planned), 'trial')}, {settings.concurrent} at once")
    # Ray repeats a trial whose node was lost; an exception of a trial is its outcome.
    task = ray.remote(num_cpus=_DRIVER_CPUS, max_retries=settings.train.max_failures)(_run_trial)
    running: dict[ray.ObjectRef, Trial] = {}
    places: dict[str, str] = {}
    failures: list[str] = []
    with track("sweep", len(planned)) as advance:
        while waiting or running:
            while waiting and len(running) < settings.concurrent:
                trial = waiting.popleft()
                running[task.remote(trial)] = trial
            (done,), _ = ray.wait(list(running))
            trial = running.pop(done)
            try:
                places[trial.name], failure = ray.get(done)
            except ray.exceptions.RayError as error:  # its process was lost
                failure = in_one_line(error)[:300]
            if failure:
                failures.append(f"{trial.name}: {failure}")
                say(f"sweep: failed: {failures[-1]}")
            advance(note=f"{trial.name}{' failed' if failure else ''}")
    if failures:
        fault = f"{len(failures)} of {len(planned)} trials failed, the first: {failures[0]}"
        raise InputError.of("output", settings.output, fault, "run the same command again to retry them")
    return {trial.name: place_of(places[trial.name]) for trial in planned}


def _run_trial(trial: Trial) -> tuple[str, str]:
    """Train and evaluate one trial on some node, as a driver does; return the place of its results, or why it failed."""
    try:
        model: RetrieverSettings | str | None = trial.untrained
        if trial.train is not None:
            model = _place_of(train(trial.train), trial.train.output)
        done = evaluate(trial.evaluate.model_copy(update={"models": {trial.row: model}}))
        return _place_of(done, trial.evaluate.output), ""
    except Exception as error:  # the other trials continue
        cause: BaseException = error
        while cause.__cause__ is not None:  # without Ray's wrappers
            cause = cause.__cause__
        return "", in_one_line(cause)[:300]


def _place_of(published: Published, output: str) -> str:
    """Return where other processes find an output."""
    return address(place_of(output) / published.manifest["identity"])
