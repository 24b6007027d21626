"""Loads tasks: published ones by name, your own by path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from infembed_ray.evaluation.tasks import bright, followir, mair, mirror, modes, mteb_layout, own
from infembed_ray.evaluation.tasks.checks import checked
from infembed_ray.evaluation.tasks.registry import TASKS, find
from infembed_ray.evaluation.tasks.task import ROBUSTNESS, Figure, Task
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.places import Place, errors_at
from infembed_ray.storage.steps import local_path, open_input

_LAYOUTS: Mapping[str, Callable[..., Task]] = {
    "followir": followir.read,
    "mair": mair.read,
    "bright": bright.read,
    "instructir": mteb_layout.read_instructir,
    "own": own.read_repository,
}


def load(name: str, data: str | None = None, measures: Sequence[str] = ()) -> Task:
    """Read and check a task.

    Args:
        name: a published task, perhaps with a mode (`followir/core17@mteb1`), a data set of the hub, or what `own.read` takes.
        data: mirror made by `infembed data fetch`, or its URI in an object store; None: one in this machine's scratch directory, filled as needed.
        measures: as `with_measures` takes them.

    Raises:
        InputError: there is no such task, or its data are missing, damaged or inconsistent.
    """
    entry = find(name)
    if entry is None:
        task = own.read(name)
    else:
        root = _root(name, data)
        repositories = entry.repositories(root)
        with errors_at(root, "data"):
            task = _LAYOUTS[entry.layout](*repositories, **entry.options)
            about = {"repositories": {r.name: r.recorded["revision"] for r in repositories}}
        task = modes.applied(replace(task, about=about), entry.differences)
    published = name in TASKS
    return with_measures(checked(task), measures or (() if published else own.MEASURES), keep=published)


def with_measures(task: Task, measures: Sequence[str], keep: bool = True) -> Task:
    """Add figures of these measures, over the queries that the task's figures count.

    Args:
        task: with figures of its own.
        measures: names as `metrics.parse` takes them; and Robustness@k, which is left out if there are no groups of queries.
        keep: false keeps only p-MRR and Robustness@10 of its own figures.
    """
    kinds = {figure.kind for figure in task.figures if figure.measure != "p-MRR"}
    kind = kinds.pop() if len(kinds) == 1 else None
    grouped = any(query.group for query in task.queries)
    kept = [f for f in task.figures if keep or f.measure in ("p-MRR", ROBUSTNESS)]
    wanted = [measure for measure in measures if grouped or not measure.startswith("Robustness@")]
    every = {figure.name: figure for figure in (*kept, *(Figure(measure, measure, kind) for measure in wanted))}
    return replace(task, figures=tuple(every.values()))


def files(name: str, data: str | None = None) -> list[Place]:
    """Return the files that a task is read from.

    Raises:
        InputError: there is no such task, or its data are missing.
    """
    entry = find(name)
    return own.files(name) if entry is None else entry.files(_root(name, data))


def _root(name: str, data: str | None) -> Place:
    if data is None:
        return mirror.fetch_to_scratch(name)
    return open_input(data, "data") if is_uri(data) else local_path(data, "data")
