"""Retrieval tasks, independent of the benchmark: their data, the checks of them, and the values of a ranking."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import lcm
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import Change, Qrels, Run, p_mrr, right_rank, robustness, trec_measures
from infembed_ray.progress import say
from infembed_ray.storage.places import Place

ROBUSTNESS = "Robustness@10"
PAIRED = "paired accuracy"
OF_GROUPS = ("Robustness@", PAIRED)
"""How the measures with a value per group of queries begin."""
CORPUS = pa.schema([("id", pa.string()), ("text", pa.string())])
HIGHEST = 1_000_000
"""Maximum score of a judgement: trec_eval counts documents per score and silently gives up above its limit."""

Scores = Mapping[str, Mapping[str, float]]
"""Figure -> query, or group for Robustness@k -> value, not scaled by 100."""

Obedience = Mapping[str, Scores]
"""Condition of the obedience controls -> figure -> query -> value."""


@dataclass(frozen=True)
class Query:
    """A query with at most one instruction."""

    id: str
    query: str
    instruction: str | None = None
    kind: str = ""
    """The task's name for queries of this kind; a figure can be restricted to one kind."""
    group: str | None = None
    """Shared by queries that are not independent, such as one query under several instructions. Robustness@k is over
    groups, and statistics resample whole groups."""


@dataclass(frozen=True)
class Figure:
    """A number of the tables: the mean of a measure over a task's queries, or over those of one kind."""

    name: str
    """Unique in the task: `nDCG@10 (I+,Q+)`."""
    measure: str
    """A name of `metrics`: `nDCG@10`, `recall@100`, `MRR@10`, `Robustness@10`, `p-MRR`, `right rank@10`, `paired accuracy`."""
    kind: str | None = None
    """Restricts the figure to queries of this kind; not for p-MRR, over changes, and for measures of groups."""


@dataclass(frozen=True)
class Task:
    """A corpus, queries and relevance judgements."""

    name: str
    """Its name in `tasks` and in tables: `followir/core17`."""
    corpus: pa.Table
    """(m) `CORPUS`, with unique ids. It may be memory-mapped and is never copied as a whole."""
    queries: tuple[Query, ...]
    qrels: Qrels
    """Judgements for every query; all documents are in the corpus."""
    figures: tuple[Figure, ...]
    """The main figure is the first."""
    changes: tuple[Change, ...] = ()
    candidates: Mapping[str, Sequence[str]] | None = None
    """Query id -> the documents to rank for it; None: the whole corpus."""
    excluded: Mapping[str, AbstractSet[str]] = field(default_factory=dict)
    """Query id -> documents that are never ranked for it."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Further facts for the result file: repositories, revisions, counts."""
    corpus_file: Place = Path()
    """File of the corpus that all nodes can map into memory, once it is shared (`chunks.share`)."""

    def has_candidates(self, depth: int) -> bool:
        """Whether its candidates are a ranking to re-rank. Longer lists are the part of the corpus a query is about."""
        return self.candidates is not None and max(map(len, self.candidates.values())) <= depth


# -------------------------------------------------------------------------------------------------------------- checks


def judgements(task: str, rows: Iterable[tuple[Any, Any, Any]], published: bool = False) -> dict[str, dict[str, int]]:
    """Collect judgements, each a query id, a document id and a score, as qrels; InputError for scores that contradict.

    Of a published set, the highest of several scores counts, and fractions are scaled to whole numbers: nDCG does not change.
    """
    grades: dict[str, dict[str, Fraction]] = defaultdict(dict)
    for query, document, score in rows:
        where = f"qrels: document {document} of query {query}"
        try:
            grade = Fraction(float(score)).limit_denominator(1000 if published else 1 << 60)
        except (TypeError, ValueError, OverflowError):
            grade = Fraction(HIGHEST + 1)
        if grade > HIGHEST or not (published or grade.denominator == 1):
            remedy = f"scores are whole numbers up to {HIGHEST:,}"
            raise InputError.of("tasks", task, f"{where} has the score {score}", remedy)
        known = grades[str(query)].setdefault(str(document), grade)
        if known != grade and not published:
            raise InputError.of("tasks", task, f"{where} has two scores", "keep one")
        grades[str(query)][str(document)] = max(known, grade)
    scale = lcm(*(grade.denominator for judged in grades.values() for grade in judged.values()))
    return {query: {d: int(grade * scale) for d, grade in judged.items()} for query, judged in grades.items()}


