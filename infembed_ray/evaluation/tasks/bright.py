"""BRIGHT (Su et al., 2024): retrieval that requires reasoning, in twelve subsets."""

from __future__ import annotations

from infembed_ray.evaluation.tasks.checks import judgements
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.evaluation.tasks.repository import Repository
from infembed_ray.evaluation.tasks.task import Figure, Query, Task

NONE = "N/A"
"""The only item of an empty list, as the data set writes it."""


def read(repository: Repository, subset: str) -> Task:
    """Read one subset, a split of the configurations `documents` (`id`, `content`) and `examples`.

    An example has `id`, `query`, `gold_ids` (relevant documents) and `excluded_ids` (documents that are never ranked for
    it, such as the source of the query).
    """
    task = repository.task
    columns = ("id", "content")
    examples = list(repository.rows("examples", subset, ("id", "query"), ("gold_ids", "excluded_ids")))
    excluded = {str(example["id"]): frozenset(map(str, example["excluded_ids"])) - {NONE} for example in examples}
    return Task(
        name=task,
        corpus=mapped(
            task,
            repository.files("documents", subset),
            lambda: ((str(row["id"]), str(row["content"])) for row in repository.rows("documents", subset, columns)),
        ),
        queries=tuple(Query(str(example["id"]), str(example["query"])) for example in examples),
        qrels=judgements(task, ((e["id"], document, 1) for e in examples for document in e["gold_ids"])),
        figures=(Figure("nDCG@10", "nDCG@10"),),
        excluded={query: documents for query, documents in excluded.items() if documents},
    )
