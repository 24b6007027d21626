"""`infembed runs`, `status` and `lineage`: which outputs there are, how far a run is, and what an output was made from.

They read manifests, and `status` also the states of unfinished runs."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from infembed_ray.errors import InputError
from infembed_ray.progress import say
from infembed_ray.storage.leases import is_held
from infembed_ray.storage.object_store import Folder, is_uri
from infembed_ray.storage.places import Place, address, errors_at, listing, place_of, read_json, read_text
from infembed_ray.storage.releases import followed
from infembed_ray.storage.run_state import SUFFIX
from infembed_ray.storage.steps import LATEST, MANIFEST, open_place, resolve

PARTIAL = ".partial"
NEXT = {
    "synthesize": "infembed analyze records={0}  or  infembed train records={0} model=...",
    "train": "infembed evaluate models.trained={0} records=...  or  infembed index model={0} corpus=...",
    "index": "infembed serve index={0}",
    "release": "infembed promote {0} ALIAS.release",
}
"""Stage -> commands that take its output."""
KEY_VARIABLE = "INFEMBED_API_KEY"
"""Environment variable with the API key, as for `client.Client`."""
HTTP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Run:
    """A published output: where it is, and its manifest."""

    address: str
    manifest: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Stage, identity, time, code and cost in one line."""
        code = self.manifest.get("provenance", {}).get("code", {})
        commit = (code.get("commit") or "")[:12] + ("+" if code.get("uncommitted") else "")
        parts = [f"{self.manifest['stage']} {self.manifest['identity']}", str(self.manifest["created"])]
        parts += [f"{self.manifest['seconds']:,.0f} s", *([f"commit {commit}"] if commit else [])]
        parts += [f"{self.manifest['usd']:.2f} USD"] if self.manifest.get("usd") else []
        return "  ".join(parts)

    def inputs(self) -> Iterator[tuple[str, str]]:
        """Yield name and address of every input, those of a release being the outputs of its stages."""
        for stage, made in self.manifest.get("stages", {}).items():
            yield stage, made["address"]
        for name, entry in self.manifest["inputs"].items():
            if entry["path"] != entry["fingerprint"]:  # else it is a value, not a file
                yield name, entry["path"]


def print_runs(directory: str) -> None:
    """Print every output below a directory or URI, the newest last, and the unfinished ones.

    Raises:
        InputError: there is no such directory, or no output in it.
    """
    place = open_place(directory, "DIR")
    with errors_at(place, "DIR"):
        names = listing(place) if isinstance(place, Folder) or place.is_dir() else {}
        found = sorted(_runs(place, names), key=_created)
        newest = {address((place / name).parent): read_text(place / name) for name in names if _last(name) == LATEST}
    unfinished = sorted({part for name in names for part in _partial(name)})
    if not found and not unfinished:
        raise InputError.of(
            "DIR", directory, "has no output of a stage", "give the `output` of a stage or of a pipeline"
        )
    for run in found:
        folder = address(place_of(run.address).parent)
        mark = "  latest" if (newest.get(folder) or "").strip() == run.manifest["identity"] else ""
        say(f"{run.title}  {run.address}{mark}")
    for name in unfinished:
        say(f"unfinished  {address(place / name)}: running, or interrupted; the same command resumes it")


def print_status(output: str) -> None:
    """Print the state of an output, or of the newest output and the unfinished ones of each stage below a directory.

    Raises:
        InputError: there is neither an output nor an unfinished one.
    """
    if (run := _run_at(output)) is not None:
        return _print_finished(run)
    place = open_place(output, "RUN")
    with errors_at(place, "RUN"):
        names = listing(place) if isinstance(place, Folder) or place.is_dir() else {}
        newest = {str(run.manifest["stage"]): run for run in sorted(_runs(place, names), key=_created)}
        states = [place / name for name in names if name.endswith(SUFFIX) and not list(_partial(name))]
        for run in newest.values():
            _print_finished(run)
        for file in states:
            _print_unfinished(file)
    if not newest and not states:
        raise InputError.of("RUN", output, "has no output, finished or not", "list them with `infembed runs DIR`")


def _print_finished(run: Run) -> None:
    say(f"finished  {run.title}  {run.address}")
    if command := NEXT.get(run.manifest["stage"]):
        say(f"  next: {command.format(run.address)}")


def _print_unfinished(file: Place) -> None:
    """Print the state of a run from its file. A stage without an error that holds no lease was killed; a pipeline has none."""
    state = read_json(file)
    running = is_held(file.parent, state["run"])
    ended = "unfinished" if state["stage"] == "pipeline" else "interrupted"
    what = "running" if running else "failed" if state["error"] else ended
    where = f"process {state['pid']} on {state['host']}"
    say(f"{what}  {state['stage']} {state['run']}  began {state['began']}, {where}, updated {state['updated']}")
    for name in ("progress", "error"):
        if state[name]:
            say(f"  {name}: {state[name]}")
    if not running:
        say(f"  next: {state['command']}  resumes it")


