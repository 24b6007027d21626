"""The versions of an index: what an output directory holds, and which of them `latest` names.

A version is published whole or not at all (`storage.Step`), and never changed. To go back to one, or forward again, is to
let `latest` name it, after everything in it was read and found to be what was written.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from infembed_ray.errors import InputError
from infembed_ray.progress import say
from infembed_ray.retrieval.changes import ChangeLog
from infembed_ray.retrieval.index import IndexFacts, changes_of
from infembed_ray.retrieval.shards import verify as verify_shard
from infembed_ray.storage import LATEST, MANIFEST, Published, Step, local_path, point, read_manifest


@dataclass(frozen=True)
class Version:
    """A published version.

    Attributes:
        id: the name of its directory: its identity, unless it is a copy that somebody made.
        created: in ISO 8601.
        passages, recall_at_10, bytes: see `IndexFacts`.
        lineage: identity of the version that it and others were made of by compaction.
        folded: sequence of the last change that is in it.
        current: does `latest` name it?
    """

    id: str
    created: str
    passages: int
    recall_at_10: float
    bytes: int
    lineage: str
    folded: int
    current: bool


def versions(output: str | Path) -> list[Version]:
    """All versions in an output directory that can be used, the oldest first.

    Raises:
        InputError: no such directory.
    """
    root = _root(output)
    current = _current(root)
    found = []
    for directory in (file.parent for file in root.glob(f"[!.]*/{MANIFEST}")):
        try:
            facts = IndexFacts.read(directory)
        except InputError as fault:  # the output of something else, or of a format of old
            say(f"index versions: left out: {fault}")
            continue
        found.append(
            Version(
                id=directory.name,
                created=str(read_manifest(directory, "index").get("created", "")),
                passages=facts.passages,
                recall_at_10=facts.recall_at_10,
                bytes=facts.bytes,
                lineage=facts.lineage,
                folded=facts.folded,
                current=directory.name == current,
            )
        )
    return sorted(found, key=lambda version: (version.created, version.folded, version.id))


def use(output: str | Path, version: str) -> None:
    """Let `latest` name a version, older or newer, if all of it is there.

    Args:
        output: of `infembed index`.
        version: its id, or the first digits of it that no other begins with.

    Raises:
        InputError: there is no such version, or a file of it or a change made to it since is missing or corrupted;
            `latest` names what it named.
    """
    root = _root(output)
    known = [found.id for found in versions(root)]
    meant = [version] if version in known else [id for id in known if id.startswith(version)] if version else []
    if len(meant) != 1:
        fault = "several versions begin so" if meant else "no such version"
        raise InputError(f"version={version}: {fault} in {root}; it has {', '.join(meant or known) or 'none'}")
    verify(root / meant[0])
    point(root, meant[0])


def verify(index: str | Path) -> int:
    """Read all files of a version and all changes made to it since, in bounded memory.

    Args:
        index: its directory, or the output directory whose `latest` names it.

    Returns:
        Bytes of the files.

    Raises:
        InputError: it is no index, or a file or a change is missing or corrupted.
    """
    root = _root(index)
    if not (root / MANIFEST).is_file() and (current := _current(root)):
        root = root / current
    facts = IndexFacts.read(root)
    for shard in facts.shards:
        verify_shard(root, shard)
    log = ChangeLog(changes_of(root, facts), facts.metadata, facts.dimension)
    log.check(facts.folded)
    deque(log.read(facts.folded), maxlen=0)
    return facts.bytes


def finished(step: Step) -> Published | None:
    """The version that a step is to make, if an earlier run did and all of it is there; one that is damaged goes aside."""
    if (step.path / MANIFEST).is_file():
        try:
            for shard in IndexFacts.read(step.path).shards:
                verify_shard(step.path, shard)
        except InputError as damage:
            aside = step.root / f".{step.identity}.damaged-{secrets.token_hex(4)}"
            step.path.rename(aside)
            say(f"index: it is made again, {aside.name} is what is left of it: {damage}")
    return step.finished()


def _root(output: str | Path) -> Path:
    root = local_path(str(output), "index")
    if not root.is_dir():
        raise InputError(f"index={output}: no such directory; give the output of `infembed index`")
    return root


def _current(root: Path) -> str | None:
    pointer = root / LATEST
    return pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
