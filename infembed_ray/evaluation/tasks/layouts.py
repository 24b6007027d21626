"""Readers of the layouts that collections are published in: mteb, BEIR, MAIR, BRIGHT, ExcluIR.

What a collection has decides what it measures: `qrel_diff` gives p-MRR, as in FollowIR; one query under several instructions
gives Robustness@10, as in InstructIR.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from infembed_ray.evaluation.metrics import Change
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.evaluation.tasks.repository import Repository
from infembed_ray.evaluation.tasks.task import PAIRED, ROBUSTNESS, Figure, Query, Task, judgements
from infembed_ray.records.files import BadRow, BadRows, mapped_rows, stem_of
from infembed_ray.records.tables import Passage, document, mapping, text_of
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.places import read_json
from infembed_ray.storage.steps import find_input

MEASURES = ("nDCG@10", "recall@100", "MAP@1000", "MRR@10")
"""Figures of your own collection, beside p-MRR and Robustness@10, if the settings give no measures."""
ORIGINAL, CHANGED = "og", "changed"
"""Suffixes of the ids of FollowIR's two versions of a query, and their kinds."""
_ID = "id|_id"
_JUDGED = ("query-id|query_id|qid", "corpus-id|corpus_id|docid|doc-id|doc_id", "score|relevance|rel")
_NDCG = Figure("nDCG@10", "nDCG@10")


# ------------------------------------------------------------------------------------------------ mteb, BEIR


def read_mteb(repository: Repository, split: str = "test") -> Task:
    """Read a repository in mteb's or BEIR's layout as a task without figures.

    - `corpus`: `_id` (or `id`), `title` (optional), `text`; `queries`: `_id`, `text`, `group` (optional, see `Query`).
    - `default` (or `qrels`), the given split or the only one: `query-id`, `corpus-id`, `score`.
    - `instruction`, optional: `query-id`, `instruction`; otherwise a column of that name in `queries`, if there is one.
    - `top_ranked`, optional: `query-id`, `corpus-ids`.
    """
    instructions = repository.by_query("instruction", "instruction") if "instruction" in repository.configs else None
    queries = []
    for row in repository.rows("queries", None, (_ID, "text")):
        query = row["id"]
        if instructions is not None and query not in instructions:
            raise repository.fault(f"query {query} has no row in `instruction`", "give it one")
        instruction = row.get("instruction") if instructions is None else instructions[query]
        group = text_of(row.get("group"), "group")
        given = None if instruction != instruction else instruction  # NaN
        queries.append(Query(query, row["text"], given or None, group=group or None))
    config = "qrels" if "qrels" in repository.configs and "default" not in repository.configs else "default"
    judged = repository.rows(config, split, _JUDGED)
    candidates = repository.by_query("top_ranked", "corpus-ids") if "top_ranked" in repository.configs else None
    qrels = judgements(repository.task, ((row["query-id"], row["corpus-id"], row["score"]) for row in judged))
    corpus = _corpus(repository, "corpus", None)
    return Task(repository.task, corpus, tuple(queries), qrels, figures=(), candidates=candidates)


def read_judged(repository: Repository, split: str = "test") -> Task:
    """Read a repository as `read_mteb`, without the queries that have no judgement in the split."""
    task = read_mteb(repository, split)
    return replace(task, queries=tuple(query for query in task.queries if query.id in task.qrels))


def _corpus(repository: Repository, config: str, split: str | None, columns: dict[str, str] | None = None) -> pa.Table:
    """Return the corpus of a split: documents as `infembed index` reads them, but their texts may be empty.

    Args:
        columns: as `tables.mapping` takes them.
    """

    def documents() -> Iterator[tuple[str, str]]:
        for file in repository.files(config, split):
            names_of = partial(mapping, row=Passage, path=file, name="tasks", columns=columns or {})
            for number, values, names in mapped_rows(file, repository.bad, names_of):
                try:
                    yield document(values, names, empty=True)
                except BadRow as fault:
                    repository.bad.add(file, number, fault, values)
        repository.bad.check()

    return mapped(repository.task, repository.files(config, split), documents, repository.bad)


# ------------------------------------------------------------------------------------- published benchmarks