def print_lineage(output: str, root: str | None, collection: str | None = None) -> None:
    """Print what an output was made from, back to the first inputs.

    Args:
        output: an output, its directory with a `latest`, or the URL of an API of `infembed serve`.
        root: directory or URI with the outputs, of which the API's index is found; only for a URL.
        collection: of the API, whose index it is; None: the default one. Only for a URL.

    Raises:
        InputError: there is no such output, or the API's index is not below the root.
    """
    is_api = output.startswith(("http://", "https://"))
    if collection is not None and not is_api:
        raise InputError.of(
            "--collection", collection, f"RUN={output} is no API", "give its URL, or leave out the option"
        )
    start = _served(output, root, collection) if is_api else _run_at(output)
    if start is None:
        raise InputError.of(
            "RUN", output, f"not a published output (no {MANIFEST})", "list them with `infembed runs DIR`"
        )
    for line in lines(start):
        say(line)


def lines(run: Run, name: str = "", depth: int = 0) -> Iterator[str]:
    """Yield a line for an output and, indented, for each of its inputs and theirs."""
    indent = "  " * depth
    yield f"{indent}{name}{': ' if name else ''}{run.title}  {run.address}"
    for own, path in run.inputs():
        made = _run_at(path)
        if made is not None:
            yield from lines(made, own, depth + 1)
        else:
            fingerprint = run.manifest["inputs"].get(own, {}).get("fingerprint", "")
            yield f"{indent}  {own}: {path}  {fingerprint}{'' if _exists(path) else '  (no longer there)'}"


def _created(run: Run) -> str:
    return str(run.manifest["created"])


def _runs(place: Place, names: Mapping[str, int]) -> Iterator[Run]:
    for name in names:
        if _last(name) == MANIFEST and not list(_partial(name)):
            folder = str(PurePosixPath(name).parent)
            if run := _read(place if folder == "." else place / folder):
                yield run


def _read(place: Place) -> Run | None:
    """Read the output at a place; None if it has no manifest, or another file of that name."""
    try:
        manifest = json.loads(read_text(place / MANIFEST) or "null")
    except ValueError:
        return None
    known = isinstance(manifest, dict) and {"stage", "identity", "created", "seconds", "inputs"} <= manifest.keys()
    return Run(address(place), manifest) if known else None


def _run_at(value: str) -> Run | None:
    """Return the output at an address, or the one that `latest` names there."""
    place = place_of(followed(value, "RUN"))
    with errors_at(place, "RUN"):
        if isinstance(place, Path):
            place = resolve(place)
        elif found := (read_text(place / LATEST) or "").strip():
            place = place / found
        return _read(place)


def _served(url: str, root: str | None, collection: str | None) -> Run | None:
    """Find the index of a collection that an API serves."""
    if root is None:
        raise InputError(
            "--root is missing: give the directory or URI with the outputs; an API does not tell where it is"
        )
    key = os.environ.get(KEY_VARIABLE)
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/{'models' if collection is None else 'collections'}",
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=HTTP_TIMEOUT_S) as answer:
            data = json.load(answer)["data"]
            if collection is None:
                version = data[0]["index_version"]
            else:
                versions = {entry["name"]: entry["model"]["index_version"] for entry in data}
                version = versions.get(collection)
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise InputError.of(
            "RUN",
            url,
            f"does not answer as `infembed serve` does ({error})",
            f"check the URL, and the key in {KEY_VARIABLE}",
        ) from None
    if version is None:
        raise InputError.of("--collection", collection, f"{url} has {', '.join(versions)}", "give one of them")
    place = open_place(root, "--root")
    with errors_at(place, "--root"):
        runs = list(_runs(place, listing(place)))
    found = next((run for run in runs if run.manifest["identity"] == version), None)
    if found is None:
        raise InputError.of(
            "--root", root, f"has no index {version}, which {url} serves", "give the directory of its outputs"
        )
    return found


def _exists(path: str) -> bool:
    return is_uri(path) or not path.startswith("/") or Path(path).exists()


def _last(name: str) -> str:
    return PurePosixPath(name).name


def _partial(name: str) -> Iterator[str]:
    """Yield the folder of an unfinished output that a file is in."""
    path = PurePosixPath(name)
    yield from (str(parent) for parent in path.parents if parent.name.startswith(".") and parent.name.endswith(PARTIAL))
