"""The layout of mteb's retrieval repositories: configurations `corpus`, `queries`, `default`, and sometimes more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import Qrels
from infembed_ray.evaluation.tasks.checks import judgements
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.evaluation.tasks.repository import Repository
from infembed_ray.evaluation.tasks.task import Query

_ID = "_id|id"


@dataclass(frozen=True)
class Contents:
    """What one repository holds."""

    corpus: pa.Table
    queries: tuple[Query, ...]
    qrels: Qrels
    candidates: Mapping[str, Sequence[str]] | None


def read(repository: Repository) -> Contents:
    """All of a repository but what only its benchmark has.

    - `corpus`: `_id`, `title` (may be empty or missing), `text`; `queries`: `_id`, `text`; ids may also be called `id`.
    - `default` (or `qrels`), split `test`: `query-id`, `corpus-id`, `score`.
    - `instruction`, if it is there: `query-id`, `instruction`; else a column of that name in `queries`, if it has one.
    - `top_ranked`, if it is there: `query-id`, `corpus-ids`.

    Raises:
        InputError: a file, a configuration, a column or the instruction of a query is missing; or a query has two
            instructions or lists of candidates.
    """
    corpus = mapped(
        repository.task,
        repository.files("corpus"),
        lambda: ((str(row[_ID]), titled(row)) for row in repository.rows("corpus", None, (_ID, "text"))),
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
    return Contents(
        corpus,
        tuple(queries),
        judgements(repository.task, ((row["query-id"], row["corpus-id"], row["score"]) for row in judged)),
        candidates,
    )


def titled(row: Mapping[str, Any]) -> str:
    """A document's text, after its title if it has one, as mteb and BEIR join them."""
    return f"{row['title']} {row['text']}" if row.get("title") else str(row["text"])
