"""InstructIR (Oh et al., 2024): every query under several instructions, each with its own right document."""

from __future__ import annotations

from dataclasses import replace

from infembed_ray.evaluation.tasks import mteb_layout
from infembed_ray.evaluation.tasks.repository import Repository
from infembed_ray.evaluation.tasks.task import Figure, Task


def read(repository: Repository) -> Task:
    """Its one task. Query ids are `<query>_<instruction>`: what stands before the first `_` is the query's group."""
    contents = mteb_layout.read(repository)
    return Task(
        name=repository.task,
        corpus=contents.corpus,
        queries=tuple(replace(query, group=query.id.partition("_")[0]) for query in contents.queries),
        qrels=contents.qrels,
        figures=(Figure("Robustness@10", "Robustness@10"), Figure("nDCG@10", "nDCG@10")),
        candidates=contents.candidates,
    )
