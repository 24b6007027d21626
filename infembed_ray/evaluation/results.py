"""The published results of an evaluation: every figure, the values it is the mean of, and the conventions that made it.

Two files in one directory:

- `results.json`: the format, how each measure was computed, what the tasks and the models are, and all means.
- `per_query.parquet`: one row a value, `PER_QUERY`, from which the means follow.

Figures that were computed in different ways cannot be compared, so `read` refuses what this version would compute otherwise.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from infembed_ray import storage
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.evaluation.metrics import CONVENTIONS
from infembed_ray.evaluation.scoring import Scores, means
from infembed_ray.evaluation.tasks.task import Figure, Task

RESULTS_FILE = "results.json"
PER_QUERY_FILE = "per_query.parquet"
FORMAT = "infembed-results/1"

PER_QUERY = pa.schema(
    [(name, pa.string()) for name in ("model", "task", "figure", "query", "group")] + [("value", pa.float64())]
)
"""`query` is what the figure is a mean over: a query's id, of p-MRR the original query's, of Robustness@k the group's.
Queries of a `group` are not independent of one another, so statistics resample groups."""
_KEY = ("model", "task", "figure", "query")
_TOLERANCE = 1e-9
"""Between a mean in `results.json` and that of its values: sums of floats depend on their order."""


@dataclass(frozen=True)
class Asked:
    """A task, as its results tell of it."""

    figures: tuple[Figure, ...]
    """The main one first."""
    groups: Mapping[str, str]
    """Query id -> group; a query that is not named is independent of all others."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Data set, revision, counts."""
    content: str = ""
    """Hash of its texts and judgements: results can be compared where it is equal."""

    @classmethod
    def of(cls, task: Task, content: str) -> Asked:
        """What remains of a task when its texts are gone."""
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
    """What one evaluation found."""

    tasks: Mapping[str, Asked]
    """By name, in the order of the tables."""
    models: Mapping[str, Mapping[str, Any]]
    """Label -> what the model is. The first is the baseline."""
    scores: Mapping[str, Mapping[str, Scores]]
    """Label -> task -> figure -> query -> value; all tasks and figures of every model."""
    depth: int
    """Most documents of a ranking."""

    @property
    def measures(self) -> set[str]:
        """Of all figures."""
        return {figure.measure for asked in self.tasks.values() for figure in asked.figures}

    @property
    def figures(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """Label -> task -> figure -> mean; None where it is a mean over nothing."""
        return {
            model: {task: means(scores) for task, scores in of_model.items()} for model, of_model in self.scores.items()
        }


def conventions_of(measures: set[str]) -> dict[str, str]:
    """How rankings and these measures come about, by the measure's name without its cut-off."""
    kinds = {measure.partition("@")[0] for measure in measures}
    return {kind: text for kind, text in CONVENTIONS.items() if kind == "ranking" or kind in kinds}


def write(directory: Path, results: Results) -> None:
    """Write both files into a directory that is being published."""
    _write_per_query(directory / PER_QUERY_FILE, results)
    plain = {
        "format": FORMAT,
        "conventions": conventions_of(results.measures),
        "depth": results.depth,
        "baseline": next(iter(results.models)),
        "tasks": {
            name: {
                "figures": [{"name": f.name, "measure": f.measure, "kind": f.kind} for f in asked.figures],
                "about": dict(asked.about),
                "content": asked.content,
            }
            for name, asked in results.tasks.items()
        },
        "models": {label: dict(about) for label, about in results.models.items()},
        "figures": results.figures,
    }
    storage.write_json(directory / RESULTS_FILE, plain)


def read(path: Path, name: str = "results") -> Results:
    """Results from the directory that holds both files.

    Args:
        path: a published output of `infembed evaluate` or `infembed sweep`.
        name: the setting that gives it, for errors.

    Raises:
        InputError: a file is missing or no such file; its format or one of its conventions is not that of this version;
            a value is missing, given twice or no number; a mean is not that of its values.
    """
    file = path / RESULTS_FILE
    plain = _plain(file, name)
    try:
        tasks = {
            task: (
                [Figure(f["name"], f["measure"], f["kind"]) for f in stored["figures"]],
                stored["about"],
                stored["content"],
            )
            for task, stored in plain["tasks"].items()
        }
        stored_means, models, depth = plain["figures"], plain["models"], int(plain["depth"])
        _check_conventions(
            file, name, plain["conventions"], {f.measure for figures, *_ in tasks.values() for f in figures}
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name}={file}: damaged ({in_one_line(error)}); evaluate again") from error
    rows = _rows(path / PER_QUERY_FILE, name)
    scores: dict[str, dict[str, dict[str, dict[str, float]]]] = {
        model: {task: {figure.name: {} for figure in figures} for task, (figures, *_) in tasks.items()}
        for model in models
    }
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    columns = [rows.column(column).to_pylist() for column in PER_QUERY.names]
    for model, task, figure, query, group, value in zip(*columns, strict=True):
        try:
            scores[model][task][figure][query] = value
        except KeyError:
            known = f"model {model!r}, task {task!r}, figure {figure!r}"
            raise InputError(f"{name}={path / PER_QUERY_FILE}: {RESULTS_FILE} has no {known}; evaluate again") from None
        if group is not None:
            groups[task][query] = group
    asked = {task: Asked(tuple(f), groups[task], about, content) for task, (f, about, content) in tasks.items()}
    results = Results(asked, models, scores, depth)
    _check_values(path, name, results, stored_means)
    return results


def _check_conventions(file: Path, name: str, found: Mapping[str, str], measures: set[str]) -> None:
    unknown = sorted(m for m in measures if m.partition("@")[0] not in CONVENTIONS)
    if unknown:
        raise InputError(f"{name}={file}: measure {unknown[0]!r} is unknown to this version; evaluate again")
    for kind, expected in conventions_of(measures).items():
        if (text := found.get(kind)) != expected:
            raise InputError(
                f"{name}={file}: convention of {kind} is {text!r}, expected {expected!r}: the figures cannot be compared; "
                "evaluate again"
            )


def _plain(file: Path, name: str) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(
            f"{name}={file.parent}: no results there (no {RESULTS_FILE}); give an output of infembed evaluate"
        )
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{name}={file}: not valid JSON ({in_one_line(error)}); evaluate again") from error
    found = plain.get("format") if isinstance(plain, dict) else None
    if found != FORMAT:
        raise InputError(f"{name}={file}: format is {found!r}, expected {FORMAT!r}; evaluate again")
    return plain


def _write_per_query(file: Path, results: Results) -> None:
    """One row group a model and task: labels and names then take no room."""
    with pq.ParquetWriter(file, PER_QUERY) as writer:
        for model, of_model in results.scores.items():
            for task, scores in of_model.items():
                groups = results.tasks[task].groups
                tables = [
                    pa.table(
                        {
                            "model": list(repeat(model, len(values))),
                            "task": list(repeat(task, len(values))),
                            "figure": list(repeat(figure, len(values))),
                            "query": list(values),
                            "group": [groups.get(query) for query in values],
                            "value": list(values.values()),
                        },
                        schema=PER_QUERY,
                    )
                    for figure, values in scores.items()
                ]
                writer.write_table(pa.concat_tables(tables))


def _rows(file: Path, name: str) -> pa.Table:
    if not file.is_file():
        raise InputError(f"{name}={file}: no such file, {RESULTS_FILE} alone is not enough; evaluate again")
    try:
        rows = pq.read_table(file).select(PER_QUERY.names).cast(PER_QUERY)
    except (pa.ArrowException, KeyError, OSError, ValueError) as error:
        raise InputError(f"{name}={file}: not the values of results ({in_one_line(error)}); evaluate again") from error
    broken = pc.indices_nonzero(pc.invert(pc.fill_null(pc.is_finite(rows["value"]), False)))
    if len(broken):
        row = rows.slice(broken[0].as_py(), 1).to_pylist()[0]
        raise InputError(f"{name}={file}: {_where(row)}: value {row['value']} is no number; evaluate again")
    counted = rows.group_by(list(_KEY)).aggregate([("value", "count")])
    twice = counted.filter(pc.greater(counted["value_count"], 1))
    if twice.num_rows:
        raise InputError(f"{name}={file}: {_where(twice.slice(0, 1).to_pylist()[0])}: stands twice; evaluate again")
    return rows


def _where(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{column} {row[column]!r}" for column in _KEY)


def _check_values(path: Path, name: str, results: Results, stored: Any) -> None:
    """All models have values for the same queries, and the stored means are those of the values."""
    baseline = next(iter(results.scores.values()), {})
    found = results.figures
    for model, of_model in results.scores.items():
        for task, scores in of_model.items():
            for figure, values in scores.items():
                other = values.keys() ^ baseline[task][figure].keys()
                if other:
                    raise InputError(
                        f"{name}={path / PER_QUERY_FILE}: task {task!r}, figure {figure!r}: query {min(other)!r} has no "
                        f"value of every model ({model!r} differs); evaluate again"
                    )
                told, mean = stored.get(model, {}).get(task, {}).get(figure), found[model][task][figure]
                if told != mean and (told is None or mean is None or not math.isclose(told, mean, abs_tol=_TOLERANCE)):
                    raise InputError(
                        f"{name}={path / RESULTS_FILE}: model {model!r}, task {task!r}, figure {figure!r} is {told}, but its "
                        f"values in {PER_QUERY_FILE} have the mean {mean}; evaluate again"
                    )
