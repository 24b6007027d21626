"""The published results of an evaluation: figures, their values per query, and the conventions of the measures.

Three files in one directory:

- `results.json`: format, conventions, descriptions of tasks and models, and all means.
- `per_query.parquet`: one row per value, `PER_QUERY`, from which the means follow.
- `obedience.parquet`: the same of the obedience controls, with their condition, if there are any.

Figures of different conventions cannot be compared, so `read` rejects conventions that differ from this version's.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infembed_ray.errors import InputError, in_one_line
from infembed_ray.evaluation.metrics import convention, family
from infembed_ray.evaluation.scoring import Obedience, Scores, means
from infembed_ray.evaluation.tasks.task import Figure, Task
from infembed_ray.storage import durable
from infembed_ray.storage.places import Place, errors_at, open_binary, read_text

RESULTS_FILE = "results.json"
PER_QUERY_FILE = "per_query.parquet"
OBEDIENCE_FILE = "obedience.parquet"
FORMAT = "infembed-results/1"

PER_QUERY = pa.schema(
    [(name, pa.string()) for name in ("model", "task", "figure", "query", "group")] + [("value", pa.float64())]
)
"""`query` is the id of a query, for p-MRR of the original query, for Robustness@k of a group. Statistics resample whole
groups, because the queries of a `group` are not independent."""
OBEDIENCE = pa.schema([("condition", pa.string()), *PER_QUERY])
_TOLERANCE = 1e-9
"""Tolerance between a stored mean and the mean of its values: sums of floats depend on their order."""


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
    """Label -> task with changed instructions -> condition -> values: of all models, BM25 and a constant."""
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Label -> `costs.FIGURES`, as far as they were measured."""

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
    return {kind: convention(kind) for kind in ("ranking", *sorted(map(family, measures)))}


def write(directory: Path, results: Results) -> None:
    """Write the files into a directory."""
    _write_per_query(directory / PER_QUERY_FILE, results)
    if results.obedience:
        _write_obedience(directory / OBEDIENCE_FILE, results)
    plain = {
        "format": FORMAT,
        "conventions": conventions_of(results.measures),
        "depth": results.depth,
        "baseline": next(iter(results.models)),
        "tasks": {
            name: {
                "figures": [{"name": f.name, "measure": f.measure, "kind": f.kind} for f in summary.figures],
                "about": dict(summary.about),
                "content": summary.content,
            }
            for name, summary in results.tasks.items()
        },
        "models": {label: dict(about) for label, about in results.models.items()},
        "figures": results.figures,
        **({"obedience": results.obedience_means} if results.obedience else {}),
        **({"costs": results.costs} if results.costs else {}),
    }
    durable.replace_json(directory / RESULTS_FILE, plain)


