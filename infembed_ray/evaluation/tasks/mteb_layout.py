"""The layout of mteb's retrieval repositories: configurations `corpus`, `queries`, `default`, and sometimes more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.checks import judgements
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.evaluation.tasks.repository import Repository
from infembed_ray.evaluation.tasks.task import Figure, Query, Task

_ID = "_id|id"


def read(repository: Repository) -> Task:
    """Read a repository as a task without figures, which each benchmark adds.

    - `corpus`: `_id`, `title` (may be empty or missing), `text`; `queries`: `_id`, `text`. Ids may also be called `id`.
    - `default` (or `qrels`), split `test`: `query-id`, `corpus-id`, `score`.
    - `instruction`, optional: `query-id`, `instruction`; otherwise a column of that name in `queries`, if there is one.
    - `top_ranked`, optional: `query-id`, `corpus-ids`.

    Raises:
        InputError: a file, a configuration, a column or the instruction of a query is missing; or a query has two
            instructions or lists of candidates.
    """
    corpus = mapped(
        repository.task,
        repository.files("corpus"),
        lambda: ((str(row[_ID]), with_title(row)) for row in repository.rows("corpus", None, (_ID, "text"))),
    )
    instructions = repository.by_query("instruction", ("instruction",)) if "instruction" in repository.configs else None
    queries = []
    for row in repository.rows("queries", None, (_ID, "text")):
        query = str(row[_ID])
        if instructions is not None and query not in instructions:
            raise InputError(f"tasks={repository.task}: query {query} has no row in `instruction`; give it one")
        instruction = (row if instructions is None else instructions[query]).get("instruction")
        queries.append(Query(query, str(row["text"]), instruction or None))
    qrels = "qrels" if "qrels" in repository.configs and "default" not in repository.configs else "default"
    judged = repository.rows(qrels, "test", ("query-id", "corpus-id", "score"))
    candidates: dict[str, list[str]] | None = None
    if "top_ranked" in repository.configs:
        ranked = repository.by_query("top_ranked", (), ("corpus-ids",))
        candidates = {query: [str(document) for document in row["corpus-ids"]] for query, row in ranked.items()}
    return Task(
        name=repository.task,
        corpus=corpus,
        queries=tuple(queries),
        qrels=judgements(repository.task, ((row["query-id"], row["corpus-id"], row["score"]) for row in judged)),
        figures=(),
        candidates=candidates,
    )


def read_instructir(repository: Repository) -> Task:
    """Read InstructIR (Oh et al., 2024): every query under several instructions, each with its own relevant document.

    Query ids are `<query>_<instruction>`: the part before the first `_` is the query's group.
    """
    task = read(repository)
    return replace(
        task,
        queries=tuple(replace(query, group=query.id.partition("_")[0]) for query in task.queries),
        figures=(Figure("Robustness@10", "Robustness@10"), Figure("nDCG@10", "nDCG@10")),
    )


def with_title(row: Mapping[str, Any]) -> str:
    """Return a document's text after its title, if it has one, as mteb and BEIR join them."""
    return f"{row['title']} {row['text']}" if row.get("title") else str(row["text"])
