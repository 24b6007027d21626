"""A live shard: the immutable published shard (base), and the changes of the write-ahead log on top.

Passages put since are a delta of vectors in memory, searched exactly. Rows of the base that were deleted or replaced are
masked (tombstones). A search reads one snapshot and reports its sequence. `refresh` builds the next snapshot beside it, so
searches and refreshes do not block each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.retrieval import filters
from infembed_ray.retrieval.faiss_import import faiss
from infembed_ray.retrieval.filters import Filter
from infembed_ray.retrieval.passages import TEXT, take
from infembed_ray.retrieval.shards import Hit, Shard, hits_of, merge, shard_of
from infembed_ray.retrieval.updates.write_ahead_log import OP, VECTOR, ChangeLog

_CACHED_MASKS = 16
"""Filters whose mask of the base is cached, one byte per passage each."""
_PIECE_BYTES = 64 << 20
"""Bytes of changes applied at once; 32-bit offsets end at 2^31 numbers."""
_REFRESHES_PER_LOOK = 10
"""Refreshes per look for the head of the log: one second of a replica that refreshes every 100 ms."""
_MAX_CHUNKS = 64
"""Chunks of the delta's passages, before they are joined."""
_DEAD_ROWS = 1024
"""Least rows of the delta from which dead rows are dropped, once they are more than half."""
_ROUNDING = 1e-5
"""More than float32 inner products of unit vectors differ by with the order of summation."""


@dataclass(frozen=True)
class ShardQuery:
    """A search request to a shard.

    Attributes:
        vectors: (n, d) float32 unit vectors.
        k: most hits per vector.
        filter: metadata filter, as in JSON.
    """

    vectors: np.ndarray
    k: int
    filter: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ShardAnswer:
    """The answer of a shard to one request.

    Attributes:
        hits: for each vector, by (score, id), descending.
        sequence: the answer includes all changes up to this one, and none after it.
    """

    hits: list[list[Hit]]
    sequence: int


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """An immutable state of a shard with m rows in the delta.

    Attributes:
        sequence: of the last change in it.
        keep: (base rows,) bool, False for tombstones; None: all rows are live.
        passages: m rows of the delta, with the columns of the base.
        store: (at least m, d) float32 vectors of the delta; rows beyond m belong to later snapshots.
        live: (m,) bool, False for rows that were deleted or replaced.
        rows: id -> its live row in the delta.
    """

    sequence: int
    keep: np.ndarray | None
    passages: pa.Table
    store: np.ndarray
    live: np.ndarray
    rows: Mapping[str, int]

    @property
    def vectors(self) -> np.ndarray:
        """(m, d) float32 vectors of the delta."""
        return self.store[: len(self.live)]


