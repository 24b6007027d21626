"""The published results of an evaluation, two files in one directory: `results.json` has the conventions of the measures,
descriptions of tasks and models, and all means; `per_query.parquet` has one row per value, from which the means follow.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infembed_ray.errors import InputError, in_one_line
from infembed_ray.evaluation.metrics import CONVENTIONS, FURTHER, family
from infembed_ray.evaluation.tasks.task import Figure, Obedience, Scores, Task, means
from infembed_ray.storage import durable
from infembed_ray.storage.places import Place, errors_at, open_binary, read_text

RESULTS_FILE = "results.json"
PER_QUERY_FILE = "per_query.parquet"
FORMAT = "infembed-results/2"
"""Raise it when a measure is computed in another way: figures of one format can be compared."""

_NAMES = ("condition", "model", "task", "figure", "query", "group")
PER_QUERY = pa.schema([*((name, pa.string()) for name in _NAMES), ("value", pa.float64())])
"""`condition` is that of an obedience control; null: the task as it is. `query` is the id of a query, for p-MRR of the
original query, for Robustness@k of a group. Statistics resample whole groups, because the queries of a `group` are not
independent."""


@dataclass(frozen=True)
class TaskSummary:
    """The description of a task in its results."""

    figures: tuple[Figure, ...]
    """The main figure is the first."""
    groups: Mapping[str, str]
    """Query id -> group, for queries that are not independent."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Repositories, revisions, counts."""
    content: str = ""
    """Hash of texts and judgements; results are comparable if it is equal."""

    @classmethod
    def from_task(cls, task: Task, content: str) -> TaskSummary:
        """Describe a task whose contents have this hash."""
        counts = {
            "queries": len(task.queries),
            "passages": task.corpus.num_rows,
            "judgements": sum(map(len, task.qrels.values())),
        }
        if task.changes:
            counts["changed_queries"] = sum(bool(change.documents) for change in task.changes)
        groups = {query.id: query.group for query in task.queries if query.group is not None}
        return cls(task.figures, groups, counts | dict(task.about), content)


@dataclass(frozen=True)
class Results:
    """The results of one evaluation."""

    tasks: Mapping[str, TaskSummary]
    """By name, in the order of the tables."""
    models: Mapping[str, Mapping[str, Any]]
    """Label -> description of the model. The first model is the baseline."""
    scores: Mapping[str, Mapping[str, Scores]]
    """Label -> task -> figure -> query -> value, complete for every model."""
    depth: int
    """Documents per ranking."""
    obedience: Mapping[str, Mapping[str, Obedience]] = field(default_factory=dict)
    """Label -> task with changed instructions -> condition -> values: of all models, and BM25."""

    @property
    def measures(self) -> set[str]:
        """The measures of all figures."""
        of_tasks = {figure.measure for summary in self.tasks.values() for figure in summary.figures}
        tasks = [task for of_model in self.obedience.values() for task in of_model.values()]
        return of_tasks | {figure for task in tasks for scores in task.values() for figure in scores}

    @property
    def obedience_means(self) -> dict[str, dict[str, dict[str, dict[str, float | None]]]]:
        """Label -> task -> condition -> figure -> mean; None without values."""
        return {
            model: {task: {name: means(s) for name, s in of_task.items()} for task, of_task in of_model.items()}
            for model, of_model in self.obedience.items()
        }

    @property
    def figures(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """Label -> task -> figure -> mean; None without values."""
        return {
            model: {task: means(scores) for task, scores in of_model.items()} for model, of_model in self.scores.items()
        }


def conventions_of(measures: set[str]) -> dict[str, str]:
    """Return the conventions of rankings and of these measures, by name without cut-off."""
    return {kind: CONVENTIONS.get(kind, FURTHER) for kind in ("ranking", *sorted(map(family, measures)))}


def write(directory: Path, results: Results) -> None:
    """Write the files into a directory."""
    with pq.ParquetWriter(directory / PER_QUERY_FILE, PER_QUERY) as writer:
        for rows in _tables(results):
            writer.write_table(pa.table(list(zip(*rows, strict=True)) or [()] * len(PER_QUERY), schema=PER_QUERY))
    plain = {
        "format": FORMAT,
        "conventions": conventions_of(results.measures),
        "depth": results.depth,
        "tasks": {
            name: {part: value for part, value in asdict(summary).items() if part != "groups"}
            for name, summary in results.tasks.items()
        },
        "models": {label: dict(about) for label, about in results.models.items()},
        "figures": results.figures,
        **({"obedience": results.obedience_means} if results.obedience else {}),
    }
    durable.replace_json(directory / RESULTS_FILE, plain)


def _tables(results: Results) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the rows of each model and task: one row group, in which repeated names compress well."""
    for model in dict.fromkeys([*results.scores, *results.obedience]):
        own, controls = results.scores.get(model, {}), results.obedience.get(model, {})
        for task in dict.fromkeys([*own, *controls]):
            groups = results.tasks[task].groups
            conditions: list[tuple[str | None, Scores]] = [(None, own.get(task, {})), *controls.get(task, {}).items()]
            yield [
                (condition, model, task, figure, query, groups.get(query), value)
                for condition, scores in conditions
                for figure, values in scores.items()
                for query, value in values.items()
            ]


def read(path: Place, name: str = "results") -> Results:
    """Read results from a published output of `infembed evaluate` or `infembed sweep`, which the setting `name` gives.

    Raises:
        InputError: a file is missing or damaged, or its format differs from this version's.
    """
    with errors_at(path, name):
        text = read_text(path / RESULTS_FILE)
        if text is None:
            raise InputError.of(name, path, f"no {RESULTS_FILE} there", "give an output of infembed evaluate")
        try:
            plain = json.loads(text)
            if plain["format"] != FORMAT:
                fault = f"format is {plain['format']!r}, expected {FORMAT!r}"
                raise InputError.of(name, path / RESULTS_FILE, fault, "evaluate again")
            figures = {task: tuple(Figure(**f) for f in about["figures"]) for task, about in plain["tasks"].items()}
            scores, obedience, groups = _read_values(path / PER_QUERY_FILE, list(plain["models"]), figures)
            tasks = {
                task: TaskSummary(figures[task], groups.get(task, {}), summary["about"], summary["content"])
                for task, summary in plain["tasks"].items()
            }
            return Results(tasks, plain["models"], scores, int(plain["depth"]), obedience)
        except InputError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OSError, pa.ArrowException) as error:
            raise InputError.of(name, path, f"damaged ({in_one_line(error)})", "evaluate again") from error


def _read_values(
    file: Place, models: list[str], figures: Mapping[str, tuple[Figure, ...]]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """Read the values of the tasks and of the controls by model and task, and the groups of queries by task."""
    with open_binary(file) as source:
        columns = pq.read_table(source).select(PER_QUERY.names).cast(PER_QUERY).columns
    scores: dict[str, dict[str, Any]] = {
        model: {task: {figure.name: {} for figure in of_task} for task, of_task in figures.items()} for model in models
    }
    obedience: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for condition, model, task, figure, query, group, value in zip(*(c.to_pylist() for c in columns), strict=True):
        if condition is None:
            of_task = scores[model][task][figure]
        else:
            of_conditions = obedience.setdefault(model, {}).setdefault(task, {})
            of_task = of_conditions.setdefault(condition, {}).setdefault(figure, {})
        of_task[query] = value
        if group is not None:
            groups[task][query] = group
    return scores, obedience, groups
