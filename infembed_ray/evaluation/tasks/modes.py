"""Published protocols that differ from ours, as changes of a task: `followir/core17@mteb1` is judged as in mteb 1.

catalogue.yaml lists the modes of each benchmark; docs/reproduction.md has their table and sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from infembed_ray.evaluation.tasks.followir import CHANGED, ORIGINAL
from infembed_ray.evaluation.tasks.task import Task


def _swap_judgements(task: Task) -> dict[str, Any]:
    other = {ORIGINAL: CHANGED, CHANGED: ORIGINAL}
    parted = {query: query.rpartition("-") for query in task.qrels}
    return {"qrels": {query: task.qrels[f"{stem}-{other[kind]}"] for query, (stem, _, kind) in parted.items()}}


def _instruct(task: Task, **instructions: str) -> dict[str, Any]:
    """Give every query the instruction of its subset; `others` is that of subsets without their own."""
    subset = task.name.rpartition("/")[2].partition("@")[0]
    instruction = instructions.get(subset, instructions["others"]).format(subset=subset)
    queries = tuple(replace(query, instruction=instruction) for query in task.queries)
    return {"queries": queries, "about": {**task.about, "instruction": instruction}}


DIFFERENCES: Mapping[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "swapped_judgements": ("original queries judged by the changed judgements, and the reverse", _swap_judgements),
    "both_versions": (
        "MAP and nDCG over original and changed queries together",
        lambda task: {"figures": tuple(replace(figure, kind=None) for figure in task.figures)},
    ),
    "whole_corpus": ("every query ranks the whole corpus, not its candidates", lambda task: {"candidates": None}),
    "ranked_exclusions": ("excluded documents are ranked", lambda task: {"excluded": {}}),
    "instructed": ("every query has the instruction of its subset", _instruct),
    "grouped_by_text": (
        "Robustness over queries of equal text",
        lambda task: {"queries": tuple(replace(query, group=query.query.strip()) for query in task.queries)},
    ),
}
"""Name in catalogue.yaml -> the difference in words, as results record it, and the fields of the task that change."""


def applied(task: Task, differences: Mapping[str, Mapping[str, str]]) -> Task:
    """Return the task under a protocol with these differences, whose arguments are given; its results record them."""
    for difference, arguments in differences.items():
        says, change = DIFFERENCES[difference]
        task = replace(task, about={**task.about, "protocol": says})
        task = replace(task, **change(task, **arguments))
    return task
