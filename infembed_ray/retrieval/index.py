"""An index: a published directory of shards, and its facts in the manifest."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infembed_ray.config.retrieval import FieldType, IndexSettings, Precision
from infembed_ray.errors import InputError
from infembed_ray.progress import counted, say
from infembed_ray.records.tables import Passage
from infembed_ray.retrieval.answers import ShardAnswer, ShardQuery, merge
from infembed_ray.retrieval.corpus import corpus_file, require_columns
from infembed_ray.retrieval.reuse import Base
from infembed_ray.retrieval.shard_files import ShardFacts, drop_other_attempts, verify
from infembed_ray.retrieval.shards import Hit, Shard
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.updates.write_ahead_log import ChangeLog, LogFault
from infembed_ray.retrieval.work import Chunk, Work, work_directory
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import Place, address, errors_at
from infembed_ray.storage.steps import MANIFEST, Published, Step, find_input, read_manifest, set_latest

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder

METRIC = "inner_product"
FORMAT = 3
"""Format of the files and facts, part of a version's identity. Format 2 had float32 vectors only."""
READABLE = (2, FORMAT)
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
    shards: Sequence[ShardFacts]
    lineage: str
    folded: int = 0
    metric: str = METRIC
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
        found = sum(shard.recall_at_10 * shard.passages for shard in self.shards)
        return round(found / self.passages, 4) if self.passages else 1.0

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(shard.bytes for shard in self.shards)

    @classmethod
    def of_build(
        cls,
        encoder: InstructionEncoder,
        model: str,
        settings: IndexSettings,
        shards: Sequence[ShardFacts],
        lineage: str,
    ) -> IndexFacts:
        """The facts of an index that was built from a corpus, the first of its lineage."""
        return cls(
            encoder=encoder.fingerprint(),
            model=model,
            template=encoder.text.template,
            dimension=encoder.dimension,
            dimensions=settings.dimensions,
            passages=sum(shard.passages for shard in shards),
            metadata=settings.metadata,
            shards=shards,
            lineage=lineage,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> IndexFacts:
        """Inverse of `as_json`."""
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        return cls(**{**known, "shards": [ShardFacts.from_json(shard) for shard in values["shards"]]})

    def as_json(self) -> dict[str, Any]:
        """The facts for the manifest, with the totals over the shards. An external engine has no shards and measures nothing."""
        totals = {"recall_at_10": self.recall_at_10, "bytes": self.bytes} if self.shards else {}
        return {**asdict(self), **totals}

    @classmethod
    def read(cls, root: Place, name: str = "index") -> IndexFacts:
        """Read the facts of a published index.

        Raises:
            InputError: it is no index, its format is not supported, or its manifest is damaged.
        """
        return cls.of_manifest(read_manifest(root, name), root, name)

    def require_encoder(self, fingerprint: str, place: object) -> None:
        """Raise InputError unless this encoder built the index at a place."""
        if fingerprint != self.encoder:
            raise InputError.of(
                "index",
                place,
                f"built by another encoder ({self.encoder}, {self.model}) than the one given ({fingerprint})",
                "build it again with this encoder, or use the one that built it",
            )

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any], root: object, name: str = "index") -> IndexFacts:
        """As `read`, of a manifest that was read already."""
        if "index" not in manifest:
            stage = manifest.get("stage", "another program")
            raise InputError(f"{name}={root}: the output of `{stage}`; give one of `infembed index`")
        written = manifest["index"].get("format", 1)
        if written not in READABLE:
            raise InputError(
                f"{name}={root}: an index of format {written}, this version of infembed_ray reads {' and '.join(map(str, READABLE))}; build it again "
                f"with `infembed index`, or use the version that built it ({manifest.get('code_version', 'unknown')})"
            )
        try:
            return cls.from_json(manifest["index"])
        except (TypeError, KeyError) as error:
            raise InputError(
                f"{name}={root}: {MANIFEST} does not describe an index ({error}); restore it, or build the index again"
            ) from error