def checked(task: Task, published: bool = False) -> Task:
    """Return the task if it can be evaluated; InputError otherwise.

    Of a published task, what cannot be reached is left out or kept as mteb does, and counted in `about`.
    """
    if published:
        task = _reachable(task)

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
    no_text = (q.id for q in task.queries if not isinstance(q.instruction, str | None))
    require(no_text, "query", "the instruction of {} is no text", "write it as text")
    unasked = (q for q in task.qrels if q not in queries)
    require(unasked, "query", "qrels name {}, not in queries", "drop these judgements")
    require((q for q in queries if not task.qrels.get(q)), "query", "{} without judgements", "judge or drop it")
    if task.candidates is not None:
        candidates = task.candidates
        require((q for q in queries if not candidates.get(q)), "query", "{} without candidates", "give some or drop it")
    named = [query for change in task.changes for query in (change.original, change.changed)]
    absent = (query for query in named if query not in queries)
    require(absent, "query", "the changed judgements need {}, not in queries", "give them, or drop the changes")
    if task.changes and not published:
        of_query = {query.id: query for query in task.queries}
        if not any(query.instruction for query in task.queries):
            raise InputError.of("tasks", task.name, "no query has an instruction, and qrel_diff needs two", "give them")
        other = (c.changed for c in task.changes if of_query[c.original].query != of_query[c.changed].query)
        require(other, "query", "{} has another text than its original", "a change is of the instruction alone")
        never = (d for c in task.changes for d in c.documents if task.qrels[c.original].get(d, 0) <= 0)
        require(never, "document", "qrel_diff names {}, never relevant to the original query", "correct the judgements")

    lists = {id(documents): documents for documents in (task.candidates or {}).values()}  # queries may share one
    for part, ids in {
        "qrels": [] if published else [document for judged in task.qrels.values() for document in judged],
        "changed judgements": [document for change in task.changes for document in change.documents],
        "candidates": [document for documents in lists.values() for document in documents],
    }.items():
        remedy = "is the corpus whole? Add the documents, or drop what names them"
        require(_unknown(task, ids), "document", f"{part} name {{}}, not in the corpus", remedy)
    relevant = {query: [d for d, score in judged.items() if score > 0] for query, judged in task.qrels.items()}
    for asked, excluded in task.excluded.items():
        both = (document for document in relevant[asked] if document in excluded)
        require(both, "document", f"query {asked} excludes relevant {{}}", "correct one list")
    empty = set(task.corpus["id"].filter(pc.equal(task.corpus["text"], "")).to_pylist())
    blank = (document for documents in relevant.values() for document in documents if document in empty)
    if published and (count := len(set(blank))):
        return replace(task, about={**task.about, "relevant_documents_without_text": count})
    require(blank, "document", "relevant {} without text", "add the text")
    return task


def _unknown(task: Task, ids: Iterable[str]) -> list[str]:
    """Return those of some documents that the corpus lacks."""
    documents = pa.array(ids, pa.string()).unique()
    present = task.corpus["id"].filter(pc.is_in(task.corpus["id"], value_set=documents))  # a table of few ids
    return documents.filter(pc.invert(pc.is_in(documents, value_set=present))).to_pylist()


