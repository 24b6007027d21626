"""The versions of an index in an output, their facts in the manifest, and the pointer `latest`.

A version is published atomically (`steps.Step`) and never changes. Rolling back, or forward, verifies a version and then
points `latest` at it.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from infembed_ray.config.retrieval import FieldType, Precision
from infembed_ray.errors import InputError
from infembed_ray.progress import counted, say
from infembed_ray.retrieval import shard_files
from infembed_ray.retrieval.shard_files import ShardFacts
from infembed_ray.retrieval.updates.write_ahead_log import ChangeLog, LogFault
from infembed_ray.storage import steps
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import Place, address, delete, errors_at
from infembed_ray.storage.steps import MANIFEST, Published, Step, find_input, open_place, read_manifest

FORMAT = 3
"""Format of the files and facts, part of a version's identity."""
CHANGES = "changes"
"""Directory beside the versions, with the write-ahead log of each lineage."""


@dataclass(frozen=True, kw_only=True)
class IndexFacts:
    """The facts of an index, stored under `index` in its manifest.

    Attributes:
        encoder: `InstructionEncoder.fingerprint()` of the encoder that built it.
        model: directory or hub name of that encoder at build time.
        template: how the encoder joins instruction and query; informational, the fingerprint covers it.
        dimension: of the vectors.
        dimensions: to load the encoder with (`InstructionEncoder.from_pretrained(dimensions=...)`).
        metadata: columns of the passages besides id and text.
        chunk_tokens, chunk_overlap: as of `IndexSettings`.
        title: column of the corpus that comes before the text, where a row has it; None: titles are left out.
        lineage: identity of the first version; versions of a lineage share their write-ahead log.
        folded: sequence of the last change that the shards include.
    """

    encoder: str
    model: str
    template: str
    dimension: int
    dimensions: int | None = None
    passages: int
    metadata: Mapping[str, FieldType] = field(default_factory=dict)
    chunk_tokens: int | None = None
    chunk_overlap: int = 0
    title: str | None = None
    shards: Sequence[ShardFacts]
    lineage: str
    folded: int = 0
    format: int = FORMAT

    @property
    def vectors(self) -> Precision:
        """Precision of the vectors."""
        return self.shards[0].vectors

    @property
    def lexical(self) -> bool:
        """Whether its shards have a lexical index."""
        return bool(self.shards) and all(shard.lexical for shard in self.shards)

    @property
    def recall_at_10(self) -> float:
        """Mean over the shards, weighted by passages."""
        recalled = sum(shard.recall_at_10 * shard.passages for shard in self.shards)
        return round(recalled / self.passages, 4) if self.passages else 1.0

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(shard.bytes for shard in self.shards)

    def as_json(self) -> dict[str, Any]:
        """The facts for the manifest, with the totals over the shards. An external engine has no shards and measures nothing."""
        totals = {"recall_at_10": self.recall_at_10, "bytes": self.bytes} if self.shards else {}
        return {**asdict(self), **totals}

    @classmethod
    def read(cls, root: Place) -> IndexFacts:
        """Read the facts of a published index; InputError as `of_manifest`."""
        return cls.of_manifest(read_manifest(root, "index"), root)

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any], root: object, name: str = "index") -> IndexFacts:
        """The facts in a manifest; InputError if it is of no index or another format, or damaged."""
        if "index" not in manifest:
            stage = manifest.get("stage", "another program")
            raise InputError.of(name, root, f"the output of `{stage}`", "give one of `infembed index`")
        values = manifest["index"]
        if (written := values.get("format")) != FORMAT:
            fault = f"an index of format {written}, written by {manifest.get('code_version', 'another version')}"
            raise InputError.of(name, root, fault, "build it again with `infembed index`")
        try:
            own = {f.name: values[f.name] for f in fields(cls) if f.name in values}
            return cls(**{**own, "shards": [ShardFacts.from_json(shard) for shard in values["shards"]]})
        except (TypeError, KeyError) as error:
            fault = f"{MANIFEST} does not describe an index ({error})"
            raise InputError.of(name, root, fault, "restore it, or build the index again") from error

    def require_encoder(self, fingerprint: str, place: object) -> None:
        """Raise InputError unless this encoder built the index at a place."""
        if fingerprint != self.encoder:
            fault = f"built by another encoder ({self.encoder}, {self.model}) than the one given ({fingerprint})"
            raise InputError.of("index", place, fault, "build it again with this encoder, or use the one that built it")


