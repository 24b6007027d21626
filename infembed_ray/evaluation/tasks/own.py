"""Collections that are no published task: directories in the layout of mteb, BEIR or TREC, repositories of the hub, ir_datasets.

What a collection has decides what it measures: `qrel_diff` gives p-MRR, as of FollowIR; one query under several instructions
gives Robustness@10, as of InstructIR.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from infembed_ray.errors import InputError, in_one_line
from infembed_ray.evaluation.tasks import followir, mteb_layout, trec
from infembed_ray.evaluation.tasks.checks import judgements
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.evaluation.tasks.registry import IR_DATASETS
from infembed_ray.evaluation.tasks.repository import Directory, Repository
from infembed_ray.evaluation.tasks.task import ROBUSTNESS, Figure, Query, Task
from infembed_ray.records.tables import FORMATS
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import open_input

MEASURES = ("nDCG@10", "recall@100", "MAP@1000", "MRR@10")
"""Figures of a collection, beside p-MRR and Robustness@10, if the settings give no measures."""


def read(name: str) -> Task:
    """Read a collection as a task whose only figure is p-MRR (with a measure of its kind of queries) or Robustness@10.

    Args:
        name: a directory, or its URI in an object store: with `topics` in TREC's formats (`trec.read`), else as
            `read_repository`; the file of the judgements of another split than `test`; or `ir_datasets:ID`.

    Raises:
        InputError: a file or a column is missing, or a value is not usable.
    """
    if name.startswith(IR_DATASETS):
        return _grouped(_of_ir_datasets(name))
    root, split = _located(name)
    parts = trec.parts(root)
    if "topics" in parts:
        return _grouped(trec.read(name, parts))
    return read_repository(Directory(root, name), split)


def read_repository(repository: Repository, split: str = "test") -> Task:
    """Read a repository or a directory in mteb's or BEIR's layout; see `mteb_layout.read`.

    With `qrel_diff` it is read as FollowIR (`followir.read`). Queries without a judgement in the split are left out.
    """
    if "qrel_diff" in repository.configs:
        return followir.read(repository, MEASURES[0])
    task = mteb_layout.read(repository, split)
    return _grouped(replace(task, queries=tuple(query for query in task.queries if query.id in task.qrels)))


def files(name: str) -> list[Place]:
    """Return the files that `read` reads.

    Raises:
        InputError: one of them is missing.
    """
    if name.startswith(IR_DATASETS):
        return []
    root, split = _located(name)
    parts = trec.parts(root)
    if "topics" in parts:
        return [file for part in parts.values() for file in part]
    return mteb_layout.files(Directory(root, name), split)


def _located(name: str) -> tuple[Place, str]:
    """Return the directory and the split of a path or a URI."""
    given = open_input(name, "tasks") if is_uri(name) else Path(name).expanduser().absolute()
    return (given.parent.parent, given.stem) if given.suffix in FORMATS else (given, "test")


def _grouped(task: Task) -> Task:
    """Make groups of queries with one text, if the data have none; add Robustness@10 if there are groups."""
    queries = task.queries
    if not any(query.group for query in queries):
        asked: dict[str, list[Query]] = defaultdict(list)
        for query in queries:
            asked[query.query].append(query)
        several = {text: own[0].id for text, own in asked.items() if len({str(query.instruction) for query in own}) > 1}
        queries = tuple(replace(query, group=several.get(query.query)) for query in queries)
    grouped = any(query.group for query in queries)
    return replace(task, queries=queries, figures=(Figure(ROBUSTNESS, ROBUSTNESS),) if grouped else ())


def _of_ir_datasets(name: str) -> Task:
    """Read a data set of ir_datasets; the narratives of TREC's topics are their instructions."""
    if find_spec("ir_datasets") is None:
        raise InputError(f"tasks={name}: ir_datasets is not installed; pip install 'infembed-ray[ir-datasets]'")
    import ir_datasets

    try:
        dataset = ir_datasets.load(name.removeprefix(IR_DATASETS))
        if missing := [what for what in ("docs", "queries", "qrels") if not getattr(dataset, f"has_{what}")()]:
            raise InputError(f"tasks={name}: this data set has no {missing[0]}; name one of its parts that has")
        qrels = judgements(name, ((row.query_id, row.doc_id, row.relevance) for row in dataset.qrels_iter()))
        queries = [
            Query(query.query_id, query.default_text(), getattr(query, "narrative", None) or None)
            for query in dataset.queries_iter()
            if query.query_id in qrels
        ]
        version = f"{name} {dataset.docs_count()}"
        corpus = mapped(name, [version], lambda: ((doc.doc_id, doc.default_text()) for doc in dataset.docs_iter()))
    except KeyError as error:
        raise InputError(
            f"tasks={name}: ir_datasets has no such data set; https://ir-datasets.com lists them"
        ) from error
    except (OSError, RuntimeError) as error:
        raise InputError(f"tasks={name}: ir_datasets cannot provide it ({in_one_line(error)[:300]})") from error
    return Task(name=name, corpus=corpus, queries=tuple(queries), qrels=qrels, figures=())