def read_followir(repository: Repository, measure: str, language: str = "") -> Task:
    """Read a task of FollowIR (Weller et al., 2024): candidates are re-ranked under original and changed instructions.

    Query ids are `X-og` and `X-changed`. The configuration `qrel_diff` lists by X the documents that are relevant under the
    original instruction only. `measure`, next to p-MRR, is over the original instructions. In mFollowIR the configurations of
    a language end in its name: `corpus-fas`.
    """
    if language:
        configs, ending = repository.configs, f"-{language}"
        repository.configs = {name.removesuffix(ending): configs[name] for name in configs if name.endswith(ending)}
    task = read_mteb(repository)
    for query in task.queries:
        if not query.id.endswith((f"-{ORIGINAL}", f"-{CHANGED}")):  # it would count in no figure
            fault = f"query {query.id} ends neither in -{ORIGINAL} nor in -{CHANGED}"
            raise repository.fault(fault, "rename or drop it")
    differences = repository.by_query("qrel_diff", "corpus-ids")
    return replace(
        task,
        queries=tuple(replace(query, kind=query.id.rpartition("-")[2]) for query in task.queries),
        figures=(Figure("p-MRR", "p-MRR"), Figure(measure, measure, kind=ORIGINAL)),
        changes=tuple(
            Change(f"{query}-{ORIGINAL}", f"{query}-{CHANGED}", tuple(documents))
            for query, documents in differences.items()
        ),
    )


def read_instructir(repository: Repository) -> Task:
    """Read InstructIR (Oh et al., 2024): every query under several instructions, each with its own relevant document.

    Query ids are `<query>_<instruction>`: the part before the first `_` is the query's group.
    """
    return replace(_grouped_by_id(read_mteb(repository)), figures=(Figure(ROBUSTNESS, ROBUSTNESS), _NDCG))


def read_measured(
    repository: Repository, measure: str, instruction: str | None = None, levels: Sequence[str] = ()
) -> Task:
    """Read a task whose figure is one measure: IFIR (Song et al., 2025), BRIGHT-Pro (Zhao et al., 2026).

    Queries without an instruction get `instruction`. IFIR's query ids name one of `levels`; each level has its own figure.
    """
    task = read_judged(repository)
    level_of = {query.id: next((level for level in levels if level in query.id), "") for query in task.queries}
    return replace(
        task,
        queries=tuple(replace(q, instruction=q.instruction or instruction, kind=level_of[q.id]) for q in task.queries),
        figures=(Figure(measure, measure), *(Figure(f"{measure} {level}", measure, level) for level in levels)),
    )


def read_nevir(repository: Repository) -> Task:
    """Read NevIR (Weller et al., 2024): pairs of queries about a pair of documents, each with its own relevant one.

    Query ids are `<pair>_q1` and `<pair>_q2`. The other query's document is judged irrelevant.
    """
    task = _grouped_by_id(read_judged(repository))
    of_pair: dict[str | None, dict[str, int]] = defaultdict(dict)
    for query in task.queries:
        of_pair[query.group] |= dict.fromkeys(task.qrels[query.id], 0)
    qrels = {query.id: {**of_pair[query.group], **task.qrels[query.id]} for query in task.queries}
    return replace(task, qrels=qrels, figures=(Figure(PAIRED, PAIRED),))


def read_excluir(repository: Repository, download: str) -> Task:
    """Read ExcluIR (Zhang et al., 2024) from its authors' files: `corpus.json`, a list of passages, and
    `test_manual_final.json`: `ExcluQ` (the query) and `index`, the numbers of the passage that it excludes and of the relevant one.
    """
    repository.remedy = f"download it from {download}"
    repository.configs = {"corpus": {"": ["corpus.json"]}, "queries": {"": ["test_manual_final.json"]}}
    rows = list(repository.rows("queries", None, ("query|ExcluQ|RQ_rewrite", "index|corpus_sub_index")))
    labels = ((f"q{n}", passage, int(at > 0)) for n, row in enumerate(rows) for at, passage in enumerate(row["index"]))
    files = repository.files("corpus")
    return Task(
        name=repository.task,
        corpus=mapped(repository.task, files, lambda: ((str(n), text) for n, text in enumerate(read_json(files[0])))),
        queries=tuple(Query(f"q{n}", row["query"]) for n, row in enumerate(rows)),
        qrels=judgements(repository.task, labels, published=True),
        figures=tuple(Figure(name, name) for name in ("right rank@10", "recall@1", "MRR@10")),
    )