class Index:
    """An index; `Index.build` makes one, and `Index.open` opens one.

    Attributes:
        path: directory of the version; in an object store, its folder.
        version: identity; the same corpus, encoder and settings give the same version.
        shards: in the order of `facts.shards`; empty after `Index.describe`.
    """

    def __init__(self, path: Place, version: str, facts: IndexFacts, shards: Sequence[Shard]) -> None:
        self.path = path
        self.version = version
        self.facts = facts
        self.shards = shards

    @classmethod
    def build(
        cls,
        corpus: str | Path | Iterable[str | Passage | Mapping[str, Any]],
        encoder: InstructionEncoder,
        path: str | Path | None = None,
        *,
        metadata: Mapping[str, FieldType] | None = None,
        shards: int = 1,
        factory: str | None = None,
        memory_gib: float | None = None,
        recall_floor: float = 0.95,
        batch_tokens: int = 4096,
        vectors: Precision = "float16",
        lexical: bool = False,
    ) -> Index:
        """Build an index in this process, on the encoder's device and without Ray, and open it.

        The files are those of `infembed index`: `infembed serve` serves them, with the encoder at `encoder.source`. The
        same corpus, encoder and settings are not indexed again, and an interrupted build resumes.

        Args:
            corpus: texts, whose ids are "0", "1", ...; `Passage`s; mappings with id, text and metadata; or the path of a
                file or directory of such rows.
            encoder: as `InstructionEncoder.from_pretrained` loaded it. Save an encoder that you changed, and load it again.
            path: directory or object-store URI for the published index; None: a temporary directory, which is deleted
                with the `Index`.
            metadata: columns for filters and hits -> their type.
            shards: a hash of its id assigns a passage.
            factory: index type of all shards, as `faiss.index_factory` spells it; None: chosen by count and memory.
            memory_gib: most memory of a shard's index while it is searched (GiB); None: no limit.
            recall_floor: least recall@10 against exact search.
            batch_tokens: tokens per pass of the encoder, with padding.
            vectors: precision of the stored vectors.
            lexical: build a BM25 index of every shard, too.

        Raises:
            InputError: the corpus, the settings or the directory cannot be used, or recall is below the floor. Nothing is
                published then.
        """
        if encoder.source is None or encoder.changed:
            raise InputError(
                "encoder: its weights are in no file; save it with save_pretrained, and load that directory with "
                "InstructionEncoder.from_pretrained"
            )
        model = str(Path(encoder.source).resolve()) if Path(encoder.source).is_dir() else encoder.source
        given = {"metadata": dict(metadata or {}), "shards": shards, "factory": factory, "memory_gib": memory_gib}
        given |= {"recall_floor": recall_floor, "batch_tokens": batch_tokens, "dimensions": encoder.dimensions}
        given |= {"vectors": vectors, "lexical": lexical}
        with corpus_file(corpus) as file, contextlib.ExitStack() as scratch:
            root = path or scratch.enter_context(tempfile.TemporaryDirectory(prefix="infembed-index-"))
            given |= {"corpus": str(file), "model": model, "output": str(root)}
            index = cls.open(_build_here(encoder, file, IndexSettings.from_mapping(given)))
            weakref.finalize(index, scratch.pop_all().close)
        return index

    @classmethod
    def open(cls, path: str | Path, encoder_fingerprint: str | None = None) -> Index:
        """Open a published index; in an object store, copy its shards to this machine and verify them.

        Args:
            path: a version, or an output directory whose `latest` names one; a path or an object-store URI.
            encoder_fingerprint: of the encoder that will query it; None skips the check.

        Raises:
            InputError: there is no index, another encoder built it, its format is not supported, or a file is missing
                or has another size.
        """
        index = cls.describe(path)
        index.shards = [Shard.open(index.path, shard) for shard in index.facts.shards]
        if encoder_fingerprint is not None:
            index.require_encoder(encoder_fingerprint)
        return index

    @classmethod
    def describe(cls, path: str | Path) -> Index:
        """Read the facts of a published index; its shards are neither opened nor copied.

        Raises:
            InputError: there is no index, or its format is not supported.
        """
        root = find_input(str(path), "index")
        manifest = read_manifest(root, "index")
        return cls(root, manifest["identity"], IndexFacts.of_manifest(manifest, root), [])

    def require_encoder(self, fingerprint: str) -> None:
        """Raise InputError unless this encoder built the index."""
        self.facts.require_encoder(fingerprint, self.path)

    @property
    def changes(self) -> Place:
        """Directory of the write-ahead log of its lineage."""
        return self.path.parent / CHANGES / self.facts.lineage

    def search(self, vectors: np.ndarray, k: int = 10, filter: Mapping[str, Any] | None = None) -> list[list[Hit]]:
        """Search all shards with all changes until now; returns the best `k` passages per query by (score, id), descending.

        Args:
            vectors: (queries, dimension) unit vectors from `encode_queries`; (dimension,) is one query.
            k: most hits per query.
            filter: metadata filter; see `filters`.

        Raises:
            InputError: the vectors have another dimension.
            FilterError: the filter does not fit the metadata.
        """
        vectors = np.atleast_2d(np.asarray(vectors, dtype=np.float32))
        if vectors.ndim != 2 or vectors.shape[1] != self.facts.dimension:
            raise InputError(
                f"vectors: shape {vectors.shape}, and the index has {self.facts.dimension} dimensions; encode the queries "
                f"with {self.facts.model}, the encoder of the index"
            )
        by_shard = []
        for shard in self._live:
            shard.refresh()
            (answer,) = shard.search_many([ShardQuery(vectors, k, filter)])
            if isinstance(answer, Exception):
                raise answer
            assert isinstance(answer, ShardAnswer)
            by_shard.append(answer.hits)
        return [merge(results, k) for results in zip(*by_shard, strict=True)]

    @cached_property
    def _live(self) -> list[LiveShard]:
        log = change_log(self.path, self.facts)
        return [LiveShard(shard, log, number, self.facts.folded) for number, shard in enumerate(self.shards)]


