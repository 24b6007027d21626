"""Validation on held-out records during training, and early stopping. All workers evaluate together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
from infembed_ray.evaluation.tasks.task import Task, means, score
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
        figures = self.figures(engine)
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
        asked, order = _part(every)
        tokens = encoder.tokenize_queries([q.query for q in asked], [q.instruction for q in asked])
        queries = gather_rows(engine.embed(tokens), [len(asked)] * world()[1])[order]
        if world()[0] > 0:
            return from_first({})
        return from_first(self._figures([q.id for q in every], queries.cpu().numpy(), passages.cpu().numpy()))

    def _figures(self, ids: Sequence[str], queries: np.ndarray, passages: np.ndarray) -> dict[str, float]:
        """Compute the figures of `infembed evaluate` and their controls; nDCG is the mean over the three kinds of queries."""
        assert self._task is not None
        finite = np.isfinite(queries).all() and np.isfinite(passages).all()
        rankings = exact_search(queries, passages, self._task.corpus["id"].to_pylist()) if finite else []
        run = dict(zip(ids, rankings, strict=finite))
        scores = means(score(self._task, run))
        kinds = [scores[figure.name] for figure in self._task.figures if figure.measure == "nDCG@10"]
        figures = {"p_mrr": scores["p-MRR"], "ndcg_at_10": fmean(value for value in kinds if value is not None)}
        if self._controls is not None:
            controls = {name: means(of_control) for name, of_control in self._controls.measure(self._task, run).items()}
            figures |= {f"p_mrr_{name}": controls[name]["p-MRR"] for name in (GENERIC, SHUFFLED) if name in controls}
            figures |= {"p_mrr_bm25": self._of_bm25}
        return {f"{PREFIX}{n}": math.nan if value is None or not finite else value for n, value in figures.items()}

    @cached_property
    def _of_bm25(self) -> float | None:
        """p-MRR of word overlap alone."""
        assert self._task is not None
        return word_overlap(self._task, DEPTH)


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
        raise InputError(
            "validation.metric=p_mrr: in these records no passage becomes irrelevant when the instruction changes; "
            "set validation.metric=ndcg_at_10"
        )
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
