"""Local mirrors of the published data sets, for clusters without internet: `infembed data fetch|verify`.

A mirror holds repositories of the Hugging Face hub as they are, `<mirror>/<owner>/<name>/...`, but only the files that
the asked-for tasks read; `datasets.load_dataset` reads them too. Its `mirror.json` says of every repository at which
commit it was fetched, and of every file how long it is and its SHA-256.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from infembed_ray import storage
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.evaluation.tasks.repository import CARD, FORMAT, MANIFEST, Configs, configs, manifest, matching
from infembed_ray.object_store import scratch
from infembed_ray.progress import say, track

_HASH_BLOCK = 1 << 20

Files = dict[str, dict[str, Any]]
"""File of a repository -> its `size` and `sha256`, which is None where it is not known."""


def run(action: str, directory: str, tasks: Sequence[str]) -> int:
    """`fetch` or `verify`; returns the exit status: 1 where the mirror is not as it should be."""
    root = storage.local_path(directory, "data")
    if action == "fetch":
        fetch(root, tasks)
        return 0
    faults = verify(root, tasks)
    for fault in faults:
        say(f"data: {fault}")
    counted = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    say(f"data: {counted} in {root}" + ("; `infembed data fetch` mends what is damaged or missing" if faults else ""))
    return 1 if faults else 0


def fetch(root: Path, tasks: Sequence[str]) -> None:
    """Bring what some tasks read to a mirror. What is there already and whole is not brought again.

    `HF_ENDPOINT` and `HF_TOKEN` are honoured. A repository comes at the commit that the catalogue names; where it names
    none, at the one at which the mirror has it, else at the newest.

    Args:
        root: of the mirror; made if it is not there.
        tasks: names, as `catalogue.expand` takes them.

    Raises:
        InputError: no such task, or none that is published; the hub does not give a file, or not the right one.
    """
    if not tasks:
        raise InputError("tasks is empty; name some to fetch, for example followir or mair/dd-15")
    sources: dict[str, list[catalogue.Source]] = {}
    for name in catalogue.expand(tasks):
        for source in _published(name).sources:
            sources.setdefault(source.repository, []).append(source)
    storage.require_writable(root, "data")
    with (root / ".mirror.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the manifest has one writer at a time
        except BlockingIOError:
            say(f"data: another process fetches to {root}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for repository, of_repository in sources.items():
            _fetch(root, repository, of_repository)


def verify(root: Path, tasks: Sequence[str] = ()) -> list[str]:
    """What is wrong with a mirror, a line a fault: every file in its manifest is compared with what that says.

    Args:
        root: of the mirror.
        tasks: names of tasks that have to be in it, at the commits that the catalogue names.

    Raises:
        InputError: it has no manifest; no such task, or none that is published.
    """
    entries = [_published(name) for name in catalogue.expand(tasks)]
    repositories = manifest(root)
    if not repositories:
        raise InputError(f"data={root}: no {MANIFEST} to compare with; make the mirror by `infembed data fetch`")
    files = {f"{name}/{file}": entry for name, of in repositories.items() for file, entry in of["files"].items()}
    faults = []
    with track("verify", len(files)) as advance:
        for file, told in files.items():
            if fault := _fault(root / file, told["size"], told["sha256"]):
                faults.append(f"{file}: {fault}")
            advance()
    for entry in entries:
        try:
            catalogue.files(entry.name, str(root))
        except InputError as error:
            faults.append(str(error))
        for source in entry.sources:
            revision = repositories.get(source.repository, {}).get("revision")
            if source.revision and revision and revision != source.revision:
                faults.append(f"{source.repository}: of commit {revision}, not {source.revision}")
    return faults


def of_this_machine(task: str) -> Path:
    """A mirror in the scratch directory (`object_store.scratch`) in which a published task is, fetched if it was not.

    Raises:
        InputError: it is not there, and the hub does not give it.
    """
    root = scratch() / "data"
    try:
        catalogue.files(task, str(root))
    except InputError:
        try:
            fetch(root, [task])
        except InputError as error:
            raise InputError(
                f"tasks={task}: data is not set, and from the hub {error}; or set data=<directory> and fill it where "
                f"there is internet: infembed data fetch <directory> {task}"
            ) from error
    return root


def _published(name: str) -> catalogue.Entry:
    if name not in catalogue.TASKS:
        raise InputError(f"tasks={name}: your own data set; only published ones are fetched and verified, copy it")
    return catalogue.TASKS[name]


def _fetch(root: Path, name: str, sources: Sequence[catalogue.Source]) -> None:
    """Bring what is needed of one repository."""
    from huggingface_hub import HfApi  # half a second

    before = manifest(root).get(name, {"revision": None, "files": {}})
    with _told(name):
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        info = api.dataset_info(name, revision=sources[0].revision or before["revision"], files_metadata=True)
    listed: Files = {
        file.rfilename: {"size": file.size, "sha256": file.lfs.sha256 if file.lfs else None}
        for file in info.siblings or ()
    }
    if info.sha == before["revision"]:
        listed |= {file: entry for file, entry in before["files"].items() if entry["sha256"]}
    elif before["revision"]:
        before["files"] = {}  # of another commit
    if CARD not in listed or info.sha is None:
        raise InputError(f"{name} has no {CARD} at commit {info.sha}; is HF_ENDPOINT a hub?")
    listed[CARD] = _bring(root, name, info.sha, CARD, listed)
    card = configs((root / name / CARD).read_text(encoding="utf-8"), f"{name}/{CARD}")
    files = [CARD, *_needed(name, card, listed, sources)]
    # All that is needed stands in the manifest before it comes: nobody takes half a corpus for a whole one.
    kept: Files = {**before["files"], **{file: listed[file] for file in files}}
    with track(f"fetch {name}", len(files)) as advance:
        for file in files:
            _record(root, name, info.sha, kept)
            kept[file] = _bring(root, name, info.sha, file, listed)
            advance(note=file)
    _record(root, name, info.sha, kept)


def _needed(name: str, card: Configs, listed: Files, sources: Iterable[catalogue.Source]) -> list[str]:
    """The files of the parts that tasks read."""
    found: dict[str, None] = {}
    for source in sources:
        for config, split in source.parts or [(config, None) for config in card]:
            splits = card.get(config, {})
            files = [file for of in splits if split in (None, of) for file in matching(splits[of], listed)]
            if not files:
                raise InputError(
                    f"{name} has no files of {config}/{split or 'any split'}; was it published anew? Its "
                    f"card lists {', '.join(card)}"
                )
            found |= dict.fromkeys(files)
    return list(found)


def _bring(root: Path, name: str, commit: str, file: str, listed: Files) -> dict[str, Any]:
    """Have one file in the mirror, and say its size and SHA-256."""
    from huggingface_hub import hf_hub_download

    size, sha256 = listed[file]["size"], listed[file]["sha256"]
    path = root / name / file
    if ".." in PurePosixPath(file).parts or PurePosixPath(file).is_absolute():
        raise InputError(f"{name} lists {file}, outside of it; is HF_ENDPOINT a hub you trust?")
    if sha256 is None or _fault(path, size, sha256):
        path.unlink(missing_ok=True)
        with _told(name):
            hf_hub_download(
                name,
                file,
                repo_type="dataset",
                revision=commit,
                local_dir=root / name,
                endpoint=os.environ.get("HF_ENDPOINT"),
            )
        if fault := _fault(path, size, sha256):
            path.unlink(missing_ok=True)
            raise InputError(f"{name}/{file} came, but {fault}; fetch again")
    return {"size": path.stat().st_size, "sha256": sha256 or _sha256(path)}


def _record(root: Path, name: str, commit: str, files: Files) -> None:
    repositories = manifest(root) | {name: {"revision": commit, "files": dict(sorted(files.items()))}}
    storage.write_json(root / MANIFEST, {"format": FORMAT, "repositories": dict(sorted(repositories.items()))})


def _fault(file: Path, size: int | None, sha256: str | None) -> str | None:
    """What is wrong with a file of the mirror."""
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
        while block := stream.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Turn what the hub's client raises in the block into one line."""
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except (OSError, HTTPError) as error:
        raise InputError(
            f"{name} cannot be had ({in_one_line(error)[:300]}); check the network, HF_ENDPOINT, HF_TOKEN "
            "and that HF_HUB_OFFLINE is not set; what has come is kept, the same command goes on"
        ) from error