def _reachable(task: Task) -> Task:
    """Return a task without judgements of absent queries, unjudged queries, and absent candidates and changed documents.

    Judgements of documents that the corpus lacks stay: as in mteb, they lower the recall of every model.
    """
    lists = {id(documents): documents for documents in (task.candidates or {}).values()}  # queries may share one
    named = {document for judged in task.qrels.values() for document in judged}
    named |= {document for change in task.changes for document in change.documents}
    named |= {document for documents in lists.values() for document in documents}
    asked, lost = {query.id for query in task.queries}, set(_unknown(task, named))
    queries = tuple(query for query in task.queries if task.qrels.get(query.id))
    about = {
        "judgements_of_absent_queries": sum(len(judged) for query, judged in task.qrels.items() if query not in asked),
        "judgements_of_absent_documents": sum(len(judged.keys() & lost) for judged in task.qrels.values()),
        "queries_without_judgements": len(task.queries) - len(queries),
    }
    if not (lost or any(about.values())):
        return task
    told = ", ".join(f"{count} {fact.replace('_', ' ')}" for fact, count in about.items() if count)
    say(f"warning: {task.name}: {told or 'candidates or changed documents that the corpus lacks'}")
    kept = {query.id for query in queries}
    left = {key: [document for document in own if document not in lost] for key, own in lists.items()}
    return replace(
        task,
        queries=queries,
        qrels={query: judged for query, judged in task.qrels.items() if query in asked},
        candidates=task.candidates and {query: left[id(own)] for query, own in task.candidates.items()},
        changes=tuple(
            replace(change, documents=tuple(document for document in change.documents if document not in lost))
            for change in task.changes
            if kept >= {change.original, change.changed}
        ),
        about={**task.about, **{fact: count for fact, count in about.items() if count}},
    )


def without_identical(task: Task, leave_out: bool) -> Task:
    """Return a task that never ranks the document with a query's own id, which is the query itself.

    Without `leave_out`, report that there are such documents.
    """
    asked = [query.id for query in task.queries]
    same = set(asked).difference(_unknown(task, asked))
    same -= {query for query in same if task.qrels[query].get(query, 0) > 0}
    if not same:
        return task
    if not leave_out:
        remedy = "if it is the query, set ignore_identical_ids=true"
        say(f"{task.name}: {len(same)} queries have the id of a document; {remedy}")
        return task
    excluded = {query: task.excluded.get(query, frozenset()) | {query} for query in same}
    about = {**task.about, "identical_ids_left_out": len(same)}
    return replace(task, excluded={**task.excluded, **excluded}, about=about)


# -------------------------------------------------------------------------------------------------------------- values


def score(task: Task, run: Run) -> dict[str, dict[str, float]]:
    """Compute the values whose means are the task's figures.

    p-MRR has a value per changed query, under the id of the original query; Robustness@k and paired accuracy one per group;
    all other measures one per query, also for queries without a ranking in `run`.
    """
    kinds = {query.id: query.kind for query in task.queries}
    groups = {query.id: query.group for query in task.queries if query.group is not None}
    qrels = {q: task.qrels[q] for q in kinds}
    of_query = {f.measure: f.measure.replace("Robustness", "nDCG").replace(PAIRED, "right rank") for f in task.figures}
    plain = {measure for measure in of_query.values() if not measure.startswith(("p-MRR", "right rank"))}
    trec = trec_measures(qrels, run, sorted(plain))
    scores: dict[str, dict[str, float]] = {}
    for figure in task.figures:
        measure = of_query[figure.measure]
        if measure == "p-MRR":
            scores[figure.name] = p_mrr(task.changes, run)
            continue
        values = {q: trec[q][measure] for q in trec} if measure in plain else right_rank(qrels, run, measure)
        counted = {q: value for q, value in values.items() if figure.kind in (None, kinds[q])}
        scores[figure.name] = robustness(values, groups) if figure.measure.startswith(OF_GROUPS) else counted
    return scores


def averaged(several: Sequence[Scores]) -> dict[str, dict[str, float]]:
    """Average each value over several scores of the same queries."""
    return {
        figure: {query: fmean(scores[figure][query] for scores in several) for query in values}
        for figure, values in several[0].items()
    }


def means(scores: Scores) -> dict[str, float | None]:
    """Average each figure; None if it has no values."""
    return {name: fmean(values.values()) if values else None for name, values in scores.items()}
