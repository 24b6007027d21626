"""Validation on held-out records during training, and early stopping. All workers evaluate together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from infembed_ray.config.training import TrainSettings, ValidationSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.obedience import GENERIC, SHUFFLED, Controls, word_overlap
from infembed_ray.evaluation.search import DEPTH, exact_search
from infembed_ray.evaluation.tasks.infir import instruction_following
from infembed_ray.evaluation.tasks.task import Query, Task, means, score
from infembed_ray.modeling.exclusions import moved, with_excluded
from infembed_ray.modeling.formats import Question
from infembed_ray.records import tables
from infembed_ray.records.tables import MADE_ID, Record
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.storage.steps import find_input
from infembed_ray.training.collate import flatten
from infembed_ray.training.collectives import from_first, gather_rows, world

if TYPE_CHECKING:  # a driver that only checks its input does not import DeepSpeed
    from infembed_ray.training.checkpoints.checkpoint import Progress
    from infembed_ray.training.engine import Engine

T = TypeVar("T")

EXPORTED = "exported.json"
"""File in the output of a run: the step of the exported checkpoint, and its validation score."""
PREFIX = "validation_"
"""Prefix of the validation figures in the log of a run."""
EXCLUSION_WEIGHT = "exclusion_weight"
"""Name in the log of the weight that was chosen."""
EXCLUSION_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4)
"""Weights of exclusions to choose from. At 0.6, a task with distractors lost more nDCG@10 than held-out records alone showed."""
MAX_NDCG_LOSS = 0.01
"""Loss of nDCG@10 against weight 0, in any kind of query, up to which a weight is chosen; `serve` has the same default."""


class Validation:
    """Validation task of a run, and its early stopping. A run without validation has no scores and never stops early."""

    def __init__(self, settings: TrainSettings) -> None:
        self._settings = settings.validation
        self._task = None if settings.validation is None else held_out(settings.validation)[1]
        self._controls = None if self._task is None else Controls.from_task(self._task)

    def after(self, progress: Progress, steps: int, engine: Engine) -> tuple[Progress, dict[str, float]]:
        """Evaluate after a step if it is time; every worker must call it.

        Returns:
            The progress with the score, and the figures for the log.
        """
        if self._settings is None or (progress.step % self._settings.every and progress.step < steps):
            return progress, {}
        with engine.published_weights():
            figures = self.figures(engine)
        progress = replace(progress, exclusion_weight=figures.get(EXCLUSION_WEIGHT, 0.0))
        return _with_score(progress, figures[f"{PREFIX}{self._settings.metric}"]), figures

    def exhausted(self, progress: Progress) -> bool:
        """Return whether the patience is exhausted, so that training stops."""
        patience = None if self._settings is None else self._settings.patience
        return patience is not None and progress.stale >= patience

    def needs_checkpoint(self, progress: Progress) -> bool:
        """Return whether this step must be saved, because it is the best so far or the last."""
        return self.exhausted(progress) or (progress.score is not None and progress.stale == 0)

    def figures(self, engine: Engine) -> dict[str, float]:
        """Evaluate the model; every worker must call it and embeds its part of the texts.

        No random number is drawn, so that validation does not change the training.
        """
        assert self._task is not None
        task, encoder = self._task, engine.encoder
        every = task.queries if self._controls is None else self._controls.ask(task).queries
        texts, order = _part(task.corpus["text"].to_pylist())
        passages = gather_rows(engine.embed(encoder.tokenize_passages(texts)), [len(texts)] * world()[1])[order]
        asked, order = _part(with_excluded([Question(q.query, q.instruction) for q in every], max(EXCLUSION_WEIGHTS)))
        tokens = encoder.tokenize_queries([q.query for q in asked], [q.instruction for q in asked])
        queries = gather_rows(engine.embed(tokens), [len(asked)] * world()[1])[order]
        if world()[0] > 0:
            return from_first({})
        return from_first(self._figures(every, queries.cpu().numpy(), passages.cpu().numpy()))

    def _figures(self, queries: Sequence[Query], vectors: np.ndarray, passages: np.ndarray) -> dict[str, float]:
        """Compute the figures of `infembed evaluate` and their controls; nDCG is the mean over the three kinds of queries.

        Args:
            vectors: of the queries, and then of what their instructions exclude.
        """
        assert self._task is not None
        finite = bool(np.isfinite(vectors).all() and np.isfinite(passages).all())
        runs: dict[float, dict[str, dict[str, float]]] = {0.0: {}}
        asked, ids = [Question(q.query, q.instruction) for q in queries], self._task.corpus["id"].to_pylist()
        weights = EXCLUSION_WEIGHTS if len(vectors) > len(asked) else EXCLUSION_WEIGHTS[:1]  # else all are alike
        for weight in weights if finite else ():
            rankings = exact_search(moved(asked, vectors, weight), passages, ids)
            runs[weight] = dict(zip((q.id for q in queries), rankings, strict=True))
        weight = best_exclusion_weight(self._task, runs)
        run = runs[weight]
        scores = means(score(self._task, run))
        kinds = [scores[figure.name] for figure in self._task.figures if figure.measure == "nDCG@10"]
        figures = {"p_mrr": scores["p-MRR"], "ndcg_at_10": fmean(value for value in kinds if value is not None)}
        if self._controls is not None:
            controls = {name: means(of_control) for name, of_control in self._controls.measure(self._task, run).items()}
            figures |= {f"p_mrr_{name}": controls[name]["p-MRR"] for name in (GENERIC, SHUFFLED) if name in controls}
            figures |= {"p_mrr_bm25": self._of_bm25}
        logged = {f"{PREFIX}{n}": math.nan if value is None or not finite else value for n, value in figures.items()}
        return logged | {EXCLUSION_WEIGHT: weight}

    @cached_property
    def _of_bm25(self) -> float | None:
        """p-MRR of word overlap alone."""
        assert self._task is not None
        return word_overlap(self._task, DEPTH)


def best_exclusion_weight(task: Task, runs: Mapping[float, dict[str, dict[str, float]]]) -> float:
    """Return the weight with the highest p-MRR, the first of equals, among those with at most `MAX_NDCG_LOSS`.

    Args:
        runs: weight -> rankings, first of weight 0.
    """
    scores = {weight: means(score(task, run)) for weight, run in runs.items()}
    kinds = [figure.name for figure in task.figures if figure.measure == "nDCG@10"]

    def is_allowed(weight: float) -> bool:
        return all((scores[0.0][kind] or 0.0) - (scores[weight][kind] or 0.0) <= MAX_NDCG_LOSS for kind in kinds)

    return max(filter(is_allowed, runs), key=lambda weight: scores[weight]["p-MRR"] or 0.0)


def _with_score(progress: Progress, score: float) -> Progress:
    """Return the progress with this score, the best score and the evaluations since the best."""
    if not math.isfinite(score):
        return replace(progress, stale=progress.stale + 1)
    if progress.best is None or score > progress.best:
        return replace(progress, score=score, best=score, stale=0)
    return replace(progress, score=score, stale=progress.stale + 1)


def held_out(settings: ValidationSettings) -> tuple[list[Record], Task]:
    """Read the held-out records and build their retrieval task.

    Raises:
        InputError: a file cannot be used, or the metric has nothing to measure.
    """
    place = find_input(settings.records, "validation.records")
    rows = tables.read(place, Record, "validation.records", split=settings.split)
    task = instruction_following(rows)
    if settings.metric == "p_mrr" and not any(change.documents for change in task.changes):
        fault = "in these records no passage becomes irrelevant when the instruction changes"
        raise InputError.of("validation.metric", "p_mrr", fault, "set validation.metric=ndcg_at_10")
    return rows, task


def overlapping(training: Iterable[TrainingRecord], held: Sequence[Record]) -> int:
    """Count the held-out records that share their id, query or positive passage with a training record."""
    seen: dict[tuple[str, str], list[int]] = {}
    for number, record in enumerate(held):
        for mark in _marks(record):
            seen.setdefault(mark, []).append(number)
    return len({number for record in training for mark in _marks(record) for number in seen.get(mark, ())})


def _marks(record: TrainingRecord) -> Iterable[tuple[str, str]]:
    if not record.id.rpartition("/")[2].startswith(MADE_ID):
        yield "id", record.id
    first = flatten(record)[0]
    yield "query", first.query
    for passage in (first.passage, *first.other_positives):
        yield "passage", passage


def _part(items: Sequence[T]) -> tuple[list[T], torch.Tensor]:
    """Return this worker's part of the items, and the index of each item in the parts of all workers in rank order.

    All parts have the same size; some repeat the last item.
    """
    rank, workers = world()
    size = -(-len(items) // workers)
    part = [items[min(n * workers + rank, len(items) - 1)] for n in range(size)]
    places = torch.arange(len(items))
    return part, places % workers * size + places // workers