def change_log(root: Place, facts: IndexFacts) -> ChangeLog:
    """The write-ahead log of a published index."""
    return ChangeLog(root.parent / CHANGES / facts.lineage, facts.metadata, facts.dimension, len(facts.shards))


def counts_of(facts: IndexFacts, chunks: Sequence[Chunk]) -> dict[str, int]:
    """The counts of a build for its manifest: passages, those that were encoded, and shards."""
    return {"passages": facts.passages, "encoded": sum(chunk.new for chunk in chunks), "shards": len(facts.shards)}


def published(root: Place) -> list[Place]:
    """List the published versions in an output: its directories with a manifest, without hidden ones."""
    names = root.folders() if isinstance(root, Folder) else [file.parent.name for file in root.glob(f"*/{MANIFEST}")]
    return [root / name for name in names if not name.startswith(".") and (root / name / MANIFEST).is_file()]


def as_published(version: Place) -> Published:
    """Describe a version that an earlier run published."""
    manifest = read_manifest(version, "index")
    if isinstance(version, Folder):
        return Published(Path(version.name), manifest, fresh=False, uri=version.uri)
    return Published(version, manifest, fresh=False)


def finished(step: Step) -> Published | None:
    """The version that an earlier run of the step published, or the newest that was compacted from it; None if there is none.

    A damaged one is moved aside first.

    Raises:
        LogFault: the versions were deleted, and their log, which a new version would read, lacks its first changes.
    """
    if step.remote is None and (step.path / MANIFEST).is_file():
        try:
            for shard in IndexFacts.read(step.path).shards:
                verify(step.path, shard)
        except InputError as damage:
            aside = step.root / f".{step.identity}.damaged-{secrets.token_hex(4)}"
            step.path.rename(aside)
            say(f"index: a damaged version is moved to {aside.name} and built again: {damage}")
            return None
    for newest in compacted_from(step):
        try:
            for shard in IndexFacts.read(newest).shards if isinstance(newest, Path) else ():
                verify(newest, shard)
        except InputError as damage:
            say(f"index: {newest.name} is left out: {damage}")
            continue
        set_latest(step.place, newest.name)
        say(f"index: {newest.name} was compacted from this build, with the changes made through the API")
        return as_published(newest)
    if (done := step.finished()) is None:
        try:
            ChangeLog(step.place / CHANGES / step.identity, {}, 0).check(0)
        except LogFault as fault:
            raise LogFault(f"{fault}; if you deleted all versions of this log, delete it, too") from fault
    return done


