"""An immutable state of a live shard: what changed since the base was built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from infembed_ray.retrieval.lexical import DeltaTerms

_DEAD_ROWS = 1024
"""Least rows of the delta from which dead rows are dropped, once they are more than half."""
DELETED = -1


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An immutable state of a shard with m rows in the delta.

    Attributes:
        sequence: of the last change in it.
        keep: (base rows,) bool, False for tombstones; None: all rows are live.
        passages: m rows of the delta, with the columns of the base.
        store: (at least m, d) float32 vectors of the delta; rows beyond m belong to later snapshots.
        live: (m,) bool, False for rows that were deleted or replaced.
        put_at: (m,) int64 sequence of the change that put each row.
        rows: id of each document that differs from the base -> its live row in the delta, or `DELETED`.
        terms: of the delta's texts; rows beyond m belong to later snapshots; None without a lexical index.
    """

    sequence: int
    keep: np.ndarray | None
    passages: pa.Table
    store: np.ndarray
    live: np.ndarray
    put_at: np.ndarray
    rows: Mapping[str, int]
    terms: DeltaTerms | None

    @property
    def vectors(self) -> np.ndarray:
        """(m, d) float32 vectors of the delta."""
        return self.store[: len(self.live)]


def delta_place(row: Any) -> Any:
    """The place of a row of the delta, or of an array of rows: negative, unlike a row of the base. Its own inverse."""
    return -1 - row


def keyed(snapshot: Snapshot, places: np.ndarray) -> np.ndarray:
    """The places of hits as in `Key`: those in the delta become the change that put them."""
    if (in_delta := places < 0).any():
        places = places.copy()
        places[in_delta] = -snapshot.put_at[delta_place(places[in_delta])]
    return places


def extended(store: np.ndarray, used: int, vectors: np.ndarray) -> np.ndarray:
    """Append vectors to the used rows of `store`, in place if there is room."""
    needed = used + len(vectors)
    if needed > len(store):
        larger = np.empty((max(needed, 2 * len(store)), store.shape[1]), np.float32)
        larger[:used] = store[:used]
        store = larger
    store[used:needed] = vectors  # no snapshot reads these rows yet
    return store


def without_dead_rows(snapshot: Snapshot) -> Snapshot:
    """Drop the dead rows of the delta if they are many, so that repeated puts of a passage do not accumulate."""
    live, count = snapshot.live, int(snapshot.live.sum())
    if len(live) < _DEAD_ROWS or 2 * count > len(live):
        return snapshot
    place = np.cumsum(live) - 1
    passages = snapshot.passages.filter(live).combine_chunks()
    terms = None if snapshot.terms is None else DeltaTerms()
    if terms is not None:
        terms.add(0, passages.column("text").to_pylist())
    return replace(
        snapshot,
        passages=passages,
        terms=terms,
        store=snapshot.vectors[live],
        live=np.ones(count, bool),
        put_at=snapshot.put_at[live],
        rows={id: row if row == DELETED else int(place[row]) for id, row in snapshot.rows.items()},
    )
