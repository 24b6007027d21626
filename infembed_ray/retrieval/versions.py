"""The versions of an index in an output directory, and the pointer `latest`.

A version is published atomically (`steps.Step`) and never changes. Rolling back, or forward, verifies a version and then
points `latest` at it.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infembed_ray.errors import InputError
from infembed_ray.progress import counted, say
from infembed_ray.retrieval.index import IndexFacts, change_log, published
from infembed_ray.retrieval.shard_files import verify as verify_shard
from infembed_ray.storage.object_store import Folder, is_uri
from infembed_ray.storage.places import Place, address, errors_at, read_text
from infembed_ray.storage.steps import LATEST, MANIFEST, find_input, local_path, read_manifest, set_latest

_DELETED = ".deleted"
"""End of the name of a version that is being deleted."""


@dataclass(frozen=True)
class Version:
    """A published version.

    Attributes:
        id: name of its directory, which is its identity unless it was copied.
        created: in ISO 8601.
        current: whether `latest` names it.
    """

    id: str
    created: str
    facts: IndexFacts
    current: bool


def versions(output: str | Path) -> list[Version]:
    """All usable versions in an output, a directory or an object-store URI, the oldest first.

    Raises:
        InputError: there is no such directory.
    """
    root = _root(output)
    current = (read_text(root / LATEST) or "").strip()
    found = []
    for directory in published(root):
        try:
            manifest = read_manifest(directory, "index")
            facts = IndexFacts.of_manifest(manifest, directory)
        except InputError as fault:  # the output of another stage, or an old format
            say(f"index versions: left out: {fault}")
            continue
        found.append(Version(directory.name, str(manifest.get("created", "")), facts, directory.name == current))
    return sorted(found, key=lambda version: (version.created, version.facts.folded, version.id))


def use(output: str | Path, version: str) -> None:
    """Verify a version and point `latest` at it.

    Args:
        output: output of `infembed index`: a directory or an object-store URI.
        version: its id, or an unambiguous prefix of it.

    Raises:
        InputError: there is no such version, or one of its files or changes is missing or corrupted; `latest` is kept.
    """
    root = _root(output)
    meant = chosen(version, [found.id for found in versions(output)], root)
    verify(address(root / meant))
    set_latest(root, meant)


def chosen(version: str, known: Sequence[str], root: object) -> str:
    """The version in `root` whose id is given, or begins with what is given.

    Raises:
        InputError: there is none, or there are several.
    """
    meant = [version] if version in known else [id for id in known if id.startswith(version)] if version else []
    if len(meant) != 1:
        fault = "several versions begin with it" if meant else "no such version"
        raise InputError(f"version={version}: {fault} in {root}; it has {', '.join(meant or known) or 'none'}")
    return meant[0]


def prune(version: Place, keep: int | None = None) -> None:
    """Delete the oldest versions of a lineage, and the changes that all versions left have folded in.

    Any version that is served must be among those left. While a version cannot be read, the changes stay.

    Args:
        version: one of the lineage, which stays, as `latest` does.
        keep: versions to keep, the newest; None: all.

    Raises:
        InputError, OSError: a file cannot be deleted.
    """
    root, lineage = version.parent, IndexFacts.read(version).lineage
    if isinstance(root, Path):  # what an interrupted deletion left
        for left in root.glob(f".*{_DELETED}"):
            shutil.rmtree(left)
    every = versions(address(root))
    of_lineage = sorted(
        (found for found in every if found.facts.lineage == lineage),
        key=lambda found: (found.facts.folded, found.created),
    )
    old = [] if keep is None else [v for v in of_lineage[:-keep] if not v.current and v.id != version.name]
    for gone in old:
        with errors_at(root, "index"):
            _delete(root, gone.id)
        say(f"index: deleted version {gone.id} (keep_versions={keep})")
    kept = [found for found in of_lineage if found not in old]
    if len(every) == len(published(root)) + len(old):
        log = change_log(version, kept[0].facts)
        if pruned := log.prune(min(found.facts.folded for found in kept)):
            say(f"index: deleted {counted(pruned, 'segment')} of changes, which all versions have folded in")


def _delete(root: Place, version: str) -> None:
    """Delete a version, so that an interruption leaves none that looks whole."""
    if isinstance(root, Path):
        doomed = root / f".{version}{_DELETED}"
        (root / version).rename(doomed)
        shutil.rmtree(doomed)
    else:
        (root / version).delete(MANIFEST)
        (root / version).clear()


def verify(index: str | Path) -> int:
    """Verify all files of a version and all changes since, in bounded memory.

    Args:
        index: a version, or an output directory whose `latest` names one.

    Returns:
        Size of the files in bytes.

    Raises:
        InputError: it is no index, or a file or a change is missing or corrupted.
    """
    root = find_input(str(index), "index")
    facts = IndexFacts.read(root)
    try:
        for shard in facts.shards:
            verify_shard(root, shard)
    except InputError as damage:
        if isinstance(root, Path):  # the next build moves a damaged version aside
            raise
        raise InputError(f"{damage} (before it is built again, delete {root}/{MANIFEST})") from damage
    log = change_log(root, facts)
    log.check(facts.folded)
    deque(log.read(facts.folded), maxlen=0)
    return facts.bytes


def _root(output: str | Path) -> Place:
    if is_uri(str(output)):
        return Folder.open(str(output), "index")
    root = local_path(str(output), "index")
    if not root.is_dir():
        raise InputError(f"index={output}: no such directory; give the output of `infembed index`")
    return root