class LiveShard:
    """A shard with changes. Any threads can search while one refreshes.

    Args:
        shard: the base.
        log: the write-ahead log of the index' lineage.
        number, shards: of this shard, and how many the index has.
        folded: sequence of the last change that the base includes.
        until: last change to apply; None: apply all.

    Raises:
        LogFault: a change after `folded` is missing or damaged.
    """

    def __init__(
        self, shard: Shard, log: ChangeLog, number: int, shards: int, folded: int, until: int | None = None
    ) -> None:
        log.check(folded)
        self.base = shard
        self._log = log
        self._number = number
        self._shards = shards
        self._until = until
        self._refreshing = threading.Lock()
        self._refreshes = self._head = 0
        self._base_mask = lru_cache(_CACHED_MASKS)(lambda filter: filter.mask(shard.passages))
        no_vectors = np.empty((0, log.dimension), np.float32)
        self._snapshot = _Snapshot(folded, None, shard.passages.schema.empty_table(), no_vectors, np.empty(0, bool), {})
        self.refresh()

    def __len__(self) -> int:
        snapshot = self._snapshot
        base = len(self.base) if snapshot.keep is None else int(snapshot.keep.sum())
        return base + len(snapshot.rows)

    @property
    def sequence(self) -> int:
        """Sequence of the last change that searches see."""
        return self._snapshot.sequence

    @property
    def head(self) -> int:
        """Sequence of the last change in the log, as of the last look for it."""
        return max(self._head, self.sequence)

    @property
    def delta(self) -> int:
        """Rows of the delta plus tombstones of the base: the cost that compaction removes."""
        snapshot = self._snapshot
        return len(snapshot.live) + (0 if snapshot.keep is None else int((~snapshot.keep).sum()))

    def refresh(self) -> bool:
        """Apply new changes; returns False if there are none, which costs one file-system call.

        Raises:
            LogFault: the next change is damaged or missing. Those before it are applied and served.
        """
        with self._refreshing:
            sequence = self._snapshot.sequence
            self._refreshes += 1
            if self._refreshes % _REFRESHES_PER_LOOK == 0:
                self._head = self._log.last()
            if sequence == self._until:
                return False
            if not self._log.has(sequence + 1):
                if self._head > sequence:
                    self._log.check(sequence)
                return False
            changes: list[pa.Table] = []
            size = 0
            try:
                for number, table in self._log.read(sequence):
                    changes.append(self._own(table))
                    sequence, size = number, size + table.nbytes
                    if size >= _PIECE_BYTES:
                        self._snapshot = self._changed(self._snapshot, sequence, pa.concat_tables(changes))
                        changes, size = [], 0
                    if sequence == self._until:
                        break
            finally:
                if changes:
                    self._snapshot = self._changed(self._snapshot, sequence, pa.concat_tables(changes))
            return True

    def search_many(self, queries: Sequence[ShardQuery]) -> list[ShardAnswer | Exception]:
        """Answer requests from one snapshot; those with equal `k` and filter share one FAISS call.

        Returns:
            For each request its answer, or its error (FilterError, ValueError).
        """
        snapshot = self._snapshot
        answers: list[ShardAnswer | Exception] = [ShardAnswer([], snapshot.sequence)] * len(queries)
        alike: dict[tuple[int, Filter | None], list[int]] = {}
        for position, query in enumerate(queries):
            try:
                self._require(query)
                alike.setdefault((query.k, filters.parse(query.filter, self._log.metadata)), []).append(position)
            except ValueError as error:
                answers[position] = error
        for (k, filter), positions in alike.items():
            stacked = np.concatenate([queries[position].vectors for position in positions])
            found = iter(self._search(snapshot, stacked, k, filter))
            for position in positions:
                answers[position] = ShardAnswer([next(found) for _ in queries[position].vectors], snapshot.sequence)
        return answers

    def get(self, id: str) -> Hit | None:
        """The passage of an id, with score 0; None if there is none."""
        snapshot = self._snapshot
        if id in snapshot.rows:
            (hit,) = _hits(snapshot.passages, np.array([snapshot.rows[id]]), np.zeros(1))
            return hit
        row = self.base.row_of(id)
        if row is None or (snapshot.keep is not None and not snapshot.keep[row]):
            return None
        ((hit,),) = self.base.hits(np.array([[row]]), np.zeros((1, 1)))
        return hit

    def content(self, rows_at_once: int = 1 << 14) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """All passages of the current snapshot, by id ascending.

        Yields:
            Up to `rows_at_once` passages, and their (n, d) float32 vectors.
        """
        snapshot, base = self._snapshot, self.base
        of_base = np.arange(len(base)) if snapshot.keep is None else np.flatnonzero(snapshot.keep)
        of_delta = np.flatnonzero(snapshot.live)
        ids = [base.passages.column("id").take(of_base), snapshot.passages.column("id").take(of_delta)]
        order = pc.sort_indices(pa.chunked_array([chunk for part in ids for chunk in part.chunks], TEXT)).to_numpy()
        for start in range(0, len(order), rows_at_once):
            some = order[start : start + rows_at_once]
            in_base = some < len(of_base)
            base_rows, delta_rows = of_base[some[in_base]], of_delta[some[~in_base] - len(of_base)]
            passages = pa.concat_tables([base.passages.take(base_rows), take(snapshot.passages, delta_rows)])
            vectors = np.concatenate([base.vectors(base_rows), snapshot.vectors[delta_rows]])
            by_id = pc.sort_indices(passages.column("id")).to_numpy()
            yield passages.take(by_id), vectors[by_id]

    def _require(self, query: ShardQuery) -> None:
        if query.k < 1:
            raise ValueError(f"k={query.k}: must be at least 1")
        shape = query.vectors.shape
        if len(shape) != 2 or shape[1] != self._log.dimension or not np.isfinite(query.vectors).all():
            raise ValueError(f"query vectors must be (n, {self._log.dimension}) finite numbers, got shape {shape}")

    def _search(self, snapshot: _Snapshot, vectors: np.ndarray, k: int, filter: Filter | None) -> list[list[Hit]]:
        """The best passages of each query in base and delta; exact over the delta."""
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        keep, live = snapshot.keep, snapshot.live
        if filter is not None:
            mask = self._base_mask(filter)
            keep = mask if keep is None else mask & keep
            live = live & filter.mask(snapshot.passages)
        scores, rows = self.base.search_rows(vectors, min(k, max(len(self.base), 1)), keep)
        if not live.any():
            return self.base.hits(rows, scores)
        delta = vectors @ snapshot.vectors.T
        delta[:, ~live] = -np.inf
        together = np.concatenate([np.where(rows < 0, -np.inf, scores), delta], axis=1)
        place = max(0, together.shape[1] - k)
        least = np.maximum(np.partition(together, place, axis=1)[:, place] - _ROUNDING, np.finfo(np.float32).min)
        of_base = self.base.hits(np.where(scores >= least[:, None], rows, -1), scores)  # reads no other texts
        of_delta = self._scored(snapshot, vectors, delta >= least[:, None])
        return [merge(both, k) for both in zip(of_base, of_delta, strict=True)]

    @staticmethod
    def _scored(snapshot: _Snapshot, vectors: np.ndarray, chosen: np.ndarray) -> list[list[Hit]]:
        """The chosen rows of the delta as hits of each query; `chosen` is (queries, m) bool.

        FAISS computes the scores, as it does for the base: a matrix product can give equal vectors unequal scores.
        """
        rows = np.nonzero(chosen)[1]
        scores, metric = np.empty(len(rows), np.float32), faiss.METRIC_INNER_PRODUCT
        ends = np.cumsum(chosen.sum(axis=1)).tolist()
        for query, (start, end) in enumerate(pairwise([0, *ends])):
            if start < end:
                of_query = snapshot.vectors[rows[start:end]]
                (found,), (places,) = faiss.knn(vectors[query : query + 1], of_query, end - start, metric)
                scores[start + places] = found
        every = _hits(snapshot.passages, rows, scores)
        return [every[start:end] for start, end in pairwise([0, *ends])]

    def _own(self, changes: pa.Table) -> pa.Table:
        """The changes to passages of this shard."""
        ids = changes.column("id").to_pylist()
        return changes.filter([shard_of(id, self._shards) == self._number for id in ids])

    def _changed(self, before: _Snapshot, sequence: int, changes: pa.Table) -> _Snapshot:
        """The snapshot after changes to this shard, up to `sequence`."""
        final = {id: row for row, id in enumerate(changes.column("id").to_pylist())}  # the last change to an id wins
        if not final:
            return replace(before, sequence=sequence)
        changes = changes.take(pa.array(final.values(), pa.int64()))
        rows, live, keep = dict(before.rows), before.live.copy(), before.keep
        in_base = [row for id in final if (row := self.base.row_of(id)) is not None]
        if in_base:
            keep = np.ones(len(self.base), bool) if keep is None else keep.copy()
            keep[in_base] = False
        for id in final:
            if id in rows:
                live[rows.pop(id)] = False
        put = changes.filter(pc.equal(changes.column(OP), "put"))
        rows |= {id: len(live) + row for row, id in enumerate(put.column("id").to_pylist())}
        live = np.concatenate([live, np.ones(len(put), bool)])
        passages = pa.concat_tables([before.passages, put.select(before.passages.column_names)])
        if passages.column("id").num_chunks > _MAX_CHUNKS:
            passages = passages.combine_chunks()
        vectors = put.column(VECTOR).combine_chunks().flatten().to_numpy().reshape(-1, self._log.dimension)
        store = _extended(
            before.store, len(before.live), vectors.astype(self.base.precision)
        )  # as compaction stores them
        return _without_dead_rows(_Snapshot(sequence, keep, passages, store, live, rows))


