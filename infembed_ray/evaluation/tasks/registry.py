"""The published tasks by name, and the repositories of the Hugging Face hub that hold their data (catalogue.yaml)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from infembed_ray.config.base import nearest
from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.repository import CARD, Repository
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.places import Place

MODE = "@"
"""Separates a task's or a benchmark's name from that of a published protocol: `followir@mteb1`."""
_TITLES = {"paper": "as the paper", "mteb1": "as mteb 1", "mteb2": "as mteb 2", "corpus": "whole corpus"}
IR_DATASETS = "ir_datasets:"
"""Begins the names of tasks that the library ir_datasets provides."""
_HUB_NAME = re.compile(r"(?P<repository>[\w-]+/[\w.-]+)(/(?P<split>\w+))?")

Part = tuple[str, str | None]
"""A configuration of a repository and one of its splits; None: all splits."""


@dataclass(frozen=True)
class Source:
    """What a task reads from a repository of the hub."""

    repository: str
    revision: str | None
    """Commit; None: unknown, so the newest is fetched."""
    parts: tuple[Part, ...]
    """Empty: everything that the dataset card lists."""


@dataclass(frozen=True)
class Entry:
    """A published task, or a data set of the hub."""

    name: str
    """Its name in `tasks`: `followir/core17`."""
    title: str
    """Its name in tables."""
    sources: tuple[Source, ...]
    layout: str
    options: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the layout's reader."""
    differences: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Names in `modes.DIFFERENCES` and their arguments, of a published protocol that differs from ours."""

    def repositories(self, root: Place) -> list[Repository]:
        """Return its sources as repositories of a mirror."""
        return [Repository(root, source.repository, self.name) for source in self.sources]

    def files(self, root: Place) -> list[Place]:
        """Return the files of a mirror that it is read from.

        Raises:
            InputError: a file is missing, or has another size than when it was fetched.
        """
        found = []
        for source, repository in zip(self.sources, self.repositories(root), strict=True):
            for config, split in source.parts or [(config, None) for config in repository.configs]:
                for name in [split] if split else repository.splits(config):
                    found += repository.files(config, name)
            found.append(repository.path / CARD)
        return sorted(set(found), key=str)


@dataclass(frozen=True)
class Benchmark:
    """A set of published tasks and their averages."""

    name: str
    title: str
    source: str
    """Publication."""
    tasks: tuple[Entry, ...]
    """Tasks that `tasks=[<name>]` evaluates."""
    others: tuple[Entry, ...]
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


def find(name: str) -> Entry | None:
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
    if found := _HUB_NAME.fullmatch(name):
        options = {"split": found["split"]} if found["split"] else {}
        return Entry(name, name, (Source(found["repository"], None, ()),), "own", options)
    alike = [known for known in BENCHMARKS if (MODE in known) == (MODE in name)]
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
    def entry(key: str, own: Mapping[str, Any]) -> Entry:
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


def _entry(benchmark: str, key: str, values: Mapping[str, Any]) -> Entry:
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
    return Entry(
        name=benchmark if key == benchmark else f"{benchmark}/{key}",
        title=values["title"],
        sources=tuple(
            Source(repository, values["revision"], parts)
            for repository in (repositories if isinstance(repositories, list) else [repositories])
        ),
        layout=layout,
        options=options,
    )


_LISTED = yaml.safe_load(Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8"))

BENCHMARKS: Mapping[str, Benchmark] = {b.name: b for name, values in _LISTED.items() for b in _benchmarks(name, values)}
TASKS: Mapping[str, Entry] = {
    entry.name: entry for benchmark in BENCHMARKS.values() for entry in (*benchmark.tasks, *benchmark.others)
}
