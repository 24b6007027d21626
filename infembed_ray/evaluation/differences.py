"""The queries on which models differ most, with their instructions and first passages: a section of `report.html`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from infembed_ray.evaluation.metrics import Run, ranks
from infembed_ray.evaluation.results import Results
from infembed_ray.evaluation.search import rows_of
from infembed_ray.evaluation.tasks.task import OF_GROUPS, Query, Task

VALUES = 10
"""Shown values of each figure; a value of p-MRR or Robustness belongs to several queries."""
PASSAGES = 5
"""First passages of each model that are shown, and first relevant ones; all that decide p-MRR are shown."""
CHARACTERS = 600
"""Characters of a shown passage."""

Kept = Mapping[str, Mapping[str, int]]
"""Query -> passage that may be shown -> its 1-based rank under one model."""


@dataclass(frozen=True)
class RankedPassage:
    """A passage, with its rank under each model; None if it is not among the model's kept ones."""

    id: str
    text: str
    remark: str
    """`relevant`, `relevant under the other instruction`, or empty."""
    ranks: Mapping[str, int | None]


@dataclass(frozen=True)
class Difference:
    """A value of a figure that differs between models."""

    task: str
    figure: str
    values: Mapping[str, float]
    """Label of the model -> value, not scaled by 100."""
    queries: Sequence[tuple[Query, Sequence[RankedPassage]]]
    """The queries that it belongs to: for p-MRR the original and the changed one, for a measure of groups all of one."""


def keep(task: Task, run: Run) -> Kept:
    """Reduce the rankings of one model to the passages that the report may show."""
    changed, kept = _changed(task), {}
    for query, judged in task.qrels.items():
        rank_of = ranks(run.get(query, {}))
        relevant = islice((document for document in rank_of if judged.get(document, 0) > 0), PASSAGES)
        shown = {*islice(rank_of, PASSAGES), *relevant, *(changed.get(query, set()) & rank_of.keys())}
        kept[query] = {document: rank_of[document] for document in shown}
    return kept


def largest(task: Task, results: Results, kept: Mapping[str, Kept]) -> list[Difference]:
    """Return the values of each figure with the largest spread between models, largest first; none of a single model.

    Args:
        kept: model -> what `keep` returned for the task.
    """
    changed = _changed(task)
    pairs = {change.original: (change.original, change.changed) for change in task.changes}
    differences = []
    for figure in task.figures:
        values = {model: of_model[task.name][figure.name] for model, of_model in results.scores.items()}
        every = {key: [of_model[key] for of_model in values.values()] for key in next(iter(values.values()))}
        spread = {key: max(of_key) - min(of_key) for key, of_key in every.items() if len(set(of_key)) > 1}
        for key in sorted(spread, key=lambda key: (-spread[key], key))[:VALUES]:
            asked = pairs[key] if figure.measure == "p-MRR" else (key,)
            grouped = figure.measure.startswith(OF_GROUPS)
            queries = [q for q in task.queries if (q.group == key if grouped else q.id in asked)]
            shown = [(query, _passages(task, query.id, kept, changed.get(query.id, set()))) for query in queries]
            of_models = {model: of_model[key] for model, of_model in values.items()}
            differences.append(Difference(task.name, figure.name, of_models, shown))
    return differences


def _passages(task: Task, query: str, kept: Mapping[str, Kept], changed: set[str]) -> list[RankedPassage]:
    """Return the kept passages of all models, by their best rank."""
    best = sorted((rank, document) for of_model in kept.values() for document, rank in of_model[query].items())
    documents = list(dict.fromkeys(document for _, document in best))
    (rows,) = rows_of(task.corpus["id"], [documents])
    text_of = {task.corpus["id"][row].as_py(): task.corpus["text"][row].as_py() for row in rows.tolist()}
    passages = []
    for document in documents:
        other = "relevant under the other instruction" if document in changed else ""
        remark = "relevant" if task.qrels[query].get(document, 0) > 0 else other
        rank_of = {model: of_model[query].get(document) for model, of_model in kept.items()}
        passages.append(RankedPassage(document, text_of.get(document, "")[:CHARACTERS], remark, rank_of))
    return passages


def _changed(task: Task) -> dict[str, set[str]]:
    """Return query -> documents whose relevance a change of its instruction takes away."""
    changed: dict[str, set[str]] = {}
    for change in task.changes:
        for query in (change.original, change.changed):
            changed.setdefault(query, set()).update(change.documents)
    return changed
