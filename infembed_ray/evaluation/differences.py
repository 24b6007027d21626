"""The queries on which models differ most, with their instructions and first passages: a section of `report.html`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from infembed_ray.evaluation.metrics import Run, ranks
from infembed_ray.evaluation.results import Results
from infembed_ray.evaluation.search import rows_of
from infembed_ray.evaluation.tasks.task import Figure, Query, Task

QUERIES = 10
"""Shown values of each figure; a value of p-MRR or Robustness belongs to several queries."""
PASSAGES = 5
"""First passages of each model that are shown, and first relevant ones. Those that decide p-MRR are all shown."""
PASSAGE_CHARACTERS = 600
"""Characters of a shown passage; longer ones are cut."""


@dataclass(frozen=True)
class RankedPassage:
    """A passage with its rank under each model."""

    id: str
    text: str
    relevance: int
    """The judgement, 0 without one."""
    changed: bool
    """Whether a change of the query's instruction is about it: its ranks under both instructions decide p-MRR."""
    ranks: Mapping[str, int | None]
    """Label of the model -> rank; None if it is not among the kept ones."""


@dataclass(frozen=True)
class Difference:
    """A value of a figure that differs between models, and the queries that it belongs to."""

    task: str
    figure: str
    values: Mapping[str, float]
    """Label of the model -> value."""
    queries: tuple[tuple[Query, tuple[RankedPassage, ...]], ...]
    """One; for p-MRR the original and the changed one, for Robustness@k the group."""

    @property
    def json(self) -> str:
        """The values, for the page's script."""
        return json.dumps(self.values)


class Differences:
    """Keeps the ranks of all models that the report may show: ids only, for each query."""

    def __init__(self) -> None:
        self._ranks: dict[str, dict[str, dict[str, dict[str, int]]]] = defaultdict(dict)

    def add(self, model: str, task: Task, run: Run) -> None:
        """Take the rankings of one model for all queries of a task."""
        kept = {}
        for query in task.queries:
            rank_of, judged = ranks(run.get(query.id, {})), task.qrels.get(query.id, {})
            relevant = islice((document for document in rank_of if judged.get(document, 0) > 0), PASSAGES)
            shown = {*islice(rank_of, PASSAGES), *relevant, *(_changed(task, query.id) & rank_of.keys())}
            kept[query.id] = {document: rank_of[document] for document in shown}
        self._ranks[task.name][model] = kept

    def largest(self, tasks: Sequence[Task], results: Results) -> list[Difference]:
        """Return the values of each figure that differ most between models, largest first; none of a single model."""
        return [
            Difference(
                task.name,
                figure.name,
                {model: results.scores[model][task.name][figure.name][key] for model in results.models},
                tuple((query, self._passages(task, query)) for query in _queries_of(task, figure, key)),
            )
            for task in tasks
            for figure in task.figures
            for key in _most_different(results, task.name, figure.name)
        ]

    def _passages(self, task: Task, query: Query) -> tuple[RankedPassage, ...]:
        of_models = {model: kept[query.id] for model, kept in self._ranks[task.name].items()}
        rank_of = {
            document: [kept.get(document) for kept in of_models.values()]
            for ranked in of_models.values()
            for document in ranked
        }
        ids = sorted(rank_of, key=lambda document: (min(filter(None, rank_of[document])), document))
        changed, judged = _changed(task, query.id), task.qrels.get(query.id, {})
        (rows,) = rows_of(task.corpus["id"], [ids])
        text_of = {task.corpus["id"][row].as_py(): task.corpus["text"][row].as_py() for row in rows.tolist()}
        return tuple(
            RankedPassage(
                document,
                text_of.get(document, "")[:PASSAGE_CHARACTERS],
                judged.get(document, 0),
                document in changed,
                dict(zip(of_models, rank_of[document], strict=True)),
            )
            for document in ids
        )


def _most_different(results: Results, task: str, figure: str) -> list[str]:
    values = [of_model[task][figure] for of_model in results.scores.values()]
    spread = {key: max(v[key] for v in values) - min(v[key] for v in values) for key in values[0]}
    return sorted((key for key in spread if spread[key] > 0), key=lambda key: (-spread[key], key))[:QUERIES]


def _queries_of(task: Task, figure: Figure, key: str) -> Iterator[Query]:
    changed = {change.changed for change in task.changes if figure.measure == "p-MRR" and change.original == key}
    for query in task.queries:
        if query.id == key or query.id in changed or (figure.measure.startswith("Robustness@") and query.group == key):
            yield query


def _changed(task: Task, query: str) -> set[str]:
    return {d for change in task.changes if query in (change.original, change.changed) for d in change.documents}
