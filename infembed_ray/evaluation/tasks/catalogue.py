"""The published tasks by name (catalogue.yaml), and the loader of all tasks: published, from the hub, or your own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from infembed_ray.config.base import nearest
from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import layouts
from infembed_ray.evaluation.tasks.layouts import CHANGED, MEASURES, ORIGINAL
from infembed_ray.evaluation.tasks.repository import Repository, downloaded
from infembed_ray.evaluation.tasks.task import ROBUSTNESS, Figure, Task, checked, without_identical
from infembed_ray.records.files import BadRows
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.places import Place, errors_at
from infembed_ray.storage.steps import open_place

AS_PAPER = "@paper"
"""Suffix of benchmarks and tasks under the paper's protocol, where it differs from ours: `followir@paper`."""
_HUB_NAME = re.compile(r"(?P<repository>[\w-]+/[\w.-]+)(/(?P<split>\w+))?")
_READERS: Mapping[str, Callable[..., Task]] = {
    "followir": layouts.read_followir,
    "mair": layouts.read_mair,
    "bright": layouts.read_bright,
    "instructir": layouts.read_instructir,
    "measured": layouts.read_measured,
    "nevir": layouts.read_nevir,
    "excluir": layouts.read_excluir,
    "own": layouts.read_repository,
}
"""Layout in catalogue.yaml -> function that reads it."""


# ------------------------------------------------------------------------------------------- the paper's protocol


def _swap_judgements(task: Task, _: TaskEntry) -> Task:
    other = {ORIGINAL: CHANGED, CHANGED: ORIGINAL}
    parted = {query: query.rpartition("-") for query in task.qrels}
    return replace(task, qrels={q: task.qrels[f"{stem}-{other[kind]}"] for q, (stem, _, kind) in parted.items()})


def _instruct(task: Task, entry: TaskEntry) -> Task:
    """Give every query the instruction of its subset; subsets without one use `others`."""
    subset, instructions = entry.options["subset"], _LISTED["bright"]["instructions"]
    instruction = instructions.get(subset, instructions["others"]).format(subset=subset)
    queries = tuple(replace(query, instruction=instruction) for query in task.queries)
    return replace(task, queries=queries, about={**task.about, "instruction": instruction})


def _group_by_text(task: Task, _: TaskEntry) -> Task:
    return replace(task, queries=tuple(replace(query, group=query.query.strip()) for query in task.queries))


DIFFERENCES: Mapping[str, tuple[str, Callable[[Task, TaskEntry], Task]]] = {
    "followir": ("original queries judged by the changed judgements, and the reverse", _swap_judgements),
    "bright": ("every query has the instruction of its subset", _instruct),
    "instructir": ("Robustness over queries of equal text", _group_by_text),
}
"""Layout -> how the paper's protocol differs from ours, as results record it, and the function that changes a task.
docs/reproduction.md has the sources."""


# ------------------------------------------------------------------------------------------------------- entries


@dataclass(frozen=True)
class TaskEntry:
    """A published task, or a data set of the hub."""

    name: str
    """Its name in `tasks`: `followir/core17`."""
    title: str
    """Its name in tables."""
    repositories: tuple[str, ...]
    """Repositories of the hub that the reader needs."""
    revision: str | None
    """Commit of the repositories; None: unknown, so the newest is downloaded."""
    layout: str
    """Key of `_READERS`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the layout's reader."""


@dataclass(frozen=True)
class Benchmark:
    """A set of published tasks and their averages."""

    title: str
    tasks: tuple[TaskEntry, ...]
    """Tasks that `tasks=[<name>]` evaluates."""
    averages: Mapping[str, Mapping[str, str]]
    """Column -> task -> figure; the column is the unweighted mean of the figures."""


def expand(names: Iterable[str]) -> list[str]:
    """Replace benchmarks by their tasks, without duplicates; InputError if a name is neither a task nor a path."""
    listed = ([entry.name for entry in BENCHMARKS[name].tasks] if name in BENCHMARKS else [name] for name in names)
    expanded = list(dict.fromkeys(name for several in listed for name in several))
    for name in expanded:
        find(name)
    return expanded


def find(name: str) -> TaskEntry | None:
    """Return the published task or the data set of the hub (`OWNER/NAME`, `OWNER/NAME/SPLIT`) with this name.

    Return None for a path or a URI; InputError if the name is none of these.
    """
    if name in TASKS:
        return TASKS[name]
    if is_uri(name):
        return None
    benchmark = name.split("/")[0]
    if benchmark in BENCHMARKS:
        valid = nearest(name, [task for task in TASKS if task.startswith(f"{benchmark}/")])
        raise InputError.of("tasks", name, f"no such task ({valid})", f"for a directory of that name write ./{name}")
    if Path(name).expanduser().exists():
        return None
    if parts := _HUB_NAME.fullmatch(name):
        options = {"split": parts["split"]} if parts["split"] else {}
        return TaskEntry(name, name, (parts["repository"],), None, "own", options=options)
    alike = [benchmark for benchmark in BENCHMARKS if ("@" in benchmark) == ("@" in name)]
    fault = "no such task, and no such directory"
    raise InputError.of("tasks", name, fault, f"{nearest(name.lower(), alike)}, or OWNER/NAME of the hub")


