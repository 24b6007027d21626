"""`infembed sweep`: many trainings and their evaluations, run as Ray tasks, `concurrent` at once, and published as one report.

Each trial is two steps with their own identities (a training, an evaluation), so a sweep that runs again skips finished
steps and runs the rest, whether the driver was killed, a node was lost, or the sweep was extended by a row or a seed.
"""

import hashlib
import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray

from infembed_ray.config.base import Kind, Settings, with_texts
from infembed_ray.config.evaluation import EvaluateSettings, RetrieverSettings
from infembed_ray.config.sweeps import SweepSettings
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError, check_all, in_one_line
from infembed_ray.evaluation import results
from infembed_ray.evaluation.distributed import run as evaluate
from infembed_ray.evaluation.inputs import describe_tasks
from infembed_ray.evaluation.inputs import resolve as resolve_evaluation
from infembed_ray.evaluation.paper import results_report
from infembed_ray.evaluation.paper.collection import BASE
from infembed_ray.evaluation.results import Results
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.modeling.checkpoint import locate
from infembed_ray.modeling.tokenizer import render
from infembed_ray.planning.train import describe as describe_training
from infembed_ray.progress import counted, say, track
from infembed_ray.ray_cluster import connect
from infembed_ray.storage.places import Place, address, place_of
from infembed_ray.storage.steps import Published, Step, alone, find_input, open_place, require_writable
from infembed_ray.training import deepspeed_config, sources
from infembed_ray.training.launch import run as train
from infembed_ray.training.losses import Objective

S = TypeVar("S", bound=Settings)

_GIVEN = ("model", "output", "seed")
"""Fields of a training that the sweep sets."""


@dataclass(frozen=True)
class Trial:
    """A cell of the table, for one seed: labels of its row and backbone, its training, and its evaluation without `models`.

    `untrained` is an untrained backbone with the text format of the trainings; it has no seed and no training.
    """

    row: str
    model: str
    seed: int | None
    train: TrainSettings | None
    evaluate: EvaluateSettings
    untrained: RetrieverSettings | None

    @property
    def name(self) -> str:
        """Name of the trial in messages and results."""
        return f"{self.row}, {self.model}" + ("" if self.seed is None else f", seed {self.seed}")


def rows(settings: SweepSettings) -> dict[str, dict[str, Any]]:
    """Return label -> changed fields of the training, in the order of the table.

    Raises:
        InputError: there is no such objective, or two rows have the same label.
    """
    objectives = [str(Objective.parse(name)) for name in settings.objectives]
    if not objectives and not settings.variants:
        objectives = [str(Objective.parse(settings.train.objective))]
    labels = [BASE, *objectives, *settings.variants]
    if repeated := next((label for n, label in enumerate(labels) if label in labels[:n]), None):
        name = f"variants.{repeated}" if repeated in settings.variants else "objectives"
        raise InputError.of(name, repeated, "another row has this label", "choose another, or list it once")
    return {objective: {"objective": objective} for objective in objectives} | settings.variants


def trials(settings: SweepSettings) -> list[Trial]:
    """Return all trials of a sweep, checked as far as that is cheap, so that a typing error fails at once.

    Raises:
        InputError: a trial has bad input; the setting's name begins with its row.
    """
    if not settings.models:
        raise InputError.of("models", None, "is empty", "set models.label=<directory or hub name>")
    train, evaluate = settings.train, settings.evaluate
    unset = ("", type(train).model_fields["seed"].default)
    own = [f"train.{name}" for name in _GIVEN if getattr(train, name) not in unset]
    own += [f"evaluate.{name}" for name in ("models", "output") if getattr(evaluate, name)]
    own += [
        f"variants.{row}.{n}" for row, change in settings.variants.items() for n in ("records", *_GIVEN) if n in change
    ]
    if own:
        raise InputError.of(own[0], None, "the sweep sets it by models, output and seeds", "leave it out")
    if not evaluate.tasks and evaluate.records is None:
        raise InputError.of("evaluate.tasks", None, "is empty", "set it to [followir], or set evaluate.records")
    sources.named(train)
    settings = _with_absolute_paths(settings)
    designs = {row: _design(settings, row, change) for row, change in rows(settings).items()}
    planned: list[Trial] = []
    for label, model in settings.models.items():
        backbone = locate(model, f"models.{label}").path
        if settings.base:
            planned.append(_trial(settings, BASE, label, untrained(settings.train, backbone)))
        for row, design in designs.items():
            for seed in settings.seeds:
                trained = design.model_copy(update={"model": backbone, "seed": seed})
                planned.append(_trial(settings, row, label, trained))
    return planned


def combined(planned: Sequence[Trial], made: Sequence[Results]) -> Results:
    """Combine the results of all trials, with each trial as a model."""
    models: dict[str, dict[str, Any]] = {}
    obedience = {label: of_tasks for label, of_tasks in made[0].obedience.items() if label not in made[0].models}
    for trial, of_trial in zip(planned, made, strict=True):
        training = None if trial.train is None else trial.train.identity()
        about = {"row": trial.row, "backbone": trial.model, "seed": trial.seed, "train": training}
        models[trial.name] = about | dict(of_trial.models[trial.row])
        if trial.row in of_trial.obedience:
            obedience[trial.name] = of_trial.obedience[trial.row]
    scores = {trial.name: of_trial.scores[trial.row] for trial, of_trial in zip(planned, made, strict=True)}
    return Results(made[0].tasks, models, scores, made[0].depth, obedience)