def compacted_from(step: Step) -> list[Place]:
    """The versions that were compacted from the one of a step, the newest first."""
    found = []
    with errors_at(step.place, "output"):
        for place in published(step.place):
            with contextlib.suppress(InputError):  # the output of another stage, or damaged
                manifest = read_manifest(place, "index")
                facts = IndexFacts.of_manifest(manifest, place)
                if facts.lineage == step.identity != manifest["identity"]:
                    original = place.name == manifest["identity"]  # not a copy
                    found.append(((facts.folded, str(manifest["created"]), original), place))
    return [place for _, place in sorted(found, key=lambda version: version[0], reverse=True)]


def warn_of_changes(step: Step) -> None:
    """Warn if the version that is served has changes that a build will not have."""
    with contextlib.suppress(InputError):  # no version is published yet
        current = find_input(address(step.place), "index")
        facts = IndexFacts.read(current)
        segments = change_log(current, facts).last()
        if segments and facts.lineage != step.identity:
            say(
                f"index: {current.name} has {counted(segments, 'segment')} of changes made through the API; this build has only the "
                "corpus (`infembed index compact` keeps the changes)"
            )


def reusing(step: Step, encoder: InstructionEncoder, settings: IndexSettings, work: Work) -> Work:
    """Let a build reuse the vectors of the latest version, if this encoder made it, in this precision or a better one.

    Raises:
        InputError: the version that an interrupted run began to reuse is gone.
    """
    latest = None
    if settings.reuse:
        with contextlib.suppress(InputError):  # no version is published yet
            root = find_input(address(step.place), "index")
            facts = IndexFacts.read(root)
            if facts.encoder == encoder.fingerprint() and facts.vectors in (settings.vectors, "float32"):
                latest = root.name
    name = work.choose_base(latest)
    if name is None:
        return work
    try:
        return replace(work, base=Base(step.place / name, tuple(IndexFacts.read(step.place / name).shards)))
    except InputError as error:
        raise InputError(
            f"{error}; an interrupted build reuses its vectors: delete {work.root} to begin again"
        ) from error


def _build_here(encoder: InstructionEncoder, corpus: Path, settings: IndexSettings) -> str:
    """Publish an index of a corpus, unless it is there; returns its directory or URI."""
    from infembed_ray.retrieval import build as steps  # late: opening an index needs no torch

    require_columns(settings.columns, settings.metadata)
    names = {"model": encoder.fingerprint(), "format": str(FORMAT)}
    step = Step("index", settings, settings.output, {"corpus": corpus}, names)
    if done := finished(step):
        return done.address
    warn_of_changes(step)
    with steps.output_errors(settings.output), work_directory(step, settings) as work:
        sizes = steps.partition_here(corpus, settings, work)
        build = steps.choose_build(settings, sizes, encoder.dimension)
        work = reusing(step, encoder, settings, work)
        chunks = steps.sort_here(corpus, settings, work, sizes)
        steps.say_reused(work, chunks)
        with step.publish() as staging:
            root = staging.remote or staging.path.resolve()
            shards = steps.write_shards_here(encoder, work, chunks, root, build, settings)
            staging.resumed |= {shard.name for shard in shards}
            facts = IndexFacts.of_build(encoder, settings.model, settings, shards, step.identity)
            staging.counts = counts_of(facts, chunks)
            staging.facts = {"index": facts.as_json()}
        drop_other_attempts(step.remote, shards)
        work.delete()
    return address(step.remote or step.path)
