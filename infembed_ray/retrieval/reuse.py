"""Reuse the vectors of an older version: a build encodes only passages whose id or text is new.

Passages of both versions are sorted by id, so a chunk of new ones is compared with one range of old ones. No store of embeddings
is needed beside the version.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.errors import InputError
from infembed_ray.progress import say
from infembed_ray.retrieval.passages import position
from infembed_ray.retrieval.shard_files import ShardFacts, verify_local
from infembed_ray.retrieval.shards import Shard, shards_of
from infembed_ray.storage.places import Place

NEW = -1
"""Row of a passage that the older version does not have, or has with another text."""


@dataclass(frozen=True)
class Base:
    """The version whose vectors are reused. Its rows are numbered through its shards."""

    root: Place
    shards: tuple[ShardFacts, ...]

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0, *(shard.passages for shard in self.shards)])

    @cached_property
    def _opened(self) -> dict[int, Shard | None]:
        return {}

    def _shard(self, number: int) -> Shard | None:
        """Verify and open a shard, once; None if it is damaged, which the checksums of the new version would hide."""
        if number not in self._opened:
            facts = self.shards[number]
            try:
                verify_local(self.root, facts)
                self._opened[number] = Shard.open(self.root, facts)
            except InputError as damage:
                say(f"index: no vectors of {facts.name} are reused: {damage}")
                self._opened[number] = None
        return self._opened[number]

    def rows(self, passages: pa.Table) -> np.ndarray:
        """Find passages with their ids and texts; returns their rows, (n,) int64, or `NEW`.

        Args:
            passages: n > 0, by id ascending.
        """
        rows = np.full(len(passages), NEW, np.int64)
        owners = shards_of(passages.column("id"), len(self.shards))
        for number in np.unique(owners).tolist():
            shard = self._shard(number)
            if shard is None:
                continue
            mine = np.flatnonzero(owners == number)
            given = passages.take(mine)
            ids = given.column("id")
            first, last = (position(shard.passages, ids[place].as_py()) for place in (0, -1))
            some = shard.passages.slice(first, last + 1 - first)
            found = pc.index_in(ids, some.column("id").combine_chunks())
            same = pc.equal(given.column("text"), some.column("text").take(found)).fill_null(False).to_numpy()
            rows[mine[same]] = self._starts[number] + first + found.filter(same).to_numpy()
        return rows

    def vectors(self, rows: np.ndarray, dimension: int) -> np.ndarray:
        """The vectors of n rows, (n, dimension) float32; InputError if a shard was damaged since `rows` found them."""
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        vectors = np.empty((len(rows), dimension), np.float32)
        for number in np.unique(owners).tolist():
            mine, shard = owners == number, self._shard(number)
            if shard is None:
                raise InputError(
                    f"index={self.root}: {self.shards[number].name} is damaged; set reuse=false to build without it"
                )
            vectors[mine] = shard.vectors(rows[mine] - self._starts[number])
        return vectors
