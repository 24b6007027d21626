"""An index: a published directory of shards, and the facts that tie it to the encoder that built it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infembed_ray.errors import InputError
from infembed_ray.retrieval.shards import Hit, Shard, ShardFacts, merge
from infembed_ray.storage import existing, read_manifest

METRIC = "inner_product"


@dataclass(frozen=True)
class IndexFacts:
    """What the manifest of an index says under `index`."""

    encoder: str
    """`InstructionEncoder.fingerprint()` of the encoder that built it."""
    model: str
    """Directory or hub name of that encoder, as it was then."""
    template: str
    """How it makes one text of instruction and query; for people to read, the fingerprint covers it."""
    dimension: int
    passages: int
    shards: Sequence[ShardFacts]
    metric: str = METRIC

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> IndexFacts:
        """From the manifest's JSON; `dataclasses.asdict` is the way there."""
        return cls(**{**values, "shards": [ShardFacts(**shard) for shard in values["shards"]]})


class Index:
    """An open index; get one with `Index.open`.

    Attributes:
        path: its directory.
        version: its identity: the same corpus, encoder and settings give the same version.
        facts: what its manifest says.
        shards: open, in the order of `facts.shards`.
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
            InputError: there is no index, another encoder built it, or a shard's file is missing or corrupted.
        """
        root = existing(str(path), "index")
        manifest = read_manifest(root, "index")
        if "index" not in manifest:
            raise InputError(f"index={path}: the output of `{manifest['stage']}`; give one of `infembed index`")
        facts = IndexFacts.of(manifest["index"])
        index = cls(root, manifest["identity"], facts, [Shard.open(root, shard) for shard in facts.shards])
        if encoder_fingerprint is not None:
            index.require_encoder(encoder_fingerprint)
        return index

    def require_encoder(self, fingerprint: str) -> None:
        """InputError unless this is the fingerprint of the encoder that built the index."""
        if fingerprint != self.facts.encoder:
            raise InputError(
                f"index={self.path}: built by another encoder ({self.facts.encoder}, {self.facts.model}) than the one "
                f"given ({fingerprint}); build it again with this encoder, or use the one that built it"
            )

    def search(self, vectors: np.ndarray, k: int) -> list[list[Hit]]:
        """The best `k` passages of each query over all shards, by (score, id), descending.

        Args:
            vectors: (queries, dimension) float32 unit vectors.
            k: most hits a query.
        """
        by_shard = [shard.search(vectors, k) for shard in self.shards]
        return [merge(results, k) for results in zip(*by_shard, strict=True)]
