"""`infembed runs`: which outputs there are, how far a run is, what an output was made from, and which can be removed.

The verbs read manifests and the states of unfinished runs; `runs promote` writes an alias, and `runs clean --yes` removes.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from infembed_ray.errors import InputError
from infembed_ray.progress import say
from infembed_ray.storage import places, releases
from infembed_ray.storage.leases import is_held, lease
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.places import Place, address, errors_at, listing, place_of
from infembed_ray.storage.steps import LATEST, MANIFEST, STATE_SUFFIX, STATES, newest, open_place, resolve

NEXT = {
    "synthesize": "infembed analyze records={0}  or  infembed train records={0} model=...",
    "train": "infembed evaluate models.trained={0} records=...  or  infembed index model={0} corpus=...",
    "index": "infembed serve index={0}",
    releases.RELEASE: "infembed runs promote {0} ALIAS.release",
}
"""Stage -> commands that take its output."""
REMEDY = "give the `output` of a stage or of a pipeline"
_WORK = re.compile(r"\.(?P<lease>.+)\.(partial|encoded)")
"""Folder in which a run works, with the name of the lease that the run holds."""

Run = dict[str, Any]
"""A run as JSON: its state, stage, identity and address, and the fields of NOTHING that are known of it."""
NOTHING: Run = dict.fromkeys(("created", "commit", "progress", "error", "next"), "")
NOTHING |= {"size": 0, "latest": False, "seconds": 0.0, "usd": 0.0, "gates": {}, "inputs": {}}


def _title(run: Run) -> str:
    """Return stage, identity, time, code, cost, size and address in one line."""
    parts = [f"{run['stage']} {run['identity']}", run["created"]]
    parts += [f"{run['seconds']:,.0f} s"] if run["seconds"] else []
    parts += [f"commit {run['commit']}"] if run["commit"] else []
    parts += [f"{run['usd']:.2f} USD"] if run["usd"] else []
    parts += [_readable(run["size"])] if run["size"] else []
    return "  ".join([*filter(None, parts), run["address"], *(["latest"] if run["latest"] else [])])


def _lines(run: Run) -> Iterator[str]:
    """Yield the title and, indented, what is left to do."""
    yield f"{run['state']}  {_title(run)}"
    yield from (f"  {name}: {run[name]}" for name in ("progress", "error", "next") if run[name])


def print_runs(directory: str, json: bool = False) -> None:
    """Print every output below a directory or URI, the newest last, and the unfinished runs.

    Raises:
        InputError: there is no such directory, or no output in it.
    """
    place = open_place(directory, "DIR")
    with errors_at(place, "DIR"):
        names = listing(place)
        runs = sorted(_finished(place, names), key=lambda run: str(run["created"]))
        runs += [_unfinished(place / name) for name in names if name.endswith(STATE_SUFFIX) and not _in_work(name)]
    if not runs:
        raise InputError.of("DIR", directory, "has no output of a stage", REMEDY)
    taken = {entry["address"] for run in runs for entry in run["inputs"].values()}
    runs = [run | {"next": ""} if run["address"] in taken else run for run in runs]  # the next step is done
    _print(runs, (line for run in runs for line in _lines(run)), json)


def print_run(run_address: str, json: bool = False) -> None:
    """Print a run, and for a finished one what it was made from, back to the first inputs.

    Args:
        run_address: of a finished or an unfinished output, an alias, or a directory whose `latest` names an output.

    Raises:
        InputError: there is no such run.
    """
    place = place_of(releases.followed(run_address, "RUN"))
    state = place.parent / f".{place.name}{STATE_SUFFIX}"
    with errors_at(place, "RUN"):
        run = run_at(address(place)) or (_unfinished(state) if places.read_text(state) is not None else None)
        if run is None:
            raise InputError.of("RUN", run_address, "is no output of a stage", "list them with `infembed runs DIR`")
        run["size"] = sum(listing(place_of(run["address"])).values())
    ancestry = list(_ancestry(run))
    lines = [*_lines(run), *([f"  gates: {run['gates']}"] if run["gates"] else [])]
    lines += [f"{'  ' * made['depth']}{made['name']}: {made['title']}" for made in ancestry]
    _print({**run, "ancestry": ancestry}, iter(lines), json)


def promote(release: str, alias: str, ungated: bool = False, json: bool = False) -> None:
    """Let an alias name a release; InputError as `releases.promote`."""
    before, now = releases.promote(release, alias, ungated)
    text = f"{alias} names {now}{f', before {before}' if before else ''}"
    _print({"alias": alias, "release": now, "before": before}, iter([text]), json)


def clean(directory: str, yes: bool = False, json: bool = False) -> None:
    """Print stale partial outputs and old versions that nothing names; remove them if `yes`.

    A partial output is stale if no run holds its lease. An old version is kept if it is the latest or a release, if an alias
    below the directory or a release names it, if a run holds its lease, or if a kept output was made from it.

    Raises:
        InputError: there is no such directory, or a run took the lease of an output that was to be removed.
    """
    root = open_place(directory, "DIR")
    with errors_at(root, "DIR"):
        names = listing(root)
        if not names:
            raise InputError.of("DIR", directory, "has no files", REMEDY)
        removable = [*_stale(root, names), *_old(root, names)]
        for entry in removable if yes else []:
            place, held = place_of(entry["address"]), entry["lease"]
            with lease(place.parent, held, "DIR", place) as still_held:
                still_held()
                places.delete(place / MANIFEST)  # first: without it the output is incomplete
                places.clear(place)
                places.delete(place.parent / f".{held}{STATE_SUFFIX}")
    done = "removed" if yes else "can be removed"
    lines = [f"{done}  {entry['what']}  {_readable(entry['size'])}  {entry['address']}" for entry in removable]
    hint = "" if yes or not removable else "; --yes removes them"
    lines.append(f"{done}: {_readable(sum(entry['size'] for entry in removable))} of {len(removable)} outputs{hint}")
    _print([{**entry, "removed": yes} for entry in removable], iter(lines), json)


def _finished(place: Place, names: Mapping[str, int]) -> Iterator[Run]:
    for name in names:
        path = PurePosixPath(name)
        if path.name == MANIFEST and not _in_work(name):
            where = place if str(path.parent) == "." else place / str(path.parent)
            if run := _read(where):
                named = (places.read_text(place / str(path.parent.parent / LATEST)) or "").strip()
                yield run | {"size": _size(names, path.parent), "latest": named == run["identity"]}


def _size(names: Mapping[str, int], folder: PurePosixPath) -> int:
    return sum(size for name, size in names.items() if PurePosixPath(name).is_relative_to(folder))


def _read(place: Place) -> Run | None:
    """Read the output at a place; None if it has no manifest, or another file of that name."""
    try:
        manifest = json.loads(places.read_text(place / MANIFEST) or "null")
    except ValueError:
        return None
    if not (isinstance(manifest, dict) and {"stage", "identity", "created", "seconds", "inputs"} <= manifest.keys()):
        return None
    commit = manifest.get("provenance", {}).get("code", {}).get("commit") or ""
    settings = manifest.get("settings", {})
    inputs = {stage: {"address": made["address"]} for stage, made in manifest.get("stages", {}).items()}
    inputs |= {
        name: {"address": entry["path"], "fingerprint": entry["fingerprint"]}
        for name, entry in manifest["inputs"].items()
        if entry["path"] != entry["fingerprint"]  # else it is a value, not a file
    }
    return {
        "state": "finished",
        "address": address(place),
        **NOTHING,
        **{name: manifest[name] for name in ("stage", "identity", "created", "seconds")},
        "commit": commit[:12] + commit[40:],  # with the mark of uncommitted changes
        "usd": manifest.get("usd") or 0.0,
        "gates": manifest.get("gates")
        or {name: limit for name, limit in (settings.get("gates") or {}).items() if limit is not None},
        "next": NEXT.get(manifest["stage"], "").format(address(place)),
        "inputs": inputs,
    }


def run_at(value: str) -> Run | None:
    """Return the finished run at an address, or the one that `latest` names there."""
    place = place_of(value)
    with errors_at(place, "RUN"):
        return _read(resolve(place))


def _unfinished(file: Place) -> Run:
    """Return a run from its state. A run without an error that holds no lease was killed."""
    state = places.read_json(file)
    running = is_held(file.parent, state["run"])
    work = [file.parent / f".{state['run']}.partial" / STATES, file.parent / state["run"] / STATES]
    resumes = state["stage"] != "train" or any(map(listing, work))
    return {
        "state": "running" if running else "failed" if state["error"] else "interrupted",
        "stage": state["stage"],
        "identity": state["run"],
        "address": address(file.parent / state["run"]),
        **NOTHING,
        "created": f"began {state['began']}, process {state['pid']} on {state['host']}, updated {state['updated']}",
        "progress": state["progress"],
        "error": state["error"] or "",
        "next": "" if running else f"{state['command']}  {'resumes it' if resumes else 'starts it again'}",
    }


def _ancestry(run: Run, depth: int = 1) -> Iterator[dict[str, Any]]:
    """Yield the inputs of a run and theirs, each after the output that was made from it."""
    for name, entry in run["inputs"].items():
        path = entry["address"]
        made = run_at(path)
        exists = is_uri(path) or not path.startswith("/") or Path(path).exists()
        gone = "" if exists else "  (no longer there)"
        title = _title(made) if made else f"{path}  {entry.get('fingerprint', '')}{gone}"
        yield {"depth": depth, "name": name, **entry, "title": title}
        if made is not None:
            yield from _ancestry(made, depth + 1)


def _stale(root: Place, names: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the work of runs that hold no lease."""
    for work in sorted({part for name in names if (part := _in_work(name))}):
        place = root / work
        match = _WORK.fullmatch(place.name)
        if match and not is_held(place.parent, match["lease"]):
            yield _entry("partial output", place, _size(names, PurePosixPath(work)), match["lease"])
    for state in (PurePosixPath(name) for name in names if name.endswith(STATE_SUFFIX)):
        run = state.name.removeprefix(".").removesuffix(STATE_SUFFIX)  # in a store, a run writes to its output's folder
        folder, place = state.parent / run, root / str(state.parent / run)
        size = _size(names, folder)
        if size and str(folder / MANIFEST) not in names and not is_held(place.parent, run):
            yield _entry("partial output", place, size, run)


