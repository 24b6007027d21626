"""The published tasks by name (catalogue.yaml), and loading of all tasks: published ones, data sets of the hub, your own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from infembed_ray.config.base import nearest
from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import layouts
from infembed_ray.evaluation.tasks.checks import checked
from infembed_ray.evaluation.tasks.layouts import CHANGED, IR_DATASETS, MEASURES, ORIGINAL
from infembed_ray.evaluation.tasks.repository import CARD, Part, Repository, downloaded
from infembed_ray.evaluation.tasks.task import ROBUSTNESS, Figure, Task
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.places import Place, errors_at
from infembed_ray.storage.steps import open_place

MODE = "@"
"""Separates a task's or a benchmark's name from that of a published protocol: `followir@mteb1`."""
_TITLES = {"paper": "as the paper", "mteb1": "as mteb 1", "mteb2": "as mteb 2", "corpus": "whole corpus"}
_HUB_NAME = re.compile(r"(?P<repository>[\w-]+/[\w.-]+)(/(?P<split>\w+))?")
_READERS: Mapping[str, Callable[..., Task]] = {
    "followir": layouts.read_followir,
    "mair": layouts.read_mair,
    "bright": layouts.read_bright,
    "instructir": layouts.read_instructir,
    "own": layouts.read_repository,
}
"""Layout in catalogue.yaml -> its reader."""


# ------------------------------------------------------------------------------------------- published protocols


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
"""Published protocols that differ from ours. Name in catalogue.yaml -> the difference in words, as results record it, and
the fields of the task that change. docs/reproduction.md has the table of modes and their sources."""


# ------------------------------------------------------------------------------------------------------- entries


@dataclass(frozen=True)
class HubSource:
    """What a task reads from a repository of the hub."""

    repository: str
    revision: str | None
    """Commit; None: unknown, so the newest is downloaded."""
    parts: tuple[Part, ...] = ()
    """Empty: everything that the dataset card lists."""


@dataclass(frozen=True)
class TaskEntry:
    """A published task, or a data set of the hub."""

    name: str
    """Its name in `tasks`: `followir/core17`."""
    title: str
    """Its name in tables."""
    sources: tuple[HubSource, ...]
    layout: str
    """Key of `_READERS`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the layout's reader."""
    differences: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Names in `DIFFERENCES` and their arguments, of a published protocol that differs from ours."""

    def repositories(self, data: Place | None) -> list[Repository]:
        """Return its sources as repositories below a directory; None: in the cache of the hub's client, downloaded to it."""
        repositories = []
        for source in self.sources:
            about = (source.repository, self.name, source.revision, source.parts)
            repositories.append(Repository(data / source.repository, *about) if data else downloaded(*about))
        return repositories

    def files(self, data: Place | None) -> list[Place]:
        """Return the files that it is read from; InputError if one is missing."""
        files = []
        for source, repository in zip(self.sources, self.repositories(data), strict=True):
            for config, split in source.parts or [(config, None) for config in repository.configs]:
                for name in [split] if split else repository.splits(config):
                    files += repository.files(config, name)
            files.append(repository.path / CARD)
        return sorted(set(files), key=str)


@dataclass(frozen=True)
class Benchmark:
    """A set of published tasks and their averages."""

    name: str
    title: str
    source: str
    """Publication."""
    tasks: tuple[TaskEntry, ...]
    """Tasks that `tasks=[<name>]` evaluates."""
    others: tuple[TaskEntry, ...]
    averages: Mapping[str, Mapping[str, str]]
    """Column -> task -> figure; the column is the unweighted mean of the figures."""


def expand(names: Iterable[str]) -> list[str]:
    """Replace benchmarks and patterns like `mair/CAsT_*` or `mair/*@paper` by their tasks, without duplicates.

    Raises:
        InputError: a name is neither a task nor a path.
    """
    expanded: list[str] = []
    for name in names:
        matching = [task for task in TASKS if fnmatchcase(task, name) and (MODE in task) == (MODE in name)]
        if name in BENCHMARKS:
            expanded += [entry.name for entry in BENCHMARKS[name].tasks]
        elif matching:
            expanded += matching
        else:
            find(name)
            expanded.append(name)
    return list(dict.fromkeys(expanded))


def find(name: str) -> TaskEntry | None:
    """Return the published task or the data set of the hub of a name, or None for a path, a URI or a name of ir_datasets.

    Names of the hub are `OWNER/NAME`, or `OWNER/NAME/SPLIT`; a directory of that name comes first.

    Raises:
        InputError: it is none of these.
    """
    if name in TASKS:
        return TASKS[name]
    if is_uri(name) or name.startswith(IR_DATASETS):
        return None
    benchmark = name.split("/")[0]
    if benchmark in BENCHMARKS:
        valid = nearest(name, [task for task in TASKS if task.startswith(f"{benchmark}/")])
        raise InputError(f"tasks={name}: no such task ({valid}); for a directory of that name write ./{name}")
    if Path(name).expanduser().exists():
        return None
    if parts := _HUB_NAME.fullmatch(name):
        options = {"split": parts["split"]} if parts["split"] else {}
        return TaskEntry(name, name, (HubSource(parts["repository"], None),), "own", options)
    alike = [benchmark for benchmark in BENCHMARKS if (MODE in benchmark) == (MODE in name)]
    raise InputError(
        f"tasks={name}: no such task, and no such directory; {nearest(name, alike)}, OWNER/NAME of the hub, {IR_DATASETS}ID"
    )