def read(path: Place, name: str = "results") -> Results:
    """Read results from the directory of the files, which may be in an object store.

    Args:
        path: a published output of `infembed evaluate` or `infembed sweep`.
        name: the setting that gives it, for errors.

    Raises:
        InputError: a file is missing or damaged; its format or a convention differs from this version's; a value is
            missing, duplicated or not finite; a mean does not follow from its values.
    """
    file = path / RESULTS_FILE
    with errors_at(path, name):
        plain = _plain(file, name)
    try:
        summaries = {
            task: TaskSummary(
                tuple(Figure(f["name"], f["measure"], f["kind"]) for f in s["figures"]), {}, s["about"], s["content"]
            )
            for task, s in plain["tasks"].items()
        }
        stored_means, models, depth = plain["figures"], plain["models"], int(plain["depth"])
        conventions: Mapping[str, str] = dict(plain["conventions"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{name}={file}: damaged ({in_one_line(error)}); evaluate again") from error
    with errors_at(path, name):
        obedience = _obedience(path / OBEDIENCE_FILE, name) if "obedience" in plain else {}
    empty = Results(summaries, models, {}, depth, obedience, plain.get("costs", {}))
    _check_conventions(file, name, conventions, empty.measures)
    with errors_at(path, name):
        scores, groups = _scores(path / PER_QUERY_FILE, name, empty)
    tasks = {task: replace(summary, groups=groups.get(task, {})) for task, summary in summaries.items()}
    results = replace(empty, tasks=tasks, scores=scores)
    _check_values(path, name, results, stored_means)
    return results


def _plain(file: Place, name: str) -> dict[str, Any]:
    text = read_text(file)
    if text is None:
        raise InputError(f"{name}={file.parent}: no {RESULTS_FILE} there; give an output of infembed evaluate")
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise InputError(f"{name}={file}: not valid JSON ({in_one_line(error)}); evaluate again") from error
    found = plain.get("format") if isinstance(plain, dict) else None
    if found != FORMAT:
        raise InputError(f"{name}={file}: format is {found!r}, expected {FORMAT!r}; evaluate again")
    return plain


def _check_conventions(file: Place, name: str, found: Mapping[str, str], measures: set[str]) -> None:
    for kind, expected in conventions_of(measures).items():
        if (text := found.get(kind)) != expected:
            raise InputError(
                f"{name}={file}: convention of {kind} is {text!r}, expected {expected!r}: the figures cannot be compared; "
                "evaluate again"
            )


def _rows(file: Place, name: str, schema: pa.Schema) -> pa.Table:
    if not file.is_file():
        raise InputError(f"{name}={file}: no such file, and {RESULTS_FILE} alone is not enough; evaluate again")
    try:
        with open_binary(file) as source:
            return pq.read_table(source).select(schema.names).cast(schema)
    except (pa.ArrowException, KeyError, OSError, ValueError) as error:
        raise InputError(f"{name}={file}: not the values of results ({in_one_line(error)}); evaluate again") from error


def _obedience(file: Place, name: str) -> dict[str, dict[str, dict[str, dict[str, dict[str, float]]]]]:
    """Read the values of the controls: model -> task -> condition -> figure -> query -> value."""
    found: dict[str, Any] = {}
    for condition, model, task, figure, query, _, value in zip(
        *(column.to_pylist() for column in _rows(file, name, OBEDIENCE).columns), strict=True
    ):
        if value is None or not math.isfinite(value):
            raise InputError(
                f"{name}={file}: model {model!r}, query {query!r}: value {value} is not finite; evaluate again"
            )
        of_condition = found.setdefault(model, {}).setdefault(task, {}).setdefault(condition, {})
        of_condition.setdefault(figure, {})[query] = value
    return found


def _write_obedience(file: Path, results: Results) -> None:
    rows = [
        (condition, model, task, figure, query, results.tasks[task].groups.get(query), value)
        for model, of_model in results.obedience.items()
        for task, conditions in of_model.items()
        for condition, scores in conditions.items()
        for figure, values in scores.items()
        for query, value in values.items()
    ]
    pq.write_table(pa.table(list(zip(*rows, strict=True)), schema=OBEDIENCE), file)


def _scores(file: Place, name: str, known: Results) -> tuple[dict[str, dict[str, Scores]], dict[str, dict[str, str]]]:
    """Read all values: model -> task -> figure -> query -> value; and the groups of queries: task -> query -> group."""
    rows = _rows(file, name, PER_QUERY)
    scores: dict[str, dict[str, dict[str, dict[str, float]]]] = {
        model: {task: {figure.name: {} for figure in summary.figures} for task, summary in known.tasks.items()}
        for model in known.models
    }
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for model, task, figure, query, group, value in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        fault, of_figure = "", scores.get(model, {}).get(task, {}).get(figure)
        if value is None or not math.isfinite(value):
            fault = f", query {query!r}: value {value} is not finite"
        elif of_figure is None:
            fault = f": {RESULTS_FILE} has none"
        elif query in of_figure:
            fault = f", query {query!r}: has two values"
        if fault or of_figure is None:
            raise InputError(f"{name}={file}: model {model!r}, task {task!r}, figure {figure!r}{fault}; evaluate again")
        of_figure[query] = value
        if group is not None:
            groups[task][query] = group
    return {model: dict(of_model) for model, of_model in scores.items()}, groups


def _write_per_query(file: Path, results: Results) -> None:
    """Write one row group per model and task, in which repeated names compress well."""
    with pq.ParquetWriter(file, PER_QUERY) as writer:
        for model, of_model in results.scores.items():
            for task, scores in of_model.items():
                groups = results.tasks[task].groups
                rows = [
                    (model, task, figure, query, groups.get(query), value)
                    for figure, values in scores.items()
                    for query, value in values.items()
                ]
                writer.write_table(pa.table(list(zip(*rows, strict=True)) or [()] * len(PER_QUERY), schema=PER_QUERY))


def _check_values(path: Place, name: str, results: Results, stored: Any) -> None:
    """Check that all models have values for the same queries, and that the stored means follow from them."""
    baseline = next(iter(results.scores.values()), {})
    found = results.figures
    for model, of_model in results.scores.items():
        for task, scores in of_model.items():
            for figure, values in scores.items():
                if other := values.keys() ^ baseline[task][figure].keys():
                    raise InputError(
                        f"{name}={path / PER_QUERY_FILE}: task {task!r}, figure {figure!r}: query {min(other)!r} has no "
                        f"value of every model ({model!r} differs); evaluate again"
                    )
                written, mean = stored.get(model, {}).get(task, {}).get(figure), found[model][task][figure]
                if written != mean and (
                    None in (written, mean) or not math.isclose(written, mean or 0.0, abs_tol=_TOLERANCE)
                ):
                    raise InputError(
                        f"{name}={path / RESULTS_FILE}: model {model!r}, task {task!r}, figure {figure!r} is {written}, but its "
                        f"values in {PER_QUERY_FILE} have the mean {mean}; evaluate again"
                    )
