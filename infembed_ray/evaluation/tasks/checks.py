"""Checks of every task, whatever its layout, before any work starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.task import Task

HIGHEST = 1_000_000
"""Maximum score of a judgement: trec_eval counts documents per score and silently gives up above its limit."""


def judgements(task: str, rows: Iterable[tuple[Any, Any, Any]]) -> dict[str, dict[str, int]]:
    """Collect judgements, each a query id, a document id and a score, as qrels.

    Raises:
        InputError: a score is not a whole number or above `HIGHEST`, or a document has two scores for one query.
    """
    qrels: dict[str, dict[str, int]] = defaultdict(dict)
    for query, document, score in rows:
        where = f"tasks={task}: qrels: document {document} of query {query}"
        try:
            grade = float(score)
        except (TypeError, ValueError):
            grade = float("nan")
        if not (grade == grade // 1 and grade <= HIGHEST):  # false for NaN
            raise InputError(f"{where} has the score {score}; scores are whole numbers up to {HIGHEST:,}")
        if qrels[str(query)].setdefault(str(document), int(grade)) != grade:
            raise InputError(f"{where} has two scores; keep one")
    return dict(qrels)


def checked(task: Task) -> Task:
    """Return the task if it can be evaluated.

    Raises:
        InputError: there are no queries; a query id is not unique; a query is empty, or has no judgements or candidates;
            an instruction is not a text; judgements, candidates or changes name unknown queries or documents; a relevant
            document is excluded or empty.
    """
    where = f"tasks={task.name}"
    queries = _unique_queries(task)
    if unknown := [query for query in task.qrels if query not in queries]:
        raise InputError(f"{where}: qrels name {_some('query', unknown)}, not in queries; drop these judgements")
    if unjudged := [query.id for query in task.queries if not task.qrels.get(query.id)]:
        raise InputError(f"{where}: {_some('query', unjudged)} without judgements; judge or drop it")
    candidates = task.candidates
    if candidates is not None and (without := [q.id for q in task.queries if not candidates.get(q.id)]):
        raise InputError(f"{where}: {_some('query', without)} without candidates; give some or drop it")
    for change in task.changes:
        if absent := [query for query in (change.original, change.changed) if query not in queries]:
            raise InputError(f"{where}: the changed judgements need {_some('query', absent)}, not in queries")
    _known_documents(task)
    for query, excluded in task.excluded.items():
        if both := [document for document, score in task.qrels[query].items() if score > 0 and document in excluded]:
            raise InputError(f"{where}: query {query} excludes relevant {_some('document', both)}; correct one list")
    empty = set(task.corpus["id"].filter(pc.equal(task.corpus["text"], "")).to_pylist())
    relevant = (document for judged in task.qrels.values() for document, score in judged.items() if score > 0)
    if blank := [document for document in relevant if document in empty]:
        raise InputError(f"{where}: relevant {_some('document', blank)} without text; add the text")
    return task


def _unique_queries(task: Task) -> set[str]:
    if not task.queries:
        raise InputError(f"tasks={task.name}: no queries; give at least one")
    queries: set[str] = set()
    for query in task.queries:
        if query.id in queries:
            raise InputError(f"tasks={task.name}: two queries have the id {query.id}; rename one")
        if not query.query.strip():
            raise InputError(f"tasks={task.name}: query {query.id} is empty; write it or drop it")
        if not isinstance(query.instruction, str | None):
            raise InputError(
                f"tasks={task.name}: query {query.id} has the instruction {query.instruction!r:.60}; write it as text"
            )
        queries.add(query.id)
    return queries


def _known_documents(task: Task) -> None:
    ids = task.corpus["id"]
    for field, ids_named in _named(task):
        documents = pa.array(ids_named, pa.string()).unique()
        present = ids.filter(pc.is_in(ids, value_set=documents))  # the reverse would build a table of all ids
        if unknown := documents.filter(pc.invert(pc.is_in(documents, value_set=present))).to_pylist():
            raise InputError(
                f"tasks={task.name}: {field} name {_some('document', unknown)}, not in the corpus; is the corpus whole? "
                "Add the documents, or drop what names them"
            )


def _named(task: Task) -> Iterator[tuple[str, list[str]]]:
    """Yield each field that names documents, with the documents."""
    yield "qrels", [document for judged in task.qrels.values() for document in judged]
    yield "changed judgements", [document for change in task.changes for document in change.documents]
    lists = {id(documents): documents for documents in (task.candidates or {}).values()}  # queries may share one
    yield "candidates", [document for documents in lists.values() for document in documents]


def _some(what: str, ids: list[str]) -> str:
    """Name the first id and count the others: `query 3 and 12 others`."""
    others = len(ids) - 1
    return f"{what} {ids[0]}" + (f" and {others} other{'s' * (others > 1)}" if others else "")