def _benchmark(name: str, values: Mapping[str, Any], suffix: str) -> Benchmark:
    """Make a benchmark under our protocol, or with a suffix under the paper's."""
    title = values["title"] + (", as the paper" if suffix else "")

    def entry(key: str, own: Mapping[str, Any]) -> TaskEntry:
        of_task = {**values, **own}
        repositories, layout = of_task["repository"], values["layout"]
        options = {name: of_task[name] for name in _OPTIONS if name in of_task}
        options |= {"subset": key} if layout == "bright" else {}
        return TaskEntry(
            name=(key if key == name else f"{name}/{key}") + suffix,
            title=title if key == name else of_task["title"],
            repositories=tuple(repositories if isinstance(repositories, list) else [repositories]),
            revision=of_task["revision"],
            layout=layout,
            options=options,
        )

    tasks = {key: entry(key, own) for key, own in values["tasks"].items()}
    averages = {
        column: {tasks[key].name: figures if isinstance(figures, str) else figures[key] for key in tasks}
        for column, figures in values.get("averages", {}).items()
    }
    return Benchmark(title, tuple(tasks.values()), averages)


_OPTIONS = ("measure", "config", "language", "instruction", "levels", "download")
"""Keys of the catalogue that are arguments of readers."""
_IDENTICAL = frozenset(
    f"{owner}/{name}" for owner in ("mteb", "beir") for name in ("arguana", "quora", "fiqa", "fever", "msmarco")
) | {"if-ir/fiqa"}
"""Data sets whose queries can be documents too. As in mteb, the document with the query's id is left out."""
_LISTED = yaml.safe_load(Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8"))

BENCHMARKS: Mapping[str, Benchmark] = {
    f"{name}{suffix}": _benchmark(name, values, suffix)
    for name, values in _LISTED.items()
    for suffix in ("", *([AS_PAPER] if values.get("in_paper") else []))
}
TASKS: Mapping[str, TaskEntry] = {entry.name: entry for benchmark in BENCHMARKS.values() for entry in benchmark.tasks}


# ------------------------------------------------------------------------------------------------------- loading


def load(
    name: str,
    data: str | None = None,
    measures: Sequence[str] = (),
    identical: bool | None = None,
    reject: bool = False,
    bad: list[BadRows] | None = None,
) -> Task:
    """Read and check a task.

    Args:
        name: a published task, perhaps with `@paper`, a data set of the hub, or what `layouts.read_own` reads.
        data: directory or URI with the hub's repositories, as `DIR/OWNER/NAME`; None downloads them.
        measures: as in `with_measures`.
        identical: leave out the document with a query's own id; None: only for the data sets in `_IDENTICAL`.
        reject: leave out unusable rows, and add them to `bad`.

    Raises:
        InputError: the task does not exist, or its data are missing or inconsistent.
    """
    entry = find(name)
    if entry is None:
        task, left_out = layouts.read_own(name, reject)
    else:
        place = None if data is None else open_place(data, "data")
        with errors_at(place or Path(), "data"):
            task, left_out = _published(entry, place, reject)
    if bad is not None:
        bad += left_out
    published = name in TASKS
    if identical is None:
        identical = entry is not None and any(r.lower() in _IDENTICAL for r in entry.repositories)
    task = without_identical(checked(task, published=entry is not None), identical)
    return with_measures(task, measures or (() if published else MEASURES), keep=published)


def _published(entry: TaskEntry, data: Place | None, reject: bool) -> tuple[Task, list[BadRows]]:
    repositories = []
    part = next((entry.options[name] for name in ("config", "subset", "language") if name in entry.options), "")
    for name in entry.repositories:
        about = (entry.name, name, entry.revision, part)  # reads the files with `part` in their names
        if data is None and "download" in entry.options:
            remedy = f"download them from {entry.options['download']} to DIR/{name}, and set data=DIR"
            raise InputError.of("tasks", entry.name, "data is not set, and the hub does not have its files", remedy)
        repositories.append(Repository(data / name, *about) if data else downloaded(*about))
        repositories[-1].bad.reject = reject
    task = _READERS[entry.layout](*repositories, **entry.options)
    task = replace(task, about={**task.about, "repositories": {r.name: r.commit for r in repositories}})
    if entry.name.endswith(AS_PAPER) and entry.layout in DIFFERENCES:
        words, change = DIFFERENCES[entry.layout]
        task = change(replace(task, about={**task.about, "protocol": words}), entry)
    return task, [repository.bad for repository in repositories]


def with_measures(task: Task, measures: Sequence[str], keep: bool = True) -> Task:
    """Add figures of these measures, over the queries that the task's own figures count.

    Without groups of queries, Robustness@k is left out. With `keep=False`, only p-MRR and Robustness@10 of the task's figures stay.
    """
    kinds = {figure.kind for figure in task.figures if figure.measure != "p-MRR"}
    kind = kinds.pop() if len(kinds) == 1 else None
    grouped = any(query.group for query in task.queries)
    kept = [f for f in task.figures if keep or f.measure in ("p-MRR", ROBUSTNESS)]
    wanted = [measure for measure in measures if grouped or not measure.startswith("Robustness@")]
    every = {figure.name: figure for figure in (*kept, *(Figure(measure, measure, kind) for measure in wanted))}
    return replace(task, figures=tuple(every.values()))
