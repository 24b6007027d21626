"""Pages of an evaluation output: the queries on which two models differ most, with both rankings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field

from infembed_ray.errors import InputError, in_one_line
from infembed_ray.evaluation import rankings, results
from infembed_ray.records.tables import read_raw
from infembed_ray.storage.places import Place
from infembed_ray.view.parquet import open_dataset, scan

QUERIES = 10
"""Values of a page; a value of p-MRR or Robustness belongs to several queries."""
PASSAGES = 10
"""First passages that are shown of either ranking, and relevant passages beyond them. Those that decide p-MRR are all shown."""

Order = Literal["largest", "b", "a"]


class DifferencesQuery(BaseModel):
    """Which models, task and figure to compare; None takes the first one, and for `b` the second model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str | None = None
    figure: str | None = None
    a: str | None = None
    b: str | None = None
    order: Order = "largest"
    """The largest differences first, only those where b is better, or only those where a is better."""
    page: int = Field(1, ge=1, le=1_000_000)


class Differences:
    """The results of an evaluation or a sweep. An output of an older version, or of a sweep, has no rankings.

    Raises:
        InputError: the results are damaged.
    """

    query = DifferencesQuery

    def __init__(self, directory: Place) -> None:
        self._results = results.read(directory, "DIR")
        self._queries: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        self._rankings = self._passages = None
        if all((directory / name).is_file() for name in (rankings.RANKINGS_FILE, rankings.PASSAGES_FILE)):
            try:
                for row in read_raw(directory / rankings.QUERIES_FILE):
                    self._queries[row["task"]][row["query"]] = row
                self._rankings = open_dataset(directory / rankings.RANKINGS_FILE)
                self._passages = open_dataset(directory / rankings.PASSAGES_FILE)
            except (pa.ArrowException, OSError) as error:
                raise InputError(f"DIR={directory}: not readable ({in_one_line(error)}); evaluate again") from error

    def page(self, asked: DifferencesQuery) -> dict[str, Any]:
        """Return one page of queries with both rankings, the means of the two models, and what can be chosen.

        Raises:
            InputError: there is no such model, task or figure.
        """
        models, tasks = list(self._results.models), self._results.tasks
        task = _chosen("task", asked.task, list(tasks))
        figures = {figure.name: figure.measure for figure in tasks[task].figures}
        figure = _chosen("figure", asked.figure, list(figures))
        a, b = _chosen("a", asked.a, models), _chosen("b", asked.b, [*models[1:], models[0]])
        values = {model: self._results.scores[model][task][figure] for model in (a, b)}
        changes = {key: values[b][key] - value for key, value in values[a].items()}
        keys = ordered(changes, asked.order)
        shown = keys[(asked.page - 1) * QUERIES : asked.page * QUERIES]
        queries = {key: self._queries_of(task, key, figures[figure]) for key in shown}
        ranked = self._ranked(task, a, b, [query["query"] for found in queries.values() for query in found])
        return {
            "chosen": {"task": task, "figure": figure, "a": a, "b": b},
            "choices": {"task": list(tasks), "figure": list(figures), "a": models, "b": models},
            "means": {side: fmean(values[m].values()) if values[m] else None for side, m in (("a", a), ("b", b))},
            "counts": {
                "queries": len(changes),
                "a": sum(change < 0 for change in changes.values()),
                "b": sum(change > 0 for change in changes.values()),
            },
            "depth": rankings.DEPTH,
            "rankings": self._rankings is not None,
            "pages": -(-len(keys) // QUERIES),
            "rows": [
                {
                    "key": key,
                    "a": values[a][key],
                    "b": values[b][key],
                    "queries": [{**query, "passages": ranked[query["query"]]} for query in queries[key]],
                }
                for key in shown
            ],
        }

    def _queries_of(self, task: str, key: str, measure: str) -> list[dict[str, Any]]:
        """Return the queries of a value: one, for p-MRR the original and the changed one, for Robustness the group."""
        queries = self._queries[task]
        if measure.startswith("Robustness@"):
            return [query for query in queries.values() if query["group"] == key]
        changed = [q for q in queries.values() if q.get("original") == key] if measure == "p-MRR" else []
        return [queries[key], *changed] if key in queries else []

    def _ranked(self, task: str, a: str, b: str, queries: Sequence[str]) -> Mapping[str, list[dict[str, Any]]]:
        """Return for each query the first passages of both models and the relevant ones, by their rank under b."""
        found: dict[str, dict[str, dict[str, Any]]] = {query: {} for query in queries}
        if self._rankings is None or self._passages is None:
            return {query: [] for query in queries}
        of_task = pc.field("task") == task
        wanted = of_task & pc.field("model").isin([a, b]) & pc.field("query").isin(pa.array(queries, pa.string()))
        for row in scan(self._rankings, self._rankings.schema.names, wanted).to_pylist():
            passage = found[row["query"]].setdefault(
                row["passage"], {"id": row["passage"], "a": None, "b": None, "relevance": row["relevance"]}
            )
            passage["changed"] = row.get("changed", False)
            passage |= {side: row["rank"] for side, model in (("a", a), ("b", b)) if row["model"] == model}
        shown = {query: _first(list(passages.values())) for query, passages in found.items()}
        ids = {passage["id"] for passages in shown.values() for passage in passages}
        wanted = of_task & pc.field("passage").isin(pa.array(list(ids), pa.string()))
        texts = scan(self._passages, ["passage", "text"], wanted)
        text_of = dict(zip(*(column.to_pylist() for column in texts.columns), strict=True))
        return {query: [{**p, "text": text_of.get(p["id"])} for p in passages] for query, passages in shown.items()}


def ordered(changes: Mapping[str, float], order: Order) -> list[str]:
    """Sort the keys of differences b - a, the largest first; ties by key. `a` and `b` keep only what is better there."""
    sign = {"largest": 0, "a": -1, "b": 1}[order]
    kept = [key for key, change in changes.items() if not sign or change * sign > 0]
    return sorted(kept, key=lambda key: (-abs(changes[key]), key))


def _first(passages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    def rank(passage: Mapping[str, Any], side: str) -> float:
        return float("inf") if passage[side] is None else float(passage[side])

    kept = [p for p in passages if p["changed"] or min(rank(p, "a"), rank(p, "b")) <= PASSAGES]
    relevant = sorted((p for p in passages if p["relevance"] > 0 and p not in kept), key=lambda p: rank(p, "b"))
    return sorted([*kept, *relevant[:PASSAGES]], key=lambda p: (rank(p, "b"), rank(p, "a")))


def _chosen(name: str, value: str | None, valid: Sequence[str]) -> str:
    if value is None:
        return valid[0]
    if value not in valid:
        raise InputError(f"{name}={value}: not in these results; choose one of {', '.join(valid)}")
    return value
