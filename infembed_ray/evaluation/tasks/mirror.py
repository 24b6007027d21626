"""Mirrors of the published data sets, for machines without internet: `infembed data fetch|verify`.

A mirror holds dataset repositories of the Hugging Face hub, `<mirror>/<owner>/<name>/...`, with only the files that the
given tasks read; `datasets.load_dataset` can read them too. `mirror.json` records the commit of each repository, and the
size and SHA-256 of each file, so `verify` needs no network.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from infembed_ray.errors import InputError, in_one_line
from infembed_ray.evaluation.tasks.registry import TASKS, Entry, Source, expand, find
from infembed_ray.evaluation.tasks.repository import CARD, FORMAT, MANIFEST, NOT_FETCHED, configs, manifest, matching
from infembed_ray.progress import counted, say, track
from infembed_ray.storage import durable, steps
from infembed_ray.storage.object_store import scratch

Files = dict[str, dict[str, Any]]
"""File of a repository -> `size` and `sha256`, None where unknown."""


def run(action: str, directory: str, tasks: Sequence[str]) -> int:
    """Run `fetch` or `verify`; return the exit status, 1 if `verify` finds faults."""
    root = steps.local_path(directory, "data")
    if action == "fetch":
        fetch(root, tasks)
        return 0
    faults = verify(root, tasks)
    for fault in faults:
        say(f"data: {fault}")
    say(
        f"data: {counted(len(faults), 'fault')} in {root}"
        + ("; `infembed data fetch` replaces missing and damaged files" if faults else "")
    )
    return 1 if faults else 0


def fetch(root: Path, tasks: Sequence[str]) -> None:
    """Download the files of tasks to a mirror. Files that are there and whole are kept.

    `HF_ENDPOINT` and `HF_TOKEN` apply. A repository comes at the commit in the catalogue; if the catalogue has none, at
    the commit in the mirror, else at the newest.

    Args:
        root: directory of the mirror, created if necessary.
        tasks: names, as `registry.expand` takes them, also of data sets of the hub.

    Raises:
        InputError: a task is unknown or not published, or the hub does not provide a file as it lists it.
    """
    if not tasks:
        raise InputError("tasks is empty; name tasks to fetch, for example followir or mair/dd-15")
    sources: dict[str, list[Source]] = {}
    for entry in _published(tasks):
        for source in entry.sources:
            sources.setdefault(source.repository, []).append(source)
    steps.require_writable(root, "data")
    say(f"data: fetching to {root}; another process that fetches to it finishes first")
    with durable.exclusive_lock(root / ".mirror.lock", wait=True):  # the manifest has one writer at a time
        for repository, of_repository in sources.items():
            _fetch(root, repository, of_repository)


def fetch_to_scratch(task: str) -> Path:
    """Return the mirror in this machine's scratch directory; fetch a published task to it if necessary.

    Raises:
        InputError: the task is not there and the hub does not provide it.
    """
    root = scratch() / "data"
    (own,) = _published([task])
    try:
        own.files(root)
    except InputError:
        try:
            fetch(root, [task])
        except InputError as error:
            absent = "" if task in TASKS else "no such directory, "
            raise InputError(
                f"tasks={task}: {absent}data is not set, and from the hub {error}; or set data=<directory> and fill it on a "
                f"machine with internet: infembed data fetch <directory> {task}"
            ) from error
    return root


def verify(root: Path, tasks: Sequence[str] = ()) -> list[str]:
    """Compare every file of a mirror with its manifest; return one line per fault.

    Args:
        root: directory of the mirror.
        tasks: names of tasks that must be in it, at the commits of the catalogue.

    Raises:
        InputError: the mirror has no manifest, or a task is unknown or not published.
    """
    entries = _published(tasks)
    repositories = manifest(root)
    if not repositories:
        raise InputError(f"data={root}: no {MANIFEST} to compare with; make the mirror by `infembed data fetch`")
    files = {f"{name}/{file}": entry for name, of in repositories.items() for file, entry in of["files"].items()}
    faults = []
    with track("verify", len(files)) as advance:
        for file, entry in files.items():
            if fault := _fault(root / file, entry):
                faults.append(f"{file}: {fault}")
            advance()
    for task in entries:
        try:
            task.files(root)
        except InputError as error:
            faults.append(str(error))
        for source in task.sources:
            revision = repositories.get(source.repository, NOT_FETCHED)["revision"]
            if source.revision and revision and revision != source.revision:
                faults.append(f"{source.repository}: has commit {revision}, not {source.revision}")
    return faults


def _published(tasks: Sequence[str]) -> list[Entry]:
    entries = []
    for name in expand(tasks):
        if (entry := find(name)) is None:
            raise InputError(
                f"tasks={name}: is not on the hub; only data sets of the hub are fetched and verified, copy it"
            )
        entries.append(entry)
    return entries


def _fetch(root: Path, name: str, sources: Sequence[Source]) -> None:
    """Download what tasks read from one repository, and record it in the manifest."""
    from huggingface_hub import HfApi  # takes half a second

    before = manifest(root).get(name, NOT_FETCHED)
    with _hub_errors(name):
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        info = api.dataset_info(name, revision=sources[0].revision or before["revision"], files_metadata=True)
    listed: Files = {
        file.rfilename: {"size": file.size, "sha256": file.lfs.sha256 if file.lfs else None}
        for file in info.siblings or ()
    }
    recorded: Files = before["files"] if info.sha == before["revision"] else {}
    listed |= {file: entry for file, entry in recorded.items() if entry["sha256"]}
    if CARD not in listed or info.sha is None:
        raise InputError(f"{name} has no {CARD} at commit {info.sha}; is HF_ENDPOINT a hub?")
    _download(root / name, name, info.sha, {CARD: listed[CARD]})
    needed = [CARD, *_needed(root, name, listed, sources)]
    recorded = recorded | {file: listed[file] for file in needed}
    _record(root, name, info.sha, recorded)  # before the download: an incomplete corpus is then known as incomplete
    _download(root / name, name, info.sha, {file: listed[file] for file in needed})
    _record(root, name, info.sha, recorded)
    say(f"data: {name}: {counted(len(needed), 'file')} at commit {info.sha}")


def _needed(root: Path, name: str, listed: Files, sources: Iterable[Source]) -> list[str]:
    """Return the files of the parts that tasks read."""
    card = configs((root / name / CARD).read_text(encoding="utf-8"), f"{name}/{CARD}")
    found: dict[str, None] = {}
    for source in sources:
        for config, split in source.parts or [(config, None) for config in card]:
            splits = card.get(config, {})
            files = [file for key in splits if split in (None, key) for file in matching(splits[key], listed)]
            if not files:
                raise InputError(
                    f"{name} has no files of {config}/{split or 'any split'}; its card lists {', '.join(card)}. "
                    "Has the data set changed?"
                )
            found |= dict.fromkeys(files)
    if outside := [file for file in found if ".." in PurePosixPath(file).parts or file.startswith("/")]:
        raise InputError(f"{name} lists {outside[0]}, outside of the repository; do you trust HF_ENDPOINT?")
    return list(found)


def _download(directory: Path, name: str, commit: str, files: Files) -> None:
    """Download files that are missing or damaged, check them, and complete their SHA-256."""
    from huggingface_hub import snapshot_download

    wrong = [file for file, entry in files.items() if entry["sha256"] is None or _fault(directory / file, entry)]
    for file in wrong:
        if _fault(directory / file, files[file]):
            (directory / file).unlink(missing_ok=True)  # the hub's client may take a damaged file for a whole one
    if wrong:
        with _hub_errors(name):
            snapshot_download(
                name,
                repo_type="dataset",
                revision=commit,
                local_dir=directory,
                allow_patterns=[glob.escape(file) for file in wrong],
                endpoint=os.environ.get("HF_ENDPOINT"),
            )
    for file in wrong:
        if fault := _fault(directory / file, files[file]):
            (directory / file).unlink(missing_ok=True)
            raise InputError(f"{name}/{file} was downloaded, but is {fault}; fetch again")
        files[file]["sha256"] = files[file]["sha256"] or _sha256(directory / file)


def _record(root: Path, name: str, commit: str, files: Files) -> None:
    repositories = manifest(root) | {name: {"revision": commit, "files": dict(sorted(files.items()))}}
    durable.replace_json(root / MANIFEST, {"format": FORMAT, "repositories": dict(sorted(repositories.items()))})


def _fault(file: Path, entry: dict[str, Any]) -> str | None:
    """Say what is wrong with a file of the mirror; None if it is as recorded."""
    size, sha256 = entry["size"], entry["sha256"]
    if not file.is_file():
        return "missing"
    if size is not None and file.stat().st_size != size:
        return f"damaged: {file.stat().st_size} bytes, not {size}"
    if sha256 is not None and _sha256(file) != sha256:
        return f"damaged: its SHA-256 is not {sha256}"
    return None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turn errors of the hub's client into one line."""
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except (OSError, HTTPError) as error:
        raise InputError(
            f"{name} cannot be downloaded ({in_one_line(error)[:300]}); check the network, HF_ENDPOINT, HF_TOKEN and that "
            "HF_HUB_OFFLINE is not set; the same command continues with what is missing"
        ) from error
