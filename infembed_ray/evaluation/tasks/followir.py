"""FollowIR (Weller et al., 2024): a narrower instruction should lower the ranks of documents that it makes irrelevant."""

from __future__ import annotations

from dataclasses import replace

from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import Change
from infembed_ray.evaluation.tasks import mteb_layout
from infembed_ray.evaluation.tasks.repository import Repository
from infembed_ray.evaluation.tasks.task import Figure, Task

ORIGINAL, CHANGED = "og", "changed"
"""Suffixes of the ids of a query's two versions, and their kinds."""


def read(repository: Repository, measure: str) -> Task:
    """Read one of the three tasks, in which candidates are re-ranked under original and changed instructions.

    The configuration `qrel_diff` lists, by query id without version, the documents that are relevant under the original
    instruction only.

    Args:
        repository: in mteb's layout; query ids are `X-og` and `X-changed`.
        measure: the benchmark's measure beside p-MRR, over the original instructions.

    Raises:
        InputError: as `mteb_layout.read`; or a query id has neither suffix.
    """
    task = mteb_layout.read(repository)
    for query in task.queries:
        if not query.id.endswith((f"-{ORIGINAL}", f"-{CHANGED}")):  # it would count in no figure
            raise InputError(
                f"tasks={task.name}: query {query.id} ends neither in -{ORIGINAL} nor in -{CHANGED}; rename or drop it"
            )
    differences = repository.by_query("qrel_diff", (), ("corpus-ids",))
    return replace(
        task,
        queries=tuple(replace(query, kind=query.id.rpartition("-")[2]) for query in task.queries),
        figures=(Figure("p-MRR", "p-MRR"), Figure(measure, measure, kind=ORIGINAL)),
        changes=tuple(
            Change(f"{query}-{ORIGINAL}", f"{query}-{CHANGED}", tuple(map(str, row["corpus-ids"])))
            for query, row in differences.items()
        ),
    )