def _benchmarks(name: str, values: Mapping[str, Any]) -> Iterator[Benchmark]:
    """Yield a benchmark under our protocol, then under each published one."""
    for mode, differences in {"": {}, **values.get("modes", {})}.items():
        suffix = f"{MODE}{mode}" if mode else ""
        titled = {**values, "title": f"{values['title']}, {_TITLES[mode]}"} if mode else values
        yield _benchmark(name, titled, suffix, differences)


def _benchmark(
    name: str, values: Mapping[str, Any], suffix: str, differences: Mapping[str, Mapping[str, str]]
) -> Benchmark:
    def entry(key: str, own: Mapping[str, Any]) -> TaskEntry:
        made = _entry(name, key, {**values, **own})
        return replace(made, name=f"{made.name}{suffix}", differences=differences)

    tasks = {
        key: entry(key, {**own, "title": values["title"]} if key == name else own)
        for key, own in values["tasks"].items()
    }
    own_configs = {own.get("config"): key for key, own in values["tasks"].items()}
    domains = values.get("domains", {})
    every = {config: own_configs.get(config, config) for configs in domains.values() for config in configs}
    others = {c: entry(c, {"title": c, "config": c}) for c, key in every.items() if key == c}
    averages = {
        column: {tasks[key].name: figures if isinstance(figures, str) else figures[key] for key in tasks}
        for column, figures in values.get("averages", {}).items()
    }
    for domain, configs in {**domains, f"all {len(every)}": every}.items() if domains else ():
        averages[f"{domain} nDCG@10"] = {(tasks | others)[every[config]].name: "nDCG@10" for config in configs}
    return Benchmark(
        f"{name}{suffix}", values["title"], values["source"], tuple(tasks.values()), tuple(others.values()), averages
    )


def _entry(benchmark: str, key: str, values: Mapping[str, Any]) -> TaskEntry:
    layout: str = values["layout"]
    parts: tuple[Part, ...] = ()
    options: dict[str, str] = {}
    if layout == "followir":
        options = {"measure": values["measure"]}
    elif layout == "mair":
        parts, options = ((values["config"], None),), {"config": values["config"]}
    elif layout == "bright":
        parts, options = (("documents", key), ("examples", key)), {"subset": key}
    repositories = values["repository"]
    return TaskEntry(
        name=benchmark if key == benchmark else f"{benchmark}/{key}",
        title=values["title"],
        sources=tuple(
            HubSource(repository, values["revision"], parts)
            for repository in (repositories if isinstance(repositories, list) else [repositories])
        ),
        layout=layout,
        options=options,
    )


_LISTED = yaml.safe_load(Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8"))

BENCHMARKS: Mapping[str, Benchmark] = {b.name: b for name, values in _LISTED.items() for b in _benchmarks(name, values)}
TASKS: Mapping[str, TaskEntry] = {
    entry.name: entry for benchmark in BENCHMARKS.values() for entry in (*benchmark.tasks, *benchmark.others)
}


# ------------------------------------------------------------------------------------------------------- loading


def load(name: str, data: str | None = None, measures: Sequence[str] = ()) -> Task:
    """Read and check a task.

    Args:
        name: a published task, perhaps with a mode (`followir/core17@mteb1`), a data set of the hub, or what
            `layouts.read_own` takes.
        data: directory with repositories of the hub, `DIR/OWNER/NAME`, or its URI in an object store; None: they are
            downloaded to the cache of the hub's client.
        measures: as `with_measures` takes them.

    Raises:
        InputError: there is no such task, or its data are missing or inconsistent.
    """
    entry = find(name)
    task = layouts.read_own(name) if entry is None else _published(entry, _directory(data))
    published = name in TASKS
    return with_measures(checked(task), measures or (() if published else MEASURES), keep=published)


def _published(entry: TaskEntry, data: Place | None) -> Task:
    with errors_at(data or Path(), "data"):
        repositories = entry.repositories(data)
        task = _READERS[entry.layout](*repositories, **entry.options)
        task = replace(task, about={"repositories": {r.name: r.commit for r in repositories}})
    for difference, arguments in entry.differences.items():
        words, change = DIFFERENCES[difference]
        task = replace(task, about={**task.about, "protocol": words})
        task = replace(task, **change(task, **arguments))
    return task


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
    """Return the files that a task is read from; InputError if there is no such task, or a file is missing."""
    entry = find(name)
    return layouts.files_of_own(name) if entry is None else entry.files(_directory(data))


def _directory(data: str | None) -> Place | None:
    if data is None:
        return None
    return open_place(data, "data")
