"""An index: a published directory of shards, and the facts that tie it to the encoder that built it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from infembed_ray.config import FieldType
from infembed_ray.errors import InputError
from infembed_ray.retrieval.changes import ChangeLog
from infembed_ray.retrieval.live import LiveShard, ShardQuery
from infembed_ray.retrieval.shards import Hit, Shard, ShardFacts, merge
from infembed_ray.storage import MANIFEST, existing, read_manifest

METRIC = "inner_product"
FORMAT = 2
"""Of the files and facts of an index, and of how they are made: a version's identity tells it. 1 had rows in any order and no parameters of the search."""
CHANGES = "changes"
"""Directory beside the versions of an index, with a change log for each lineage."""


@dataclass(frozen=True, kw_only=True)
class IndexFacts:
    """What the manifest of an index says under `index`."""

    encoder: str
    """`InstructionEncoder.fingerprint()` of the encoder that built it."""
    model: str
    """Directory or hub name of that encoder, as it was then."""
    template: str
    """How it makes one text of instruction and query; for people to read, the fingerprint covers it."""
    dimension: int
    """Of its vectors."""
    dimensions: int | None = None
    """What the encoder has to be loaded with (`InstructionEncoder.from_pretrained(dimensions=...)`)."""
    passages: int
    metadata: Mapping[str, FieldType] = field(default_factory=dict)
    """Columns of its passages beside id and text."""
    shards: Sequence[ShardFacts]
    lineage: str
    """Identity of the first version: those made of it and of changes share their change log."""
    folded: int = 0
    """Sequence of the last change that is in the shards."""
    metric: str = METRIC
    format: int = FORMAT

    @property
    def recall_at_10(self) -> float:
        """Of the passages' shards, on average."""
        found = sum(shard.recall_at_10 * shard.passages for shard in self.shards)
        return round(found / self.passages, 4) if self.passages else 1.0

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(shard.bytes for shard in self.shards)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> IndexFacts:
        """From what `as_json` made."""
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        return cls(**{**known, "shards": [ShardFacts(**shard) for shard in values["shards"]]})

    def as_json(self) -> dict[str, Any]:
        """For the manifest, with the figures that follow from those of the shards."""
        return {**asdict(self), "recall_at_10": self.recall_at_10, "bytes": self.bytes}

    @classmethod
    def read(cls, root: Path, name: str = "index") -> IndexFacts:
        """Of a published index.

        Args:
            root: its directory.
            name: the setting the path came from, for error messages.

        Raises:
            InputError: it is no index, or of a format that this version does not read, or its manifest is damaged.
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
            return cls.of(manifest["index"])
        except (TypeError, KeyError) as error:
            raise InputError(
                f"{name}={root}: {MANIFEST} does not describe an index ({error}); restore it, or build the index again"
            ) from error


class Index:
    """An open index; get one with `Index.open`.

    Attributes:
        path: its directory.
        version: its identity: the same corpus, encoder and settings give the same version.
        facts: what its manifest says.
        shards: open, in the order of `facts.shards`; none if it is only described.
    """

    def __init__(self, path: Path, version: str, facts: IndexFacts, shards: Sequence[Shard]) -> None:
        self.path = path
        self.version = version
        self.facts = facts
        self.shards = shards

    @classmethod
    def open(cls, path: str | Path, encoder_fingerprint: str | None = None) -> Index:
        """Open a published index and check it whole.

        Args:
            path: the index, or the output directory whose `latest` names it.
            encoder_fingerprint: of the encoder that is to query it; None leaves that to the caller.

        Raises:
            InputError: there is no index, another encoder built it, its format is another, or a shard's file is missing
                or corrupted.
        """
        index = cls._of(existing(str(path), "index"))
        index.shards = [Shard.open(index.path, shard) for shard in index.facts.shards]
        if encoder_fingerprint is not None:
            index.require_encoder(encoder_fingerprint)
        return index

    @classmethod
    def describe(cls, path: str | Path) -> Index:
        """Read what a published index says of itself. Its shards are not opened, nor copied from an object store.

        Raises:
            InputError: there is no index, or its format is another.
        """
        return cls._of(existing(str(path), "index", [MANIFEST]))

    @classmethod
    def _of(cls, root: Path) -> Index:
        facts = IndexFacts.read(root)
        return cls(root, read_manifest(root, "index")["identity"], facts, [])

    def require_encoder(self, fingerprint: str) -> None:
        """InputError unless this is the fingerprint of the encoder that built the index."""
        if fingerprint != self.facts.encoder:
            raise InputError(
                f"index={self.path}: built by another encoder ({self.facts.encoder}, {self.facts.model}) than the one "
                f"given ({fingerprint}); build it again with this encoder, or use the one that built it"
            )

    @property
    def changes(self) -> Path:
        """Directory of the changes made to it and to all versions of its lineage."""
        return changes_of(self.path, self.facts)

    def search(self, vectors: np.ndarray, k: int, filter: Mapping[str, Any] | None = None) -> list[list[Hit]]:
        """The best `k` passages of each query over all shards, by (score, id), descending, with all changes until now.

        Args:
            vectors: (queries, dimension) float32 unit vectors.
            k: most hits a query.
            filter: on the metadata; see `filters`.

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
        log = ChangeLog(self.changes, self.facts.metadata, self.facts.dimension)
        return [
            LiveShard(shard, log, number, len(self.shards), self.facts.folded)
            for number, shard in enumerate(self.shards)
        ]


def changes_of(root: Path, facts: IndexFacts) -> Path:
    """The change log of the lineage of a published index."""
    return root.parent / CHANGES / facts.lineage