@dataclass(frozen=True)
class IndexVersion:
    """A published version.

    Attributes:
        id: name of its directory, which is its identity unless it was copied.
        current: whether `latest`, or the alias in an external engine, names it.
    """

    id: str
    manifest: Mapping[str, Any]
    facts: IndexFacts
    current: bool

    @property
    def created(self) -> str:
        """Time of its build, in ISO 8601."""
        return str(self.manifest.get("created", ""))


def change_log(root: Place, facts: IndexFacts) -> ChangeLog:
    """The write-ahead log of a published index."""
    directory, chunked = root.parent / CHANGES / facts.lineage, bool(facts.chunk_tokens)
    return ChangeLog(directory, facts.metadata, facts.dimension, len(facts.shards), chunked)


def versions(output: str | Place) -> list[IndexVersion]:
    """All usable versions in an output, the oldest first; InputError if there is no such directory."""
    root = open_place(output, "index") if isinstance(output, str) else output
    if isinstance(root, Path) and not root.is_dir():
        raise InputError.of("index", output, "no such directory", "give the output of `infembed index`")
    current = steps.newest(root)
    usable = []
    for place in _places(root):
        try:
            manifest = read_manifest(place, "index")
            facts = IndexFacts.of_manifest(manifest, place)
        except InputError as fault:  # the output of another stage, or another format
            say(f"index versions: left out: {fault}")
            continue
        usable.append(IndexVersion(place.name, manifest, facts, place.name == current))
    return sorted(usable, key=lambda version: (version.created, version.facts.folded, version.id))


def _places(root: Place) -> list[Place]:
    """The published outputs below a place: its directories with a manifest, without hidden ones."""
    names = root.folders() if isinstance(root, Folder) else [file.parent.name for file in root.glob(f"*/{MANIFEST}")]
    return [root / name for name in names if not name.startswith(".") and (root / name / MANIFEST).is_file()]


def use(output: str | Path, version: str) -> None:
    """Verify a version of an output, given by its id or an unambiguous prefix, and point `latest` at it.

    Raises:
        InputError: there is no such version, or one of its files or changes is missing or corrupted; `latest` is kept.
    """
    root = open_place(str(output), "index")
    meant = chosen(version, [usable.id for usable in versions(root)], root)
    verify(address(root / meant))
    steps.set_latest(root, meant)


def chosen(version: str, ids: Sequence[str], root: object) -> str:
    """The one of the `ids` in `root` that is `version`, or begins with it; InputError if there is none or several."""
    meant = [version] if version in ids else [id for id in ids if id.startswith(version)] if version else []
    if len(meant) != 1:
        fault = f"{'several versions begin with it' if meant else 'no such version'} in {root}"
        raise InputError.of("version", version, fault, f"it has {', '.join(meant or ids) or 'none'}")
    return meant[0]


def verify(index: str | Path) -> int:
    """Verify all files of a version, or of the latest of an output, and all changes since, in bounded memory.

    Returns the size of the files in bytes. InputError if it is no index, or a file or a change is missing or corrupted.
    """
    root = find_input(str(index), "index")
    facts = IndexFacts.read(root)
    try:
        for shard in facts.shards:
            shard_files.verify(root, shard)
    except InputError as damage:
        if isinstance(root, Path):  # the next build moves a damaged version aside
            raise
        raise InputError(f"{damage} (before it is built again, delete {root}/{MANIFEST})") from damage
    log = change_log(root, facts)
    log.check(facts.folded)
    deque(log.read(facts.folded), maxlen=0)
    return facts.bytes