def _absolute(path: str) -> str:
    """Make a path absolute, because the processes of trials have other working directories."""
    return path.rstrip("/") if "://" in path else str(Path(path).expanduser().absolute())


def _absolute_inputs(settings: S, prefix: str) -> S:
    """Return settings with absolute paths of their inputs; InputError if one does not exist."""

    def change(name: str, kind: Kind, value: str) -> str:
        if not kind.is_path:
            return value
        find_input(value, name)
        return _absolute(value)

    return with_texts(settings, change, prefix)


def _with_absolute_paths(settings: SweepSettings) -> SweepSettings:
    """Return the settings with absolute paths, for fields that no row changes; InputError if one does not exist."""
    output, evaluate = _absolute(settings.output), _absolute_inputs(settings.evaluate, "evaluate.")
    tasks = tuple(t if t in catalogue.TASKS else _absolute(t) for t in catalogue.expand(evaluate.tasks))
    shared = _absolute(evaluate.embeddings or address(place_of(output) / "embeddings"))
    evaluate = evaluate.model_copy(update={"tasks": tasks, "embeddings": shared})
    train = _absolute_inputs(settings.train, "train.")
    return settings.model_copy(update={"train": train, "evaluate": evaluate, "output": output})


def _design(settings: SweepSettings, row: str, change: dict[str, Any]) -> TrainSettings:
    """Return the checked training of a row, with absolute paths, without its backbone and seed."""
    train = TrainSettings.from_mapping(settings.train.model_dump() | change, where=f"row {row}: ")
    try:
        if train.head == "score":
            raise InputError.of("head", "score", "trials evaluate encoders", "train rerankers by `infembed train`")
        Objective.from_settings(train)
        deepspeed_config.check(train)
        return _absolute_inputs(train, "")
    except InputError as error:
        raise error.within(f"row {row}: ") from error


def _trial(settings: SweepSettings, row: str, model: str, design: TrainSettings | RetrieverSettings) -> Trial:
    # One folder per trial: two trials would overwrite each other's `latest` in a shared one.
    train = design if isinstance(design, TrainSettings) else None
    seed = None if train is None else train.seed
    decides = [model, seed, design.identity(), settings.evaluate.identity()]
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", f"{model}-{row}" + ("" if seed is None else f"-{seed}")).strip("-")
    folder = place_of(settings.output) / "trials" / f"{readable}-{digest}"
    evaluate = settings.evaluate.model_copy(update={"output": address(folder / "results")})
    if train is None:
        assert isinstance(design, RetrieverSettings)
        return Trial(row, model, None, None, evaluate, design)
    train = train.model_copy(update={"output": address(folder / "checkpoint")})
    return Trial(row, model, seed, train, evaluate, None)


def untrained(train: TrainSettings, backbone: str) -> RetrieverSettings:
    """Return an untrained backbone with the text format of the trainings, so that a gain is not one of prompts or lengths."""
    names = ("pooling", "append_eos", "bidirectional", "query_length", "passage_length")
    reads: dict[str, Any] = {name: getattr(train, name) for name in names}
    if (train.template, train.query_prefix, train.passage_prefix) != (None, None, None):
        before = train.query_prefix or ""
        instructed = render(train.template or "instruction_first", "{instruction}", "{query}")
        reads |= {"instructed_query": before + instructed, "plain_query": f"{before}{{query}}"}
        reads["passage"] = f"{train.passage_prefix or ''}{{passage}}"
    return RetrieverSettings(model=backbone, **reads)


def describe(settings: SweepSettings) -> Iterator[str]:
    """Check one training per row and backbone, and the evaluation of the first trial: the others differ by seed or row."""
    planned, seeds = trials(settings), len(settings.seeds)
    yield f"output {settings.output}: finished trials are not repeated"
    designs = [t for t in planned if t.train is not None and t.seed == settings.seeds[0]]
    yield f"trials: {len(planned):,}, of which {len(designs) * seeds:,} train ({counted(seeds, 'seed')} per row and model)"
    first = planned[0]
    model = first.untrained or first.train.model  # type: ignore[union-attr]
    evaluation = first.evaluate.model_copy(update={"models": {first.row: model}})
    inputs, *trainings = check_all(
        lambda: resolve_evaluation(evaluation, share_corpora=False), *(partial(_describe, trial) for trial in designs)
    )
    yield from (line for lines in trainings for line in lines)
    yield from describe_tasks(inputs)
    yield "{:,} queries and {:,} passages per trial".format(*inputs.size)


def _describe(trial: Trial) -> list[str]:
    """Return what a training needs; InputError with its row."""
    assert trial.train is not None
    try:
        lines = list(describe_training(trial.train))
    except InputError as error:
        raise error.within(f"row {trial.row}, {trial.model}: ") from error
    return [f"{trial.name}: {line}" for line in lines if line.startswith(("steps", "memory", "disk"))]


def run(settings: SweepSettings) -> Published:
    """Train and evaluate all trials that are not finished, and publish their results and report.

    Raises:
        InputError: a trial has bad input (before any work), or trials failed (after all have run).
    """
    planned = trials(settings)
    output = open_place(settings.output, "output")
    require_writable(output, "output")
    connect()
    with alone(output, "sweep"):
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
    # A trial's process only waits for its workers. Ray repeats it if its node was lost; an exception is its outcome.
    task = ray.remote(num_cpus=0.01, max_retries=settings.train.max_failures)(_run_trial)
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
            model = train(trial.train).address
        return evaluate(trial.evaluate.model_copy(update={"models": {trial.row: model}})).address, ""
    except Exception as error:  # the other trials continue
        return "", in_one_line(error)[:300]
