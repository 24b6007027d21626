"""`infembed sweep`: run the trials as Ray tasks, `concurrent` at once.

Each trial is two steps with their own identities (a training, an evaluation), so a sweep that runs again skips finished
steps and runs the rest, whether the driver was killed, a node was lost, or the sweep was extended by a row or a seed. The
table of a sweep is a step whose inputs are the trials' results.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.config.sweeps import SweepSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.evaluation import results
from infembed_ray.evaluation.distributed import run as evaluate
from infembed_ray.progress import counted, say, track
from infembed_ray.ray_cluster import connect
from infembed_ray.storage.places import address, place_of
from infembed_ray.storage.run_state import recorded
from infembed_ray.storage.steps import Published, Step, open_place, require_writable
from infembed_ray.sweeps.trials import Trial, combined, trials
from infembed_ray.training.launch import run as train

TABLE = "table.md"
_DRIVER_CPUS = 0.01
"""CPUs of the process of a trial, which only waits for its workers."""
_X100 = " x100"


@dataclass(frozen=True)
class TrialFigures:
    """Figures of a trial: labels of its row and backbone, seed (None: untrained), name -> value, and why it failed.

    `place` is that of the results of its evaluation.
    """

    row: str
    model: str
    seed: int | None
    measures: Mapping[str, float]
    failure: str | None = None
    place: str = ""


def run(settings: SweepSettings) -> Published:
    """Train and evaluate all trials that are not finished, and publish their table.

    Raises:
        InputError: a trial has bad input (before any work), or trials failed (after all have run).
    """
    planned = trials(settings)
    output = open_place(settings.output, "output")
    require_writable(output, "output")
    connect()
    with recorded(output, "sweep", "sweep"):
        figures = _run_trials(settings, planned)
        markdown = as_markdown(figures)
        say(markdown)
        if failed := [trial for trial in figures if trial.failure is not None]:
            raise InputError.of(
                "output",
                settings.output,
                f"{len(failed)} of {len(planned)} trials failed, the first: {failed[0].failure}",
                "run the same command again to retry them",
            )
        places = {trial.name: place_of(each.place) for trial, each in zip(planned, figures, strict=True)}
        step = Step("sweep", settings, settings.output, places)
        if done := step.finished():
            return done
        with step.publish() as staging:
            (staging.path / TABLE).write_text(markdown, encoding="utf-8")
            made = [results.read(place, name) for name, place in places.items()]
            results.write(staging.path, combined(planned, made))
            staging.counts = {"trials": len(planned)}
        return step.published()


def _run_trials(settings: SweepSettings, planned: Sequence[Trial]) -> list[TrialFigures]:
    """Run all trials, `concurrent` at once; return their figures in their order."""
    waiting = deque(planned)
    say(f"sweep: {counted(len(planned), 'trial')}, {settings.concurrent} at once")
    # Ray repeats a trial whose node was lost; an exception of a trial is its outcome.
    task = ray.remote(num_cpus=_DRIVER_CPUS, max_retries=settings.train.max_failures)(_run_trial)
    running: dict[ray.ObjectRef, Trial] = {}
    ended: dict[str, TrialFigures] = {}
    with track("sweep", len(planned)) as advance:
        while waiting or running:
            while waiting and len(running) < settings.concurrent:
                trial = waiting.popleft()
                running[task.remote(trial)] = trial
            (done,), _ = ray.wait(list(running))
            trial = running.pop(done)
            try:
                figures = ray.get(done)
            except ray.exceptions.RayError as error:  # its process was lost
                figures = _failed(trial, error)
            ended[trial.name] = figures
            advance(note=f"{trial.name}{' failed' if figures.failure else ''}")
    return [ended[trial.name] for trial in planned]


def _run_trial(trial: Trial) -> TrialFigures:
    """Train and evaluate one trial on some node, as a driver does."""
    try:
        model: RetrieverSettings | str | None = trial.untrained
        if trial.train is not None:
            model = _place_of(train(trial.train), trial.train.output)
        done = evaluate(trial.evaluate.model_copy(update={"models": {trial.row: model}}))
        place = _place_of(done, trial.evaluate.output)
        measures = measures_of(results.read(place_of(place), trial.name).figures[trial.row])
        return TrialFigures(trial.row, trial.model, trial.seed, measures, place=place)
    except Exception as error:  # the other trials continue, and the table shows the failure
        return _failed(trial, error)


def _place_of(published: Published, output: str) -> str:
    """Return where other processes find an output."""
    return address(place_of(output) / published.manifest["identity"])


def _failed(trial: Trial, error: BaseException) -> TrialFigures:
    """Return the figures of a trial that failed, with the innermost cause in one line, without Ray's wrappers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return TrialFigures(trial.row, trial.model, trial.seed, {}, in_one_line(error)[:300])


def measures_of(figures: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """Select the measures of one model from an evaluation's figures, task by task; p-MRR is x100, as usual."""
    measures = {}
    for task, of_task in figures.items():
        for figure, value in of_task.items():
            if value is not None:
                name = figure if len(figures) == 1 else f"{task} {figure}"
                measures[name + _X100 * (figure == "p-MRR")] = 100 * value if figure == "p-MRR" else value
    return measures


def as_markdown(trials: Sequence[TrialFigures]) -> str:
    """Format an overview of all backbones, then all measures of each: mean and sample standard deviation over seeds."""
    models = list(dict.fromkeys(trial.model for trial in trials))
    names = list(dict.fromkeys(name for trial in trials for name in trial.measures))
    parts = []
    if len(models) > 1:  # as in Table 3: the first measure of retrieval and the first of instruction following
        firsts = [next((n for n in names if n.endswith(_X100) is follows), None) for follows in (False, True)]
        columns = [(model, name) for model in models for name in firsts if name is not None]
        parts.append(_table(["", *(f"{model}: {name}" for model, name in columns)], trials, columns))
    parts += [_table([model, *names], trials, [(model, name) for name in names]) for model in models]
    failed = [f"- {t.row}, {t.model}, seed {t.seed}: {t.failure}" for t in trials if t.failure is not None]
    if failed:
        parts.append("Failed:\n\n" + "\n".join(failed))
    seeds = sorted({trial.seed for trial in trials if trial.seed is not None})
    parts.append(f"Mean ± sample standard deviation over seeds {', '.join(map(str, seeds))}.")
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], trials: Sequence[TrialFigures], columns: Sequence[tuple[str, str]]) -> str:
    lines = [header, ["---", *["---:"] * len(columns)]]
    for row in dict.fromkeys(trial.row for trial in trials):
        of_row = [trial for trial in trials if trial.row == row]
        lines.append([row, *(_cell([t for t in of_row if t.model == model], name) for model, name in columns)])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _cell(trials: Sequence[TrialFigures], measure: str) -> str:
    failed = sum(trial.failure is not None for trial in trials)
    values = [trial.measures[measure] for trial in trials if measure in trial.measures]
    if not values:
        return "failed" if failed else "n/a"
    decimals = 1 if measure.endswith(_X100) else 3
    text = f"{statistics.fmean(values):.{decimals}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{decimals}f}"
    return f"{text} ({failed} of {len(trials)} failed)" if failed else text
