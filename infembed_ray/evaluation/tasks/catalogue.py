"""Loads tasks: published ones by name, your own by path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from infembed_ray.evaluation.tasks import beir, bright, followir, mair, mirror, modes, mteb_layout
from infembed_ray.evaluation.tasks.checks import checked
from infembed_ray.evaluation.tasks.registry import find
from infembed_ray.evaluation.tasks.task import Task
from infembed_ray.object_store import is_uri
from infembed_ray.places import Place, errors_at
from infembed_ray.storage import local_path, open_input

_LAYOUTS: Mapping[str, Callable[..., Task]] = {
    "followir": followir.read,
    "mair": mair.read,
    "bright": bright.read,
    "instructir": mteb_layout.read_instructir,
}


def load(name: str, data: str | None = None) -> Task:
    """Read and check a task.

    Args:
        name: a published task, perhaps with a mode (`followir/core17@mteb1`), or the path of a directory in BEIR's layout (see `beir.read`).
        data: mirror made by `infembed data fetch`, or its URI in an object store; None: one in this machine's scratch directory, filled as needed.

    Raises:
        InputError: there is no such task, or its data are missing, damaged or inconsistent.
    """
    entry = find(name)
    if entry is None:
        return checked(beir.read(name))
    root = _root(name, data)
    repositories = entry.repositories(root)
    with errors_at(root, "data"):
        task = _LAYOUTS[entry.layout](*repositories, **entry.options)
        about = {"repositories": {r.name: r.recorded["revision"] for r in repositories}}
    return checked(modes.applied(replace(task, about=about), entry.differences))


def files(name: str, data: str | None = None) -> list[Place]:
    """Return the files that a task is read from.

    Raises:
        InputError: there is no such task, or its data are missing.
    """
    entry = find(name)
    return beir.files(name) if entry is None else entry.files(_root(name, data))


def _root(name: str, data: str | None) -> Place:
    if data is None:
        return mirror.fetch_to_scratch(name)
    return open_input(data, "data") if is_uri(data) else local_path(data, "data")