def _hits(passages: pa.Table, rows: np.ndarray, scores: np.ndarray) -> list[Hit]:
    """Fetch rows of a table of many chunks as hits."""
    if not len(rows):
        return []
    (batch,) = take(passages, rows).to_batches()
    return hits_of(batch, np.arange(len(rows)), scores)


def _extended(store: np.ndarray, used: int, vectors: np.ndarray) -> np.ndarray:
    """Append vectors to the used rows of `store`, in place if there is room."""
    needed = used + len(vectors)
    if needed > len(store):
        larger = np.empty((max(needed, 2 * len(store)), store.shape[1]), np.float32)
        larger[:used] = store[:used]
        store = larger
    store[used:needed] = vectors  # no snapshot reads these rows yet
    return store


def _without_dead_rows(snapshot: _Snapshot) -> _Snapshot:
    """Drop the dead rows of the delta if they are many, so that repeated puts of a passage do not accumulate."""
    live = snapshot.live
    if len(live) < _DEAD_ROWS or 2 * len(snapshot.rows) > len(live):
        return snapshot
    place = np.cumsum(live) - 1
    return replace(
        snapshot,
        passages=snapshot.passages.filter(live).combine_chunks(),
        store=snapshot.vectors[live],
        live=np.ones(len(snapshot.rows), bool),
        rows={id: int(place[row]) for id, row in snapshot.rows.items()},
    )
