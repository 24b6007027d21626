"""MAIR (Sun et al., 2024): 126 tasks, each query with an instruction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.checks import judgements
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.evaluation.tasks.repository import Repository
from infembed_ray.evaluation.tasks.task import Figure, Query, Task


def read(queries: Repository, docs: Repository, config: str) -> Task:
    """One task: a configuration of two repositories.

    Rows of `queries`: `qid`, `instruction`, `query`, `labels` (`id` and `score` of each relevant document); of `docs`:
    `id`, `doc`. A configuration may have several parts, each with a corpus of its own: `x_queries` are asked of
    `x_docs`. Then ids begin with `x/`, and the candidates of a query are the documents of its part. The figure is the
    mean over all queries, as in MAIR's own tables.
    """
    task = queries.task
    asked = _parts(queries, config, "queries")
    searched = _parts(docs, config, "docs")
    if set(asked) != set(searched):
        raise InputError(
            f"tasks={task}: {config} has the queries of {', '.join(asked)} and the documents of {', '.join(searched)}; "
            "fetch both repositories anew"
        )
    corpus = mapped(
        task,
        [file for split in searched.values() for file in docs.files(config, split)],
        lambda: _documents(docs, config, searched),
    )
    rows = [
        (part, row)
        for part, split in asked.items()
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
        candidates=None if len(searched) == 1 else _candidates(rows, corpus["id"].to_pylist(), list(searched)),
    )


def _parts(repository: Repository, config: str, what: str) -> dict[str, str]:
    """How ids of a part begin -> its split: `x/` -> `x_queries`; where there is one part only, the empty string."""
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
