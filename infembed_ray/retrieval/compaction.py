"""Compaction: a version and the changes since become the next version of an index, without encoding.

Each shard is written again from its state at one sequence of the write-ahead log. Changes made meanwhile stay in the log, which
both versions read, so both give the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from infembed_ray.config.retrieval import CompactSettings, IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.progress import counted, say
from infembed_ray.retrieval import shard_files, versions
from infembed_ray.retrieval.build import Tasks, output_errors, write_shards
from infembed_ray.retrieval.passages import schema, write_passages
from infembed_ray.retrieval.shard_files import PASSAGES_FILE, VECTORS_FILE, ShardFacts
from infembed_ray.retrieval.shards import Build, Shard, build_shard, shard_name, write_vectors
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.versions import IndexFacts, change_log
from infembed_ray.storage.places import Place, address
from infembed_ray.storage.steps import Published, Step, find_input, output_state, read_manifest


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
        """Plan the compaction of a version, or of the latest of an output, and all changes until now.

        InputError if there is no index, or a change is missing.
        """
        base = find_input(index, "index")
        manifest = read_manifest(base, "index")
        facts = IndexFacts.of_manifest(manifest, base)
        log = change_log(base, facts)
        log.check(facts.folded)
        settings = IndexSettings.from_mapping(manifest["settings"], where="index.")
        return cls(base, manifest["identity"], facts, settings, log.last())

    @property
    def changes(self) -> int:
        """Segments to fold in."""
        return self.until - self.facts.folded

    def __str__(self) -> str:
        changes, shards = counted(self.changes, "segment"), counted(len(self.facts.shards), "shard")
        return f"{self.version} and {changes} of changes, {shards}"

    def step(self) -> Step:
        """The step that publishes the next version; its identity covers the base and the changes."""
        digest = change_log(self.base, self.facts).digest(self.facts.folded, self.until)
        names = {"version": self.version, "changes": f"{self.until}-{digest}"}
        return Step("index", self.settings, address(self.base.parent), {}, names)

    def run(self, step: Step, tasks: Tasks, cpus: float = 1) -> None:
        """Publish the next version, or continue an interrupted run, with `cpus` per shard; InputError as `compact`."""
        with output_errors(str(step.root)), step.publish() as staging:
            calls = [(self, number) for number in range(len(self.facts.shards))]
            shards = write_shards(_write_shard, calls, staging, cpus, tasks)
            passages = sum(shard.passages for shard in shards)
            facts = replace(self.facts, passages=passages, shards=shards, folded=self.until)
            staging.counts = {"passages": passages, "shards": len(shards), "changes": self.changes}
            staging.facts = {"index": facts.as_json()}
        shard_files.clear_attempts(step.remote or step.path, shards)


def _write_shard(root: Place, work: Compaction, number: int) -> ShardFacts:
    """Write a shard of the next version, unless an interrupted run did."""
    facts, old, settings = work.facts, work.facts.shards[number], work.settings

    def write(directory: Path) -> ShardFacts:
        shard_files.verify_local(work.base, old)  # the next version gets new checksums
        log = change_log(work.base, facts)
        live = LiveShard(Shard.open(work.base, old), log, number, facts.folded, work.until)
        passages = (passages for passages, _ in live.content())
        columns = schema(facts.metadata, bool(facts.chunk_tokens))
        count = write_passages(directory / PASSAGES_FILE, columns, passages)
        vectors = (vectors for _, vectors in live.content())
        write_vectors(directory / VECTORS_FILE, vectors, count, facts.dimension, facts.vectors)
        limits = settings.memory_gib, settings.recall_floor
        return build_shard(directory, Build(settings.factory, *limits, settings.shards, settings.lexical))

    with output_errors(str(root.parent)):
        return shard_files.write_once(root, shard_name(number), write)


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
    elif done := versions.finished(step := work.step()):
        published = done
    else:
        say(f"index compact: {work}")
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
    elif not (yield from output_state(work.step())):
        yield str(work)
