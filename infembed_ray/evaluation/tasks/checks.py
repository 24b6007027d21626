"""Checks of every task, whatever its layout, before any work starts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.task import Task

HIGHEST = 1_000_000
"""Maximum score of a judgement: trec_eval counts documents per score and silently gives up above its limit."""


def judgements(task: str, rows: Iterable[tuple[Any, Any, Any]]) -> dict[str, dict[str, int]]:
    """Collect judgements, each a query id, a document id and a score, as qrels; InputError for scores that contradict."""
    qrels: dict[str, dict[str, int]] = defaultdict(dict)
    for query, document, score in rows:
        where = f"qrels: document {document} of query {query}"
        try:
            grade = float(score)
        except (TypeError, ValueError):
            grade = float("nan")
        if not (grade == grade // 1 and grade <= HIGHEST):  # false for NaN
            raise InputError.of(
                "tasks", task, f"{where} has the score {score}", f"scores are whole numbers up to {HIGHEST:,}"
            )
        if qrels[str(query)].setdefault(str(document), int(grade)) != grade:
            raise InputError.of("tasks", task, f"{where} has two scores", "keep one")
    return dict(qrels)


def checked(task: Task) -> Task:
    """Return the task if it can be evaluated; InputError otherwise."""

    def require(faulty: Iterable[str], what: str, fault: str, remedy: str) -> None:
        """Raise the error of the first faulty id and the number of the others: `query 3 and 12 others`."""
        if ids := list(faulty):
            others = f" and {len(ids) - 1} other{'s' * (len(ids) > 2)}" if len(ids) > 1 else ""
            raise InputError.of("tasks", task.name, fault.format(f"{what} {ids[0]}{others}"), remedy)

    if not task.queries:
        raise InputError.of("tasks", task.name, "no queries", "give at least one")
    queries = Counter(query.id for query in task.queries)
    require((query for query, count in queries.items() if count > 1), "id", "two queries have the {}", "rename one")
    require((q.id for q in task.queries if not q.query.strip()), "query", "{} is empty", "write it or drop it")
    for query in task.queries:
        if not isinstance(query.instruction, str | None):
            fault = f"query {query.id} has the instruction {query.instruction!r:.60}"
            raise InputError.of("tasks", task.name, fault, "write it as text")
    require(
        (q for q in task.qrels if q not in queries), "query", "qrels name {}, not in queries", "drop these judgements"
    )
    require((q for q in queries if not task.qrels.get(q)), "query", "{} without judgements", "judge or drop it")
    if task.candidates is not None:
        candidates = task.candidates
        require((q for q in queries if not candidates.get(q)), "query", "{} without candidates", "give some or drop it")
    named = [query for change in task.changes for query in (change.original, change.changed)]
    absent = (query for query in named if query not in queries)
    require(absent, "query", "the changed judgements need {}, not in queries", "give them, or drop the changes")

    lists = {id(documents): documents for documents in (task.candidates or {}).values()}  # queries may share one
    for field, ids in {
        "qrels": [document for judged in task.qrels.values() for document in judged],
        "changed judgements": [document for change in task.changes for document in change.documents],
        "candidates": [document for documents in lists.values() for document in documents],
    }.items():
        documents = pa.array(ids, pa.string()).unique()
        present = task.corpus["id"].filter(pc.is_in(task.corpus["id"], value_set=documents))  # a table of few ids
        unknown = documents.filter(pc.invert(pc.is_in(documents, value_set=present))).to_pylist()
        remedy = "is the corpus whole? Add the documents, or drop what names them"
        require(unknown, "document", f"{field} name {{}}, not in the corpus", remedy)
    relevant = {query: [d for d, score in judged.items() if score > 0] for query, judged in task.qrels.items()}
    for asked, excluded in task.excluded.items():
        both = (document for document in relevant[asked] if document in excluded)
        require(both, "document", f"query {asked} excludes relevant {{}}", "correct one list")
    empty = set(task.corpus["id"].filter(pc.equal(task.corpus["text"], "")).to_pylist())
    blank = (document for documents in relevant.values() for document in documents if document in empty)
    require(blank, "document", "relevant {} without text", "add the text")
    return task
