"""The tasks by name: those of the published benchmarks, and data sets of the user's, which are named by their path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from infembed_ray.config import nearest
from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import beir, bright, followir, instructir, mair
from infembed_ray.evaluation.tasks.checks import checked
from infembed_ray.evaluation.tasks.repository import CARD, Repository
from infembed_ray.evaluation.tasks.task import Task
from infembed_ray.storage import local_path

Part = tuple[str, str | None]
"""A configuration of a repository and one of its splits; None: all of them."""

_LAYOUTS: Mapping[str, Callable[..., Task]] = {
    "followir": followir.read,
    "mair": mair.read,
    "bright": bright.read,
    "instructir": instructir.read,
}


@dataclass(frozen=True)
class Source:
    """What a task needs of a repository of the Hugging Face hub."""

    repository: str
    revision: str | None
    """A commit; None where none is known: the newest."""
    parts: tuple[Part, ...]
    """Empty: all that its card lists."""


@dataclass(frozen=True)
class Entry:
    """A published task."""

    name: str
    """As `tasks` names it: `followir/core17`."""
    title: str
    """As tables show it."""
    sources: tuple[Source, ...]
    layout: str
    options: Mapping[str, str] = field(default_factory=dict)
    """What the reader of its layout has to know."""

    def repositories(self, root: Path) -> list[Repository]:
        """Its sources, as they lie in a mirror."""
        return [Repository(root, source.repository, self.name) for source in self.sources]


@dataclass(frozen=True)
class Benchmark:
    """A set of published tasks, and what tables show of them together."""

    name: str
    title: str
    source: str
    """Where it was published."""
    tasks: tuple[Entry, ...]
    """Those that its name stands for."""
    others: tuple[Entry, ...]
    averages: Mapping[str, Mapping[str, str]]
    """Column -> name of a task -> name of the figure that goes into the (unweighted) mean."""


def load(name: str, data: str | None = None) -> Task:
    """Read and check a task.

    Args:
        name: a published task, or the path of a directory in BEIR's layout (see `beir.read`).
        data: the mirror of the published data sets, as `infembed data fetch` makes it; None: one in the scratch
            directory of this machine, to which the task is fetched if it is not there.

    Raises:
        InputError: no such task, its data are missing, damaged or faulty.
    """
    if (entry := TASKS.get(_known(name))) is None:
        return checked(beir.read(name))
    repositories = entry.repositories(_mirror(name, data))
    task = _LAYOUTS[entry.layout](*repositories, **entry.options)
    return checked(replace(task, about={"repositories": {r.name: r.recorded["revision"] for r in repositories}}))


def files(name: str, data: str | None = None) -> list[Path]:
    """The files that a task is read from: they decide what it is.

    Raises:
        InputError: no such task, or its data are missing.
    """
    if (entry := TASKS.get(_known(name))) is None:
        return beir.files(name)
    found = []
    for source, repository in zip(entry.sources, entry.repositories(_mirror(name, data)), strict=True):
        for config, split in source.parts or [(config, None) for config in repository.configs]:
            for one in [split] if split else repository.splits(config):
                found += repository.files(config, one)
        found.append(repository.path / CARD)
    return sorted(set(found))


def expand(names: Iterable[str]) -> list[str]:
    """Names of tasks, without repetition: those of a benchmark for its name, and all that match `mair/CAsT_*`.

    Raises:
        InputError: no such task or path.
    """
    expanded: list[str] = []
    for name in names:
        matching = [task for task in TASKS if fnmatchcase(task, name)]
        if name in BENCHMARKS:
            expanded += [entry.name for entry in BENCHMARKS[name].tasks]
        else:
            expanded += matching or [_known(name)]
    return list(dict.fromkeys(expanded))


def _known(name: str) -> str:
    """The name itself.

    Raises:
        InputError: it is neither a task's nor that of a file or directory.
    """
    if name not in TASKS and (name.split("/")[0] in BENCHMARKS or not Path(name).expanduser().exists()):
        benchmark = name.split("/")[0]
        if benchmark in BENCHMARKS:
            valid = nearest(name, [task for task in TASKS if task.startswith(f"{benchmark}/")])
            raise InputError(f"tasks={name}: no such task ({valid}); a directory of that name is ./{name}")
        raise InputError(f"tasks={name}: no such task, and no such directory; {nearest(name, BENCHMARKS)}")
    return name


def _mirror(name: str, data: str | None) -> Path:
    if data is not None:
        return local_path(data, "data")
    from infembed_ray.evaluation.mirror import of_this_machine  # which knows the catalogue

    return of_this_machine(name)


def _read() -> dict[str, Benchmark]:
    listed = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: _benchmark(name, values) for name, values in listed.items()}


def _benchmark(name: str, values: Mapping[str, Any]) -> Benchmark:
    tasks = {key: _entry(name, key, {**values, **own}) for key, own in values["tasks"].items()}
    others = [
        _entry(name, config, {**values, "title": config, "config": config}) for config in values.get("others", ())
    ]
    return Benchmark(
        name=name,
        title=values["title"],
        source=values["source"],
        tasks=tuple(tasks.values()),
        others=tuple(others),
        averages={
            column: {tasks[key].name: figure for key, figure in _each(figures, tasks).items()}
            for column, figures in values.get("averages", {}).items()
        },
    )


def _each(figures: str | dict[str, str], tasks: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(tasks, figures) if isinstance(figures, str) else figures


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


BENCHMARKS: Mapping[str, Benchmark] = _read()
TASKS: Mapping[str, Entry] = {
    entry.name: entry for benchmark in BENCHMARKS.values() for entry in (*benchmark.tasks, *benchmark.others)
}
