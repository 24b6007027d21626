"""The layout of mteb's retrieval repositories: configurations `corpus`, `queries`, `default`, and sometimes more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.checks import judgements
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.evaluation.tasks.repository import Repository
from infembed_ray.evaluation.tasks.task import ROBUSTNESS, Figure, Query, Task
from infembed_ray.storage.places import Place

_ID = "_id|id"


def read(repository: Repository, split: str = "test") -> Task:
    """Read a repository as a task without figures, which each benchmark adds.

    - `corpus`: `_id`, `title` (may be empty or missing), `text`; `queries`: `_id`, `text`. Ids may also be called `id`.
    - `default` (or `qrels`), the given split or the only one: `query-id`, `corpus-id`, `score`.
    - `instruction`, optional: `query-id`, `instruction`; otherwise a column of that name in `queries`, if there is one.
    - `top_ranked`, optional: `query-id`, `corpus-ids`.
    - a column `group` of `queries`, optional: see `Query`.

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
        group = None if row.get("group") is None else str(row["group"])
        queries.append(Query(query, str(row["text"]), instruction or None, group=group))
    judged = repository.rows(_judgements(repository), split, ("query-id", "corpus-id", "score"))
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


def files(repository: Repository, split: str = "test") -> list[Place]:
    """Return the files of a task, also of FollowIR's `qrel_diff`."""
    further = [config for config in ("instruction", "top_ranked", "qrel_diff") if config in repository.configs]
    configs = ("corpus", "queries", _judgements(repository), *further)
    return [file for config in configs for file in repository.files(config, split)]


def _judgements(repository: Repository) -> str:
    return "qrels" if "qrels" in repository.configs and "default" not in repository.configs else "default"


def read_instructir(repository: Repository) -> Task:
    """Read InstructIR (Oh et al., 2024): every query under several instructions, each with its own relevant document.

    Query ids are `<query>_<instruction>`: the part before the first `_` is the query's group.
    """
    task = read(repository)
    return replace(
        task,
        queries=tuple(replace(query, group=query.id.partition("_")[0]) for query in task.queries),
        figures=(Figure(ROBUSTNESS, ROBUSTNESS), Figure("nDCG@10", "nDCG@10")),
    )


def with_title(row: Mapping[str, Any]) -> str:
    """Return a document's text after its title, if it has one, as mteb and BEIR join them."""
    return f"{row['title']} {row['text']}" if row.get("title") else str(row["text"])
