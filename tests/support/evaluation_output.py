"""A small evaluation: tasks, runs, and the figures that follow from them."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa

from infembed_ray.evaluation import results
from infembed_ray.evaluation.metrics import Change, Run
from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.scoring import score
from infembed_ray.evaluation.tasks.infir import instruction_following
from infembed_ray.evaluation.tasks.layouts import CHANGED, ORIGINAL
from infembed_ray.evaluation.tasks.task import CORPUS, Figure, Query, Task
from infembed_ray.records.tables import Record

MARKUP = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1"><b>bold</b>'
MODELS = ("one", "two", "three")


def evaluation(count: int = 15) -> tuple[Task, dict[str, Run]]:
    """The task of some records, and random rankings of all its passages by every model."""
    texts = ("query_positive", "instruction_positive", "instruction_negative", "query_negative")
    passages = ("document_positive", "hard_negative_document_1", "hard_negative_document_2")
    rows = [Record(id=f"r{i}", **{name: f"{name} {i} {MARKUP}" for name in (*texts, *passages)}) for i in range(count)]
    task = instruction_following(rows)
    rng = random.Random(3)
    ids = task.corpus["id"].to_pylist()
    runs = {model: {query.id: {p: rng.random() for p in ids} for query in task.queries} for model in MODELS}
    return task, runs


def followir(count: int = 4) -> tuple[Task, dict[str, Run]]:
    """A task with FollowIR's ids, kinds and changes: no groups, and passages that the changed instruction excludes."""
    corpus = [f"d{i}" for i in range(120)]
    rng = random.Random(5)
    queries, qrels, changes = [], {}, []
    for number in range(count):
        original, changed = f"{number}-{ORIGINAL}", f"{number}-{CHANGED}"
        queries += [
            Query(changed, f"query {number}", "narrow", CHANGED),
            Query(original, f"query {number}", "", ORIGINAL),
        ]
        relevant = rng.sample(corpus, 40)
        qrels |= {original: dict.fromkeys(relevant, 1), changed: dict.fromkeys(relevant[5:], 1)}
        changes.append(Change(original, changed, tuple(relevant[:5])))
    task = Task(
        name="followir/core17",
        corpus=pa.table({"id": corpus, "text": [f"text of {name}" for name in corpus]}, schema=CORPUS),
        queries=tuple(queries),
        qrels=qrels,
        figures=(Figure("p-MRR", "p-MRR"), Figure("MAP@1000", "MAP@1000", kind=ORIGINAL)),
        changes=tuple(changes),
    )
    return task, {model: {query: {d: rng.random() for d in corpus} for query in qrels} for model in MODELS}


def write_evaluation(directory: Path, task: Task, runs: dict[str, Run]) -> Path:
    """Write the files of an evaluation output."""
    directory.mkdir(exist_ok=True)
    scores = {model: {task.name: score(task, run)} for model, run in runs.items()}
    tasks = {task.name: TaskSummary.from_task(task, "content")}
    results.write(directory, Results(tasks, {model: {} for model in runs}, scores, depth=1000))
    return directory
