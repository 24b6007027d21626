"""BRIGHT (Su et al., 2024): questions whose answers need reasoning to be found, in twelve subsets."""

from __future__ import annotations

from infembed_ray.evaluation.tasks.checks import judgements
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.evaluation.tasks.repository import Repository
from infembed_ray.evaluation.tasks.task import Figure, Query, Task

NONE = "N/A"
"""The one item of a list that is empty, as the data set writes it."""


def read(repository: Repository, subset: str) -> Task:
    """One subset, a split of the configurations `documents` (`id`, `content`) and `examples`.

    Of an example are read `id`, `query`, `gold_ids` (the relevant documents) and `excluded_ids` (documents that never
    stand in its ranking, such as the query itself).
    """
    documents = mapped(
        repository.task,
        repository.files("documents", subset),
        lambda: (
            (str(row["id"]), str(row["content"])) for row in repository.rows("documents", subset, ("id", "content"))
        ),
    )
    examples = list(repository.rows("examples", subset, ("id", "query"), ("gold_ids", "excluded_ids")))
    excluded = {str(example["id"]): frozenset(map(str, example["excluded_ids"])) - {NONE} for example in examples}
    return Task(
        name=repository.task,
        corpus=documents,
        queries=tuple(Query(str(example["id"]), str(example["query"])) for example in examples),
        qrels=judgements(
            repository.task, ((example["id"], document, 1) for example in examples for document in example["gold_ids"])
        ),
        figures=(Figure("nDCG@10", "nDCG@10"),),
        excluded={query: documents for query, documents in excluded.items() if documents},
    )