def prune(version: Place, keep: int | None = None) -> None:
    """Delete the oldest versions of a lineage, and the changes that all versions left have folded in.

    Any version that is served must be among those left. While a version cannot be read, the changes stay.

    Args:
        version: one of the lineage, which stays, as `latest` does.
        keep: versions to keep, the newest; None: all.

    Raises:
        InputError, OSError: a file cannot be deleted.
    """
    root, facts = version.parent, IndexFacts.read(version)
    usable = versions(root)
    of_lineage = [each for each in usable if each.facts.lineage == facts.lineage]
    old = [] if keep is None else [v for v in of_lineage[:-keep] if not v.current and v.id != version.name]
    for gone in old:
        place = root / gone.id
        with errors_at(root, "index"):
            delete(place / MANIFEST)  # first, so that an interruption leaves no version that looks whole
            place.clear() if isinstance(place, Folder) else shutil.rmtree(place)
        say(f"index: deleted version {gone.id} (keep_versions={keep})")
    if len(usable) == len(_places(root)) + len(old):
        folded = min(each.facts.folded for each in of_lineage if each not in old)
        if pruned := change_log(version, facts).prune(folded):
            say(f"index: deleted {counted(pruned, 'segment')} of changes, which all versions have folded in")


# ------------------------------------------------------------------------------------------------- before a build


def finished(step: Step) -> Published | None:
    """The version that an earlier run of the step published, or the newest that was compacted from it; None if there is none.

    A damaged one is moved aside first.

    Raises:
        LogFault: the versions were deleted, and their log, which a new version would read, lacks its first changes.
    """
    if step.remote is None and (step.path / MANIFEST).is_file() and (damage := _damage(step.path)):
        aside = step.root / f".{step.identity}.damaged-{secrets.token_hex(4)}"
        step.path.rename(aside)
        say(f"index: a damaged version is moved to {aside.name} and built again: {damage}")
        return None
    for version in compacted_from(step):
        if damage := _damage(version):
            say(f"index: {version.name} is left out: {damage}")
            continue
        steps.set_latest(step.place, version.name)
        say(f"index: {version.name} was compacted from this build, with the changes made through the API")
        return as_published(version)
    if (done := step.finished()) is None:
        try:
            ChangeLog(step.place / CHANGES / step.identity, {}, 0).check(0)
        except LogFault as fault:
            raise LogFault(f"{fault}; if you deleted all versions of this log, delete it, too") from fault
    return done


def _damage(version: Place) -> InputError | None:
    """What is wrong with the files of a version. Those in an object store are not read."""
    try:
        for shard in IndexFacts.read(version).shards if isinstance(version, Path) else ():
            shard_files.verify(version, shard)
    except InputError as damage:
        return damage
    return None


def as_published(version: Place) -> Published:
    """Describe a version that an earlier run published."""
    path, uri = (version, None) if isinstance(version, Path) else (Path(version.name), version.uri)
    return Published(path, read_manifest(version, "index"), fresh=False, uri=uri)


def compacted_from(step: Step) -> list[Place]:
    """The versions that were compacted from the one of a step, the newest first; copies under other names do not count."""
    if isinstance(step.place, Path) and not step.place.is_dir():
        return []
    with errors_at(step.place, "output"):
        own = [version for version in versions(step.place) if version.facts.lineage == step.identity]
    return [step.place / v.id for v in reversed(own) if step.identity != v.id == v.manifest["identity"]]


def latest_of(step: Step) -> tuple[Place, IndexFacts] | None:
    """The version in the output of a step that `latest` names, and its facts; None if there is none."""
    with contextlib.suppress(InputError):
        root = find_input(address(step.place), "index")
        return root, IndexFacts.read(root)
    return None


def warn_of_changes(step: Step) -> None:
    """Warn if the version that is served has changes that a build will not have."""
    if (latest := latest_of(step)) and latest[1].lineage != step.identity and (last := change_log(*latest).last()):
        changes = f"{latest[0].name} has {counted(last, 'segment')} of changes made through the API"
        say(f"index: {changes}; this build has only the corpus (`infembed index compact` keeps the changes)")
