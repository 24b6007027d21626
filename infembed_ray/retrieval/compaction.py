"""Compaction: a version and the changes since become the next version of an index.

Each shard is written again from its state at one sequence of the write-ahead log. Passages and vectors exist already, so
nothing is encoded. Index type, memory and recall floor are those of the base, unless others are given. Changes made meanwhile
have higher sequences. They stay in the log, which both versions read, so both give the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from infembed_ray.config.retrieval import CompactSettings, IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.progress import counted
from infembed_ray.retrieval import factory as factories
from infembed_ray.retrieval.index import IndexFacts, as_published, change_log
from infembed_ray.retrieval.passages import schema, write_passages
from infembed_ray.retrieval.shard_files import (
    PASSAGES_FILE,
    VECTORS_FILE,
    ShardFacts,
    finished_shard,
    mark_finished,
    shard_directory,
    verify_local,
)
from infembed_ray.retrieval.shards import Build, Shard, build_shard, write_vectors
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.work import shard_name
from infembed_ray.storage.dry_run import state
from infembed_ray.storage.places import Place, address, delete, read_json, write_json
from infembed_ray.storage.steps import Published, Step, find_input, read_manifest

AUTO = "auto"
"""In place of an index type: let `factory.choose` choose it."""


@dataclass(frozen=True)
class Compaction:
    """One compaction.

    Attributes:
        base, version, facts: place, identity and facts of the version to start from.
        settings: that the next version is built with.
        until: sequence of the last change to fold in.
        retyped: whether the settings differ from those of the base.
    """

    base: Place
    version: str
    facts: IndexFacts
    settings: IndexSettings
    until: int
    retyped: bool = False

    @classmethod
    def open(
        cls, index: str, factory: str | None = None, memory_gib: float | None = None, recall_floor: float | None = None
    ) -> Compaction:
        """Plan the compaction of all changes until now, or continue an interrupted one.

        Args:
            index: a version, or an output directory whose `latest` names one.
            factory: index type of the shards, or `AUTO`. None, here and below: as in the base.
            memory_gib, recall_floor: see `Build`.

        Raises:
            InputError: there is no index, a change is missing, or FAISS makes no such type.
        """
        base = find_input(index, "index")
        manifest = read_manifest(base, "index")
        facts = IndexFacts.of_manifest(manifest, base)
        log = change_log(base, facts)
        log.check(facts.folded)
        given = {**manifest["settings"], "vectors": facts.vectors}  # older versions have no such setting
        settings = IndexSettings.from_mapping(given, where="index.")
        if factory not in (None, AUTO):
            factories.new(factory, facts.dimension)
        new = {"factory": factory, "memory_gib": memory_gib, "recall_floor": recall_floor}
        changed = {name: value if value != AUTO else None for name, value in new.items() if value is not None}
        asked = settings.model_copy(update=changed)
        work = cls(base, manifest["identity"], facts, asked, log.last(), asked != settings)
        return replace(work, **(read_json(work._record) or {}))

    @property
    def changes(self) -> int:
        """Segments to fold in."""
        return self.until - self.facts.folded

    def step(self) -> Step:
        """The step that publishes the next version; its identity covers the base and the changes."""
        digest = change_log(self.base, self.facts).digest(self.facts.folded, self.until)
        names = {"version": self.version, "changes": f"{self.until}-{digest}"}
        return Step("index", self.settings, address(self.base.parent), {}, names)

    def published(self) -> Published:
        """The base, where there is nothing to fold in."""
        return as_published(self.base)

    @property
    def _record(self) -> Place:
        """File with `until` of a compaction that has begun: one that restarted with newer changes might never end."""
        return self.base.parent / f".{self.version}.compaction"

    def begin(self) -> None:
        """Record the compaction; a later one of this version continues it."""
        write_json(self._record, {"until": self.until})

    def end(self) -> None:
        """Remove the record: the compaction is finished or cannot be."""
        delete(self._record)

    def write_shard(self, number: int, root: Place, gpu: bool = False) -> ShardFacts:
        """Write one shard of the next version; a shard that an interrupted run finished stays.

        Raises:
            InputError: a file of the base or a change is damaged; no type fits the memory; recall is below the floor.
            OSError: the disk is full.
        """
        name = shard_name(number)
        if done := finished_shard(root, name):
            return done
        verify_local(self.base, self.facts.shards[number])  # the next version gets new checksums
        base = Shard.open(self.base, self.facts.shards[number])
        log = change_log(self.base, self.facts)
        live = LiveShard(base, log, number, self.facts.folded, self.until)
        settings = self.settings
        build = Build(
            settings.factory, settings.memory_gib, settings.recall_floor, gpu, settings.shards, settings.lexical
        )
        with shard_directory(root, name) as directory:
            columns = schema(self.facts.metadata)
            write_passages(directory / PASSAGES_FILE, columns, (passages for passages, _ in live.content()))
            vectors = (vectors for _, vectors in live.content())
            write_vectors(directory / VECTORS_FILE, vectors, len(live), self.facts.dimension, self.facts.vectors)
            return mark_finished(root, name, directory, self._built(directory, build))

    def _built(self, directory: Path, build: Build) -> ShardFacts:
        try:
            return build_shard(directory, build)
        except InputError as error:
            self.end()  # the next attempt takes newer changes, which may help
            raise InputError(
                f"{error} (`infembed index compact` takes factory, `auto` to have one chosen, memory_gib and recall_floor; "
                "another number of shards or dimensions needs a new build)"
            ) from error

    def next_facts(self, shards: Sequence[ShardFacts]) -> IndexFacts:
        """The facts of the next version, from those of its shards."""
        passages = sum(shard.passages for shard in shards)
        return replace(self.facts, passages=passages, shards=shards, folded=self.until)


def describe(settings: CompactSettings) -> Iterator[str]:
    """Yield what a compaction would do, line by line; InputError as `Compaction.open`."""
    work = Compaction.open(settings.index, settings.factory, settings.memory_gib, settings.recall_floor)
    if not work.changes and not work.retyped:
        yield f"no changes since {work.version}, so there is nothing to do"
    elif not (yield from state(work.step())):
        yield f"{work.version} and {counted(work.changes, 'segment')} of changes, {counted(len(work.facts.shards), 'shard')}"