def read_bright(repository: Repository, subset: str) -> Task:
    """Read a subset of BRIGHT (Su et al., 2024), a split of `documents` (`id`, `content`) and of `examples`: `id`, `query`,
    `gold_ids` (relevant documents), `excluded_ids` (never ranked for it, such as the source of the query).
    """
    examples = list(repository.rows("examples", subset, ("id", "query", "gold_ids", "excluded_ids")))
    excluded = {e["id"]: frozenset(map(str, e["excluded_ids"])) - {"N/A"} for e in examples}  # of none
    return Task(
        name=repository.task,
        corpus=_corpus(repository, "documents", subset, {"text": "content", "title": ""}),
        queries=tuple(Query(example["id"], example["query"]) for example in examples),
        qrels=judgements(repository.task, ((e["id"], document, 1) for e in examples for document in e["gold_ids"])),
        figures=(_NDCG,),
        excluded={query: documents for query, documents in excluded.items() if documents},
    )


def read_mair(queries: Repository, docs: Repository, config: str) -> Task:
    """Read a task of MAIR (Sun et al., 2024): `queries` (`qid`, `instruction`, `query`, `labels` with `id` and `score`) and
    `docs` (`id`, `doc`).
    """
    rows = list(queries.rows(config, None, ("qid", "instruction", "query", "labels")))
    labels = [(row["qid"], label) for row in rows for label in row["labels"]]
    for query, label in labels:
        if not isinstance(label, Mapping) or not {"id", "score"} <= label.keys():
            raise queries.fault(f"query {query} has the label {label!r:.60}", "a label has an id and a score")
    return Task(
        name=queries.task,
        corpus=_corpus(docs, config, None, {"text": "doc", "title": ""}),
        queries=tuple(Query(row["qid"], row["query"], row["instruction"] or None) for row in rows),
        qrels=judgements(queries.task, ((q, label["id"], label["score"]) for q, label in labels), published=True),
        figures=(_NDCG,),
    )


def _grouped_by_id(task: Task) -> Task:
    """Group the queries by the part of their ids before the first `_`."""
    return replace(task, queries=tuple(replace(query, group=query.id.partition("_")[0]) for query in task.queries))


# ------------------------------------------------------------------------------------------ your own collections


def read_own(name: str, reject: bool = False) -> tuple[Task, list[BadRows]]:
    """Read a collection that is no published task, and return its bad rows: a directory in mteb's or BEIR's layout, or its
    URI in an object store; or the file of the judgements of another split than `test`. `reject` leaves out bad rows.
    """
    given = find_input(name, "tasks") if is_uri(name) else Path(name).expanduser().absolute()
    split = stem_of(given.name) if given.is_file() else "test"
    repository = Repository(given.parent.parent if given.is_file() else given, name, reject=reject)
    return read_repository(repository, split), [repository.bad]


def read_repository(repository: Repository, split: str = "test") -> Task:
    """Read a repository or a directory in mteb's or BEIR's layout; with `qrel_diff` it is read as FollowIR.

    Queries with one text are a group, if the data have no groups. Groups have Robustness@10.
    """
    if "qrel_diff" in repository.configs:
        return read_followir(repository, MEASURES[0])
    task = read_judged(repository, split)
    queries = task.queries
    if not any(query.group for query in queries):
        same_text: dict[str, list[Query]] = defaultdict(list)
        for query in queries:
            same_text[query.query].append(query)
        groups = {text: own[0].id for text, own in same_text.items() if len({str(q.instruction) for q in own}) > 1}
        queries = tuple(replace(query, group=groups.get(query.query)) for query in queries)
    grouped = any(query.group for query in queries)
    return replace(task, queries=queries, figures=(Figure(ROBUSTNESS, ROBUSTNESS),) if grouped else ())
