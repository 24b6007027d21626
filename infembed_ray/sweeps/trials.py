"""Trials of a sweep: one training and its evaluation each, made from the settings."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from infembed_ray.config.base import nearest
from infembed_ray.config.evaluation import EvaluateSettings, RetrieverSettings
from infembed_ray.config.sweeps import SweepSettings
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.evaluation.inputs import content_hash, describe_tasks
from infembed_ray.evaluation.inputs import resolve as resolve_evaluation
from infembed_ray.evaluation.results import Results
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.modeling.checkpoint import locate
from infembed_ray.modeling.template import render
from infembed_ray.planning.train import memory_of, needs
from infembed_ray.progress import counted
from infembed_ray.storage.dry_run import gib, require_space_of_workers, state
from infembed_ray.storage.places import Place, address, place_of
from infembed_ray.storage.steps import Step, find_input
from infembed_ray.training import deepspeed_config, sources
from infembed_ray.training.losses import Objective
from infembed_ray.training.validation import held_out_files

EMBEDDINGS = "embeddings"
"""Folder in the output with the corpus embeddings that all evaluations share."""
BASE = "base"
"""Row of the untrained backbones."""
_GIVEN = ("model", "output", "seed")
"""Fields of a training that the sweep sets."""


@dataclass(frozen=True)
class Trial:
    """A cell of the table, for one seed.

    Attributes:
        row: Label of its objective or variant.
        model: Label of its backbone.
        seed: Seed; None if nothing is trained.
        train: Settings of its training; None for an untrained backbone.
        evaluate: Settings of its evaluation, without `models`.
        untrained: The untrained backbone, with the text format of its trainings; None for a trained model.
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
        InputError: a training has no such field, the sweep sets it, or two rows have the same label.
    """
    objectives = [Objective.parse(name) for name in settings.objectives]
    if not objectives and not settings.variants:
        objectives = [Objective.parse(settings.train.objective)]
    made: dict[str, dict[str, Any]] = {}
    for objective in map(str, objectives):
        if objective in made:
            raise InputError(f"objectives: {objective} is listed twice; list each once")
        made[objective] = {"objective": objective}
    for label, change in settings.variants.items():
        if label in made or label == BASE:
            raise InputError(f"variants.{label}: another row has this label; choose another")
        made[label] = change
    for change in made.values():
        for name in change:
            if name in ("records", *_GIVEN):
                raise InputError(f"{name}: is set by the sweep and cannot differ by row; leave it out")
            if name not in TrainSettings.model_fields:
                raise InputError(f"{name}: is not a field of a training: {nearest(name, TrainSettings.model_fields)}")
    return made


def trials(settings: SweepSettings) -> list[Trial]:
    """Return all trials of a sweep, checked as far as that is cheap, so that a typing error fails at once.

    Raises:
        InputError: a trial has bad input; the message names its row.
    """
    if not settings.models:
        raise InputError("models is empty: set models.label=<directory or hub name>")
    for where, given in (("train", _GIVEN), ("evaluate", ("models", "output"))):
        part = getattr(settings, where)
        for name in given:  # a printed config has all fields, these with their defaults
            if getattr(part, name) != type(part).model_fields[name].get_default(call_default_factory=True):
                raise InputError(f"{where}.{name}: is set by models, output and seeds of the sweep; leave it out")
    settings = _with_absolute_paths(settings)
    designs = {row: _design(settings, row, change) for row, change in rows(settings).items()}
    planned: list[Trial] = []
    for label, model in settings.models.items():
        backbone = locate(model, f"models.{label}").path
        if settings.base:
            planned.append(_trial(settings, BASE, label, None, None, untrained(settings.train, backbone)))
        for row, design in designs.items():
            for seed in settings.seeds:
                train = design.model_copy(update={"model": backbone, "seed": seed})
                planned.append(_trial(settings, row, label, seed, train, None))
    return planned


def prepare(settings: SweepSettings) -> tuple[list[Trial], Step]:
    """Plan the trials, and identify the sweep; InputError if a trial has bad input, or the output cannot be written."""
    planned = trials(settings)
    return planned, Step("sweep", settings, settings.output, *inputs(settings, planned))


def inputs(settings: SweepSettings, planned: Sequence[Trial]) -> tuple[dict[str, Place], dict[str, str]]:
    """Return all input of the trials by its setting: files and directories, and hub names.

    Input that may differ by row is numbered in the order of the rows.
    """
    files: dict[str, Place] = {f"train.{name}": place for name, place in sources.locate(settings.train).items()}
    for name in ("records", "distractors"):
        if (value := getattr(settings.evaluate, name)) is not None:
            files[f"evaluate.{name}"] = find_input(value, f"evaluate.{name}")
    names = {}
    for task in catalogue.expand(settings.evaluate.tasks):
        names[f"evaluate.tasks.{task}"] = content_hash(catalogue.load(task, settings.evaluate.data))
    models = {f"models.{label}": model for label, model in settings.models.items()}
    trainings = [trial.train for trial in planned if trial.train is not None]
    teachers = dict.fromkeys(train.teacher for train in trainings if train.teacher is not None)
    models |= {f"train.teacher ({n})": teacher for n, teacher in enumerate(teachers, start=1)}
    held_out = dict.fromkeys(train.validation for train in trainings if train.validation is not None)
    for n, validation in enumerate(held_out, start=1):
        files |= {f"train.validation.{name} ({n})": file for name, file in held_out_files(validation).items()}
    for name, model in models.items():
        checkpoint = locate(model, name)
        files |= checkpoint.inputs
        names |= checkpoint.names
    return files, names


def combined(planned: Sequence[Trial], results: Sequence[Results]) -> Results:
    """Combine the results of all trials, with each trial as a model."""
    first = results[0]
    return Results(
        tasks=first.tasks,
        models={
            trial.name: {
                "row": trial.row,
                "backbone": trial.model,
                "seed": trial.seed,
                "train": None if trial.train is None else trial.train.identity(),
                **of_trial.models[trial.row],
            }
            for trial, of_trial in zip(planned, results, strict=True)
        },
        scores={trial.name: of_trial.scores[trial.row] for trial, of_trial in zip(planned, results, strict=True)},
        depth=first.depth,
        obedience={
            **{t.name: r.obedience[t.row] for t, r in zip(planned, results, strict=True) if t.row in r.obedience},
            **{label: of_tasks for label, of_tasks in first.obedience.items() if label not in first.models},
        },
    )


def _absolute(path: str) -> str:
    """Make a path absolute, because the processes of trials have other working directories."""
    return path.rstrip("/") if "://" in path else str(Path(path).expanduser().absolute())


def _with_absolute_paths(settings: SweepSettings) -> SweepSettings:
    """Return the settings with absolute paths, for fields that no row changes; InputError if one does not exist."""
    training = settings.train
    for name, source in sources.named(training).items():
        find_input(source.path, f"train.{name}")
    train: dict[str, Any] = {
        "records": _absolute(training.records) if training.records else "",
        "sources": {
            label: source.model_copy(update={"path": _absolute(source.path)})
            for label, source in training.sources.items()
        },
    }
    if not settings.evaluate.tasks and settings.evaluate.records is None:
        raise InputError(
            "evaluate.tasks is empty: set evaluate.tasks=[followir] or another of the catalogue, or evaluate.records"
        )
    tasks = catalogue.expand(settings.evaluate.tasks)
    evaluate: dict[str, Any] = {"tasks": tuple(t if t in catalogue.TASKS else _absolute(t) for t in tasks)}
    for name in ("records", "distractors", "data", "embeddings"):
        if (path := getattr(settings.evaluate, name)) is not None:
            if name != "embeddings":  # may not exist yet
                find_input(path, f"evaluate.{name}")
            evaluate[name] = _absolute(path)
    evaluate.setdefault("embeddings", address(place_of(_absolute(settings.output)) / EMBEDDINGS))
    return settings.model_copy(
        update={
            "train": settings.train.model_copy(update=train),
            "evaluate": settings.evaluate.model_copy(update=evaluate),
            "output": _absolute(settings.output),
        }
    )


def _design(settings: SweepSettings, row: str, change: dict[str, Any]) -> TrainSettings:
    """Return the checked training of a row, with absolute paths, without its backbone and seed."""
    train = TrainSettings.from_mapping(settings.train.model_dump() | change, where=f"row {row}: ")
    update: dict[str, Any] = {}
    try:
        Objective.from_settings(train)
        deepspeed_config.check(train)
        if train.teacher is not None:
            update["teacher"] = locate(train.teacher, "teacher").path
        if train.validation is not None:
            paths = {name: getattr(train.validation, name) for name in held_out_files(train.validation)}
            absolute = {name: _absolute(path) for name, path in paths.items()}
            update["validation"] = train.validation.model_copy(update=absolute)
    except InputError as error:
        raise InputError(f"row {row}: {error}") from error
    if train.offload.nvme_path is not None:
        update["offload"] = train.offload.model_copy(update={"nvme_path": _absolute(train.offload.nvme_path)})
    return train.model_copy(update=update)


def _trial(
    settings: SweepSettings,
    row: str,
    model: str,
    seed: int | None,
    train: TrainSettings | None,
    untrained: RetrieverSettings | None,
) -> Trial:
    # One folder per trial: two trials would overwrite each other's `latest` in a shared one.
    of_model = train or untrained
    decides = [model, seed, of_model and of_model.identity(), settings.evaluate.identity()]
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", f"{model}-{row}" + ("" if seed is None else f"-{seed}")).strip("-")
    folder = place_of(settings.output) / "trials" / f"{readable}-{digest}"
    evaluate = EvaluateSettings.from_mapping(
        settings.evaluate.model_dump() | {"models": {}, "output": address(folder / "results")}, where="evaluate."
    )
    if train is not None:
        train = train.model_copy(update={"output": address(folder / "checkpoint")})
    return Trial(row, model, seed, train, evaluate, untrained)


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
    planned, step = prepare(settings)
    if (yield from state(step)):
        return
    designs = {(t.row, t.model): t for t in planned if t.train is not None and t.seed == settings.seeds[0]}
    seeds = len(settings.seeds)
    yield f"trials: {len(planned):,}, of which {len(designs) * seeds:,} train ({counted(seeds, 'seed')} per row and model)"
    first = planned[0]
    model = first.untrained or first.train.model  # type: ignore[union-attr]
    evaluation = first.evaluate.model_copy(update={"models": {first.row: model}})
    evaluation_inputs, *needs = check_all(
        lambda: resolve_evaluation(evaluation, share_corpora=False),
        *(partial(_needs, trial) for trial in designs.values()),
    )
    if needs:
        steps, memory, disk = zip(*needs, strict=True)
        yield f"steps: {seeds * sum(steps):,} in all trainings"
        largest = f", of {max(zip(memory, designs, strict=True))[1][0]}" if len(designs) > 1 else ""
        yield f"memory: about {gib(max(memory))} {memory_of(settings.train)} at the peak of a step{largest}"
        yield require_space_of_workers(step, seeds * sum(disk), step.root / "trials")
    yield from describe_tasks(evaluation_inputs)
    yield "{:,} queries and {:,} passages per trial".format(*evaluation_inputs.size)


def _needs(trial: Trial) -> tuple[int, float, float]:
    """Return what a training needs; InputError with its row."""
    assert trial.train is not None
    try:
        return needs(trial.train)
    except InputError as error:
        raise error.within(f"row {trial.row}, {trial.model}: ") from error
