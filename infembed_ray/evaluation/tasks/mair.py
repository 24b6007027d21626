"""MAIR (Sun et al., 2024): 126 tasks with an instruction for each query."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.checks import judgements
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.evaluation.tasks.repository import Repository
from infembed_ray.evaluation.tasks.task import Figure, Query, Task


def read(queries: Repository, docs: Repository, config: str) -> Task:
    """Read one task, a configuration of two repositories.

    Rows of `queries` have `qid`, `instruction`, `query` and `labels` (`id` and `score` of each relevant document); rows of
    `docs` have `id` and `doc`. A configuration may have several parts with separate corpora: `x_queries` search `x_docs`.
    Their ids get the prefix `x/`, and a query's candidates are the documents of its part. The figure is the mean over all
    queries, as in MAIR's own tables.
    """
    task = queries.task
    query_parts = _parts(queries, config, "queries")
    doc_parts = _parts(docs, config, "docs")
    if set(query_parts) != set(doc_parts):
        raise InputError(
            f"tasks={task}: {config} has the queries of {', '.join(query_parts)} and the documents of {', '.join(doc_parts)}; "
            "fetch both repositories again"
        )
    corpus = mapped(
        task,
        [file for split in doc_parts.values() for file in docs.files(config, split)],
        lambda: _documents(docs, config, doc_parts),
    )
    rows = [
        (part, row)
        for part, split in query_parts.items()
        for row in queries.rows(config, split, ("qid", "instruction", "query"), ("labels",))
    ]
    return Task(
        name=task,
        corpus=corpus,
        queries=tuple(
            Query(f"{part}{row['qid']}", str(row["query"]), row["instruction"] or None) for part, row in rows
        ),
        qrels=judgements(task, _labels(task, rows)),
        figures=(Figure("nDCG@10", "nDCG@10"),),
        candidates=None if len(doc_parts) == 1 else _candidates(rows, corpus["id"].to_pylist(), list(doc_parts)),
    )


def _parts(repository: Repository, config: str, what: str) -> dict[str, str]:
    """Map each part's id prefix to its split: `x/` -> `x_queries`; a single part has no prefix."""
    splits = repository.splits(config)
    return {"" if len(splits) == 1 else split.removesuffix(f"_{what}") + "/": split for split in splits}


def _documents(docs: Repository, config: str, parts: dict[str, str]) -> Iterator[tuple[str, str]]:
    for part, split in parts.items():
        for row in docs.rows(config, split, ("id", "doc")):
            yield f"{part}{row['id']}", str(row["doc"])


def _labels(task: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, str, Any]]:
    for part, row in rows:
        for label in row["labels"]:
            if not isinstance(label, Mapping) or not {"id", "score"} <= label.keys():
                raise InputError(
                    f"tasks={task}: query {row['qid']} has the label {label!r:.60}; a label has an id and a score"
                )
            yield f"{part}{row['qid']}", f"{part}{label['id']}", label["score"]


def _candidates(
    rows: Sequence[tuple[str, dict[str, Any]]], ids: Sequence[str], parts: Sequence[str]
) -> dict[str, Sequence[str]]:
    of_part = {part: [document for document in ids if document.startswith(part)] for part in parts}
    return {f"{part}{row['qid']}": of_part[part] for part, row in rows}
