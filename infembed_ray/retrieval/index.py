"""An index: a published directory of shards, and its facts in the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.retrieval.shards import Hit, Shard, ShardFacts, merge
from infembed_ray.retrieval.updates.live_shard import LiveShard, ShardQuery
from infembed_ray.retrieval.updates.write_ahead_log import ChangeLog
from infembed_ray.storage import MANIFEST, read_manifest, resolve_input

METRIC = "inner_product"
FORMAT = 2
"""Format of the files and facts, part of a version's identity. Format 1 had unsorted rows and no search parameters."""
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
    def recall_at_10(self) -> float:
        """Mean over the shards, weighted by passages."""
        found = sum(shard.recall_at_10 * shard.passages for shard in self.shards)
        return round(found / self.passages, 4) if self.passages else 1.0

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(shard.bytes for shard in self.shards)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> IndexFacts:
        """Inverse of `as_json`."""
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        return cls(**{**known, "shards": [ShardFacts(**shard) for shard in values["shards"]]})

    def as_json(self) -> dict[str, Any]:
        """The facts for the manifest, with the totals over the shards."""
        return {**asdict(self), "recall_at_10": self.recall_at_10, "bytes": self.bytes}

    @classmethod
    def read(cls, root: Path, name: str = "index") -> IndexFacts:
        """Read the facts of a published index.

        Args:
            root: directory of the version.
            name: setting with the path, for error messages.

        Raises:
            InputError: it is no index, its format is not supported, or its manifest is damaged.
        """
        manifest = read_manifest(root, name)
        if "index" not in manifest:
            raise InputError(f"{name}={root}: the output of `{manifest['stage']}`; give one of `infembed index`")
        written = manifest["index"].get("format", 1)
        if written != FORMAT:
            raise InputError(
                f"{name}={root}: an index of format {written}, this version of infembed_ray reads {FORMAT}; build it again "
                f"with `infembed index`, or use the version that built it ({manifest.get('code_version', 'unknown')})"
            )
        try:
            return cls.from_json(manifest["index"])
        except (TypeError, KeyError) as error:
            raise InputError(
                f"{name}={root}: {MANIFEST} does not describe an index ({error}); restore it, or build the index again"
            ) from error


class Index:
    """An index; `Index.open` opens one.

    Attributes:
        path: directory of the version.
        version: identity; the same corpus, encoder and settings give the same version.
        shards: in the order of `facts.shards`; empty after `Index.describe`.
    """

    def __init__(self, path: Path, version: str, facts: IndexFacts, shards: Sequence[Shard]) -> None:
        self.path = path
        self.version = version
        self.facts = facts
        self.shards = shards

    @classmethod
    def open(cls, path: str | Path, encoder_fingerprint: str | None = None) -> Index:
        """Open a published index and verify all files.

        Args:
            path: a version, or an output directory whose `latest` names one.
            encoder_fingerprint: of the encoder that will query it; None skips the check.

        Raises:
            InputError: there is no index, another encoder built it, its format is not supported, or a file is missing
                or corrupted.
        """
        index = cls._of(resolve_input(str(path), "index"))
        index.shards = [Shard.open(index.path, shard) for shard in index.facts.shards]
        if encoder_fingerprint is not None:
            index.require_encoder(encoder_fingerprint)
        return index

    @classmethod
    def describe(cls, path: str | Path) -> Index:
        """Read the facts of a published index; its shards are neither opened nor downloaded.

        Raises:
            InputError: there is no index, or its format is not supported.
        """
        return cls._of(resolve_input(str(path), "index", [MANIFEST]))

    @classmethod
    def _of(cls, root: Path) -> Index:
        facts = IndexFacts.read(root)
        return cls(root, read_manifest(root, "index")["identity"], facts, [])

    def require_encoder(self, fingerprint: str) -> None:
        """Raise InputError unless this encoder built the index."""
        if fingerprint != self.facts.encoder:
            raise InputError(
                f"index={self.path}: built by another encoder ({self.facts.encoder}, {self.facts.model}) than the one "
                f"given ({fingerprint}); build it again with this encoder, or use the one that built it"
            )

    @property
    def changes(self) -> Path:
        """Directory of the write-ahead log of its lineage."""
        return changes_of(self.path, self.facts)

    def search(self, vectors: np.ndarray, k: int, filter: Mapping[str, Any] | None = None) -> list[list[Hit]]:
        """Search all shards with all changes until now; returns the best `k` passages per query by (score, id), descending.

        Args:
            vectors: (queries, dimension) float32 unit vectors.
            k: most hits per query.
            filter: metadata filter; see `filters`.

        Raises:
            FilterError: the filter does not fit the metadata.
        """
        by_shard = []
        for shard in self._live:
            shard.refresh()
            (answer,) = shard.search_many([ShardQuery(vectors, k, filter)])
            if isinstance(answer, Exception):
                raise answer
            by_shard.append(answer.hits)
        return [merge(results, k) for results in zip(*by_shard, strict=True)]

    @cached_property
    def _live(self) -> list[LiveShard]:
        log = change_log(self.path, self.facts)
        return [
            LiveShard(shard, log, number, len(self.shards), self.facts.folded)
            for number, shard in enumerate(self.shards)
        ]


def changes_of(root: Path, facts: IndexFacts) -> Path:
    """Directory of the write-ahead log of a published index."""
    return root.parent / CHANGES / facts.lineage


def change_log(root: Path, facts: IndexFacts) -> ChangeLog:
    """The write-ahead log of a published index."""
    return ChangeLog(changes_of(root, facts), facts.metadata, facts.dimension)