def _entry(what: str, place: Place, size: int, held: str) -> dict[str, Any]:
    return {"what": what, "address": address(place), "size": size, "lease": held}


def _old(root: Place, names: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the finished outputs that nothing keeps."""
    runs = {run["address"]: run for run in _finished(root, names)}
    aliases = [places.read_json(root / name) or {} for name in names if name.endswith(releases.ALIAS)]
    todo = [alias["release"] for alias in aliases if "release" in alias]
    todo += [where for where, run in runs.items() if run["latest"] or run["stage"] == releases.RELEASE]
    todo += [where for where, run in runs.items() if is_held(place_of(where).parent, run["identity"])]
    kept: set[str] = set()
    while todo:
        made = run_at(todo.pop())
        if made is not None and made["address"] not in kept:
            kept.add(made["address"])
            todo += [entry["address"] for entry in made["inputs"].values()]
    for where, run in runs.items():
        place = place_of(where)
        if where not in kept and run["identity"] == place.name and newest(place.parent):
            yield _entry(f"old output of `{run['stage']}`", place, run["size"], run["identity"])


def _in_work(name: str) -> str:
    """Return the folder of an unfinished output that a file is in; empty if it is in none."""
    path = PurePosixPath(name)
    return next((str(parent) for parent in path.parents if _WORK.fullmatch(parent.name)), "")


def _print(values: Any, lines: Iterator[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values, indent=2, ensure_ascii=False))
        return
    for line in lines:
        say(line)


def _readable(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
