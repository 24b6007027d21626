"""FollowIR (Weller et al., 2024): does a narrower instruction move documents down that it makes irrelevant?"""

from __future__ import annotations

from dataclasses import replace

from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import Change
from infembed_ray.evaluation.tasks import mteb_layout
from infembed_ray.evaluation.tasks.repository import Repository
from infembed_ray.evaluation.tasks.task import Figure, Task

ORIGINAL, CHANGED = "og", "changed"
"""How the ids of a query's two versions end, and the kinds of the two."""


def read(repository: Repository, measure: str) -> Task:
    """One of its three tasks: candidates are re-ranked, under the original instructions and under the changed ones.

    In the configuration `qrel_diff` stands, by the query's id without its version, which documents are relevant under
    the original instruction and not under the changed one.

    Args:
        repository: in mteb's layout; query ids are `X-og` and `X-changed`.
        measure: that the benchmark reports beside p-MRR, over the original instructions.

    Raises:
        InputError: as `mteb_layout.read`; or a query is neither of the two.
    """
    contents = mteb_layout.read(repository)
    for query in contents.queries:
        if not query.id.endswith((f"-{ORIGINAL}", f"-{CHANGED}")):  # it would count in no figure
            raise InputError(
                f"tasks={repository.task}: query {query.id} ends neither in -{ORIGINAL} nor in -{CHANGED}; "
                "rename or drop it"
            )
    differences = repository.by_query("qrel_diff", (), ("corpus-ids",))
    return Task(
        name=repository.task,
        corpus=contents.corpus,
        queries=tuple(replace(query, kind=query.id.rpartition("-")[2]) for query in contents.queries),
        qrels=contents.qrels,
        figures=(Figure("p-MRR", "p-MRR"), Figure(measure, measure, kind=ORIGINAL)),
        changes=tuple(
            Change(f"{query}-{ORIGINAL}", f"{query}-{CHANGED}", tuple(str(document) for document in row["corpus-ids"]))
            for query, row in differences.items()
        ),
        candidates=contents.candidates,
    )
