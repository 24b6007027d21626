"""Compaction: a version and the changes since become the next version of an index, without encoding.

Each shard is written again from its state at one sequence of the write-ahead log. Changes made meanwhile stay in the log, which
both versions read, so both give the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from infembed_ray.config.retrieval import CompactSettings, IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.progress import counted, say
from infembed_ray.retrieval import versions
from infembed_ray.retrieval.build import Tasks, finish_shard, output_errors, write_shards
from infembed_ray.retrieval.passages import schema, write_passages
from infembed_ray.retrieval.shard_files import (
    PASSAGES_FILE,
    VECTORS_FILE,
    ShardFacts,
    drop_other_attempts,
    verify_local,
)
from infembed_ray.retrieval.shards import Build, Shard, write_vectors
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.versions import IndexFacts, change_log
from infembed_ray.storage.dry_run import state
from infembed_ray.storage.places import Place, address, delete, read_json, write_json
from infembed_ray.storage.steps import Published, Step, find_input, read_manifest


@dataclass(frozen=True)
class Compaction:
    """One compaction.

    Attributes:
        base, version, facts: place, identity and facts of the version to start from.
        settings: that the next version is built with.
        until: sequence of the last change to fold in.
    """

    base: Place
    version: str
    facts: IndexFacts
    settings: IndexSettings
    until: int

    @classmethod
    def open(cls, index: str) -> Compaction:
        """Plan the compaction of all changes until now, or continue an interrupted one.

        Args:
            index: a version, or an output directory whose `latest` names one.

        Raises:
            InputError: there is no index, or a change is missing.
        """
        base = find_input(index, "index")
        manifest = read_manifest(base, "index")
        facts = IndexFacts.of_manifest(manifest, base)
        log = change_log(base, facts)
        log.check(facts.folded)
        settings = IndexSettings.from_mapping(manifest["settings"], where="index.")
        work = cls(base, manifest["identity"], facts, settings, log.last())
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

    @property
    def _record(self) -> Place:
        """File with `until` of a compaction that has begun: one that restarted with newer changes might never end."""
        return self.base.parent / f".{self.version}.compaction"

    def run(self, step: Step, tasks: Tasks, cpus: float = 1) -> None:
        """Publish the next version; a later compaction of this version continues an interrupted one.

        Args:
            cpus: per task that builds a shard.

        Raises:
            InputError: a file of the base or a change is damaged; no type fits the memory; or recall is below the floor.
        """
        write_json(self._record, {"until": self.until})
        with output_errors(str(step.root)), step.publish() as staging:
            root = staging.remote or staging.path.resolve()
            calls = [(self, number, root) for number in range(len(self.facts.shards))]
            shards = write_shards(Compaction.write_shard, calls, root, cpus, tasks)
            staging.resumed |= {shard.name for shard in shards}
            facts = self._next_facts(shards)
            staging.counts = {"passages": facts.passages, "shards": len(shards), "changes": self.changes}
            staging.facts = {"index": facts.as_json()}
        drop_other_attempts(step.remote, shards)
        self.end()

    def end(self) -> None:
        """Remove the record: the compaction is finished or cannot be."""
        delete(self._record)

    def write_shard(self, number: int, root: Place) -> ShardFacts:
        """Write one shard of the next version; a shard that an interrupted run finished stays."""
        s = self.settings
        build = Build(s.factory, s.memory_gib, s.recall_floor, s.shards, s.lexical)

        def fill(directory: Path) -> None:
            verify_local(self.base, self.facts.shards[number])  # the next version gets new checksums
            base = Shard.open(self.base, self.facts.shards[number])
            live = LiveShard(base, change_log(self.base, self.facts), number, self.facts.folded, self.until)
            columns = schema(self.facts.metadata)
            write_passages(directory / PASSAGES_FILE, columns, (passages for passages, _ in live.content()))
            vectors = (vectors for _, vectors in live.content())
            write_vectors(directory / VECTORS_FILE, vectors, len(live), self.facts.dimension, self.facts.vectors)

        try:
            return finish_shard(root, number, str(root.parent), fill, build)
        except InputError as error:
            if not {fault.setting for fault in error.faults} & {"factory", "memory_gib", "recall_floor"}:
                raise
            self.end()  # the next attempt takes newer changes, which may help
            raise InputError(*error.args, "another value needs a new build, which encodes nothing again") from error

    def _next_facts(self, shards: Sequence[ShardFacts]) -> IndexFacts:
        passages = sum(shard.passages for shard in shards)
        return replace(self.facts, passages=passages, shards=shards, folded=self.until)


def compact(settings: CompactSettings, tasks: Tasks) -> Published:
    """Fold the changes of an index into its next version, one task per shard. Without changes there is nothing to fold.

    Then old versions are deleted, if `keep_versions` says so, and the changes that no version reads any more.

    Raises:
        InputError: there is no index; one of its files or changes is missing or damaged; no type fits the memory or
            reaches the recall floor; or the disk is full. Nothing is published then.
    """
    work = Compaction.open(settings.index)
    if not work.changes:
        say(f"index compact: no changes since {work.version}")
        published = versions.as_published(work.base)
    else:
        step = work.step()
        if done := versions.finished(step):
            work.end()
            published = done
        else:
            say(f"index compact: {_described(work)}")
            work.run(step, tasks, settings.cpus_per_shard)
            published = step.published()
    try:
        versions.prune(work.base, settings.keep_versions)
    except (InputError, OSError) as error:  # such as NFS, while a replica still maps a file
        say(f"index compact: old versions or changes stay until the next compaction: {error}")
    return published


def describe(settings: CompactSettings) -> Iterator[str]:
    """Yield what a compaction would do, line by line; InputError as `Compaction.open`."""
    work = Compaction.open(settings.index)
    if not work.changes:
        yield f"no changes since {work.version}, so there is nothing to do"
    elif not (yield from state(work.step())):
        yield _described(work)


def _described(work: Compaction) -> str:
    return (
        f"{work.version} and {counted(work.changes, 'segment')} of changes, {counted(len(work.facts.shards), 'shard')}"
    )
