"""Published protocols that differ from ours, as changes of a task: `followir/core17@mteb1` is judged as in mteb 1.

catalogue.yaml lists the modes of each benchmark; docs/reproduction.md has their table and sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from infembed_ray.evaluation.tasks.followir import CHANGED, ORIGINAL
from infembed_ray.evaluation.tasks.task import Task


def _swap_judgements(task: Task, _: Any) -> Task:
    other = {f"-{ORIGINAL}": f"-{CHANGED}", f"-{CHANGED}": f"-{ORIGINAL}"}
    return replace(
        task,
        qrels={
            q: task.qrels[stem + other[dash + kind]] for q in task.qrels for stem, dash, kind in [q.rpartition("-")]
        },
    )


def _count_both_versions(task: Task, _: Any) -> Task:
    return replace(task, figures=tuple(replace(figure, kind=None) for figure in task.figures))


def _rank_whole_corpus(task: Task, _: Any) -> Task:
    return replace(task, candidates=None)


def _rank_exclusions(task: Task, _: Any) -> Task:
    return replace(task, excluded={})


def _instruct(task: Task, instructions: Mapping[str, str]) -> Task:
    """Give every query the instruction of its subset; `others` is that of subsets without their own."""
    subset = task.name.rpartition("/")[2].partition("@")[0]
    instruction = instructions.get(subset, instructions["others"]).format(subset=subset)
    about = {**task.about, "instruction": instruction}
    return replace(task, about=about, queries=tuple(replace(query, instruction=instruction) for query in task.queries))


def _group_by_text(task: Task, _: Any) -> Task:
    return replace(task, queries=tuple(replace(query, group=query.query.strip()) for query in task.queries))


DIFFERENCES: Mapping[str, tuple[str, Callable[[Task, Any], Task]]] = {
    "swapped_judgements": ("original queries judged by the changed judgements, and the reverse", _swap_judgements),
    "both_versions": ("MAP and nDCG over original and changed queries together", _count_both_versions),
    "whole_corpus": ("every query ranks the whole corpus, not its candidates", _rank_whole_corpus),
    "ranked_exclusions": ("excluded documents are ranked", _rank_exclusions),
    "instructed": ("every query has the instruction of its subset", _instruct),
    "grouped_by_text": ("Robustness over queries of equal text", _group_by_text),
}
"""Name in catalogue.yaml -> the difference in words, as results record it, and the change of the task."""


def applied(task: Task, differences: Mapping[str, Any]) -> Task:
    """Return the task under a protocol with these differences, which its results record."""
    for difference, argument in differences.items():
        says, change = DIFFERENCES[difference]
        task = change(replace(task, about={**task.about, "protocol": says}), argument)
    return task
