"""`infembed index compact`, less Ray: a version and the changes made to it since become the next version.

Every shard is written again from what it answers with at one sequence: passages and vectors are there already, nothing is
encoded. Its index type, its memory and its recall floor are those of the version before, unless others are given. What is changed while
that goes on has higher sequences and stays in the log, where both versions read it: whichever is served, now or after
rolling back, answers the same.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from infembed_ray.config import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.retrieval import factory as factories
from infembed_ray.retrieval.changes import ChangeLog
from infembed_ray.retrieval.index import IndexFacts, changes_of
from infembed_ray.retrieval.live import LiveShard
from infembed_ray.retrieval.passages import schema, write_passages
from infembed_ray.retrieval.shards import (
    PASSAGES_FILE,
    VECTORS_FILE,
    Build,
    Shard,
    ShardFacts,
    build_shard,
    verify,
    write_vectors,
)
from infembed_ray.storage import Step, local_path, read_manifest, resolve, write_json

AUTO = "auto"
"""In place of an index type: the one that is chosen."""


@dataclass(frozen=True)
class Compaction:
    """What becomes the next version.

    Attributes:
        base: directory of the version that it begins with.
        version: of the base.
        facts: of the base.
        settings: that the next version is built with.
        until: the last change that is folded in.
        retyped: are the settings others than the base's?
    """

    base: Path
    version: str
    facts: IndexFacts
    settings: IndexSettings
    until: int
    retyped: bool = False

    @classmethod
    def of(
        cls, index: str, factory: str | None = None, memory_gib: float | None = None, recall_floor: float | None = None
    ) -> Compaction:
        """All changes there are now, to a version or to the newest of an output directory; or those of an interrupted one.

        Args:
            index: its directory.
            factory: type of the shards, `AUTO` for one that is chosen. None, here and below: as the base has it.
            memory_gib, recall_floor: see `Build`.

        Raises:
            InputError: there is no index, a change is missing, or FAISS makes no such type.
        """
        path = local_path(index, "index")
        if not path.is_dir():
            raise InputError(f"index={index}: no such directory; give the output of `infembed index`")
        base = resolve(path)
        facts = IndexFacts.read(base)
        manifest = read_manifest(base, "index")
        log = _log(base, facts)
        log.check(facts.folded)
        settings = IndexSettings.of(manifest["settings"], where=f"index={base}: settings of the build")
        if factory not in (None, AUTO):
            factories.new(factory, facts.dimension)
        given = {"factory": factory, "memory_gib": memory_gib, "recall_floor": recall_floor}
        changed = {name: value if value != AUTO else None for name, value in given.items() if value is not None}
        asked = settings.model_copy(update=changed)
        work = cls(base, manifest["identity"], facts, asked, log.last(), asked != settings)
        if work._begun.is_file():
            return replace(work, until=json.loads(work._begun.read_text(encoding="utf-8"))["until"])
        return work

    @property
    def changes(self) -> int:
        """Segments that are to be folded in."""
        return self.until - self.facts.folded

    def step(self) -> Step:
        """The next version's: known by the base and by what was changed."""
        digest = _log(self.base, self.facts).digest(self.facts.folded, self.until)
        names = {"version": self.version, "changes": f"{self.until}-{digest}"}
        return Step("index", self.settings, str(self.base.parent), {}, names)

    @property
    def _begun(self) -> Path:
        """Says how far a compaction goes that was begun: one that starts over, with what was changed since, never ends."""
        return self.base.parent / f".{self.version}.compaction"

    def begin(self) -> None:
        """From now on, whoever compacts this version goes on with this."""
        write_json(self._begun, {"until": self.until})

    def end(self) -> None:
        """It is done, or cannot be."""
        self._begun.unlink(missing_ok=True)

    def write_shard(self, number: int, root: Path, gpu: bool = False) -> ShardFacts:
        """Write one shard of the next version; one that an interrupted run finished stays.

        Args:
            number: of the shard.
            root: directory of the next version.
            gpu: train on this process' GPUs.

        Raises:
            InputError: a file of the base or a change is damaged; nothing fits the memory; recall is below the floor.
            OSError: the disk is full.
        """
        directory = root / self.facts.shards[number].name
        finished = directory.with_suffix(".json")
        if finished.is_file():
            written = ShardFacts(**json.loads(finished.read_text(encoding="utf-8")))
            with contextlib.suppress(InputError):  # the machine stopped before it was on the disk
                verify(root, written)
                return written
        base = Shard.open(self.base, self.facts.shards[number])
        log = _log(self.base, self.facts)
        live = LiveShard(base, log, number, len(self.facts.shards), self.facts.folded, self.until)
        directory.mkdir(exist_ok=True)
        columns = schema(self.facts.metadata)
        write_passages(directory / PASSAGES_FILE, columns, (passages for passages, _ in live.content()))
        vectors = (vectors for _, vectors in live.content())
        write_vectors(directory / VECTORS_FILE, vectors, len(live), self.facts.dimension)
        settings = self.settings
        try:
            build = Build(settings.factory, settings.memory_gib, settings.recall_floor, gpu, settings.shards)
            written = build_shard(directory, build)
        except InputError as error:
            self.end()  # what changes next may help
            raise InputError(
                f"{error} (`infembed index compact` takes memory_gib, recall_floor and factory, which auto leaves to be "
                "chosen; another number of shards or dimensions takes a new build)"
            ) from error
        write_json(finished, asdict(written))
        return written

    def finish(self, root: Path, shards: Sequence[ShardFacts]) -> IndexFacts:
        """The facts of the next version, all of whose shards are written."""
        for file in root.glob("*.json"):
            file.unlink()
        passages = sum(shard.passages for shard in shards)
        return replace(self.facts, passages=passages, shards=shards, folded=self.until)


def _log(base: Path, facts: IndexFacts) -> ChangeLog:
    return ChangeLog(changes_of(base, facts), facts.metadata, facts.dimension)
