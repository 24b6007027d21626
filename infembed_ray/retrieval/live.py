"""A shard while its index serves: the published base, and the changes made to it since.

What was put is a delta of flat vectors in memory, searched exactly; what was deleted, or put again, is hidden in the base.
A search takes one snapshot and sees that alone, and says the sequence of the last change that is in it; `refresh` makes the
next snapshot beside it. So searches and refreshing never wait for one another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.retrieval import filters
from infembed_ray.retrieval.changes import OP, VECTOR, ChangeLog
from infembed_ray.retrieval.faiss_import import faiss
from infembed_ray.retrieval.filters import Filter
from infembed_ray.retrieval.passages import TEXT, take
from infembed_ray.retrieval.shards import Hit, Shard, hits_of, merge, shard_of

MASKS = 16
"""Filters whose rows of the base are remembered; a byte a passage each."""
_PIECE_BYTES = 64 << 20
"""Of changes, which are applied together: the offsets of their vectors end at 2^31 numbers."""
_LOOKS = 10
"""Refreshes from one look for the head of the log to the next: a second of a replica that refreshes every tenth of one."""
_CHUNKS = 64
"""Of the delta's passages, before they are put together in one."""
_DEAD_ROWS = 1024
"""Of the delta, from which on they are dropped once they are more than half of it."""
_ROUNDING = 1e-5
"""More than float32 sums of a unit vector's products differ by, in whichever order."""


@dataclass(frozen=True)
class ShardQuery:
    """What one request asks of a shard."""

    vectors: np.ndarray
    """(n, d) float32 unit vectors."""
    k: int
    """Most hits a vector."""
    filter: Mapping[str, Any] | None = None
    """As in JSON."""


@dataclass(frozen=True)
class ShardAnswer:
    """What a shard answers to one request."""

    hits: list[list[Hit]]
    """For each vector, by (score, id), descending."""
    sequence: int
    """All changes up to this one are in it, and none after it."""


@dataclass(frozen=True)
class Document:
    """A passage as it is stored."""

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """One state of a shard. Nothing in it is ever changed; of `store`, only rows past this snapshot's are."""

    sequence: int
    keep: np.ndarray | None
    """(base rows,) bool: those not deleted, and not put again; None: all."""
    passages: pa.Table
    """The delta: m rows, as those of the base."""
    store: np.ndarray
    """(at least m, d) float32: the delta's vectors, and room for more."""
    live: np.ndarray
    """(m,) bool: rows of the delta not deleted, and not put again."""
    rows: Mapping[str, int]
    """Id -> its live row in the delta."""

    @property
    def vectors(self) -> np.ndarray:
        """(m, d) float32."""
        return self.store[: len(self.live)]


class LiveShard:
    """A shard under change. Searches from any threads may go on while another refreshes.

    Args:
        shard: the published base.
        log: the changes of the index' lineage.
        number: of this shard.
        shards: of the index; they share its documents by `shard_of`.
        folded: the last change that is in the base already.
        until: no change after this one is applied; None: all are.

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
        self._looks = self._head = 0
        self._base_mask = lru_cache(MASKS)(lambda filter: filter.mask(shard.passages))
        nothing = np.empty((0, log.dimension), np.float32)
        self._snapshot = _Snapshot(folded, None, shard.passages.schema.empty_table(), nothing, np.empty(0, bool), {})
        self.refresh()

    def __len__(self) -> int:
        snapshot = self._snapshot
        base = len(self.base) if snapshot.keep is None else int(snapshot.keep.sum())
        return base + len(snapshot.rows)

    @property
    def sequence(self) -> int:
        """The last change that searches see."""
        return self._snapshot.sequence

    @property
    def head(self) -> int:
        """The last change in the log, as of the last look for it."""
        return max(self._head, self.sequence)

    @property
    def delta(self) -> int:
        """Rows that are searched one by one, and base rows that are passed over: what compaction would save."""
        snapshot = self._snapshot
        return len(snapshot.live) + (0 if snapshot.keep is None else int((~snapshot.keep).sum()))

    def refresh(self) -> bool:
        """Apply what was changed since; False if nothing was, which costs one look at the file system.

        Raises:
            LogFault: the next change is damaged or missing. What came before it is applied and is served.
        """
        with self._refreshing:
            sequence = self._snapshot.sequence
            self._looks += 1
            if self._looks % _LOOKS == 0:
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
                    changes.append(self._ours(table))
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

    def search(self, vectors: np.ndarray, k: int, filter: Filter | None = None) -> ShardAnswer:
        """The best documents of each query, exact over what was put since the base was published.

        Args:
            vectors: (n, d) float32 unit vectors.
            k: most hits a vector; fewer come if the filter leaves fewer.
            filter: of the index' metadata columns.
        """
        return self._search(self._snapshot, vectors, k, filter)

    def search_many(self, queries: Sequence[ShardQuery]) -> list[ShardAnswer | Exception]:
        """Answer requests together, all from one snapshot; those with the same `k` and filter by one call to FAISS.

        Returns:
            As many as there are queries: an answer, or what was wrong with the query (FilterError, ValueError).
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
            found = iter(self._search(snapshot, stacked, k, filter).hits)
            for position in positions:
                hits = [next(found) for _ in queries[position].vectors]
                answers[position] = ShardAnswer(hits, snapshot.sequence)
        return answers

    def get(self, id: str) -> Document | None:
        """The document of an id."""
        snapshot = self._snapshot
        if id in snapshot.rows:
            (hit,) = _hits(snapshot.passages, np.array([snapshot.rows[id]]), np.zeros(1))
        else:
            row = self.base.row_of(id)
            if row is None or (snapshot.keep is not None and not snapshot.keep[row]):
                return None
            ((hit,),) = self.base.hits(np.array([[row]]), np.zeros((1, 1)))
        return Document(hit.id, hit.text, hit.metadata)

    def content(self, rows_at_once: int = 1 << 14) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """All documents as they are now, by id ascending, some at a time.

        Yields:
            n passages, and their (n, d) float32 vectors.
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

    def _search(self, snapshot: _Snapshot, vectors: np.ndarray, k: int, filter: Filter | None) -> ShardAnswer:
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        keep, live = snapshot.keep, snapshot.live
        if filter is not None:
            mask = self._base_mask(filter)
            keep = mask if keep is None else mask & keep
            live = live & filter.mask(snapshot.passages)
        scores, rows = self.base.search_rows(vectors, min(k, max(len(self.base), 1)), keep)
        if not live.any():
            return ShardAnswer(self.base.hits(rows, scores), snapshot.sequence)
        put = vectors @ snapshot.vectors.T
        put[:, ~live] = -np.inf
        together = np.concatenate([np.where(rows < 0, -np.inf, scores), put], axis=1)
        place = max(0, together.shape[1] - k)
        least = np.maximum(np.partition(together, place, axis=1)[:, place] - _ROUNDING, np.finfo(np.float32).min)
        of_base = self.base.hits(np.where(scores >= least[:, None], rows, -1), scores)  # other texts stay on disk
        of_put = self._scored(snapshot, vectors, put >= least[:, None])
        return ShardAnswer([merge(both, k) for both in zip(of_base, of_put, strict=True)], snapshot.sequence)

    @staticmethod
    def _scored(snapshot: _Snapshot, vectors: np.ndarray, chosen: np.ndarray) -> list[list[Hit]]:
        """For each query, rows of the delta as hits; `chosen` is (queries, m) bool.

        Their sums are FAISS's, as those of the base are: a matrix product may give equal vectors unequal scores.
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

    def _ours(self, changes: pa.Table) -> pa.Table:
        """Those changes that are to documents of this shard."""
        ids = changes.column("id").to_pylist()
        return changes.filter([shard_of(id, self._shards) == self._number for id in ids])

    def _changed(self, before: _Snapshot, sequence: int, changes: pa.Table) -> _Snapshot:
        """The snapshot after changes to this shard; `sequence` is that of the last segment read for it."""
        final = {id: row for row, id in enumerate(changes.column("id").to_pylist())}  # the last change to an id decides
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
        if passages.column("id").num_chunks > _CHUNKS:
            passages = passages.combine_chunks()
        vectors = put.column(VECTOR).combine_chunks().flatten().to_numpy().reshape(-1, self._log.dimension)
        store = _extended(before.store, len(before.live), vectors)
        return _without_the_dead(_Snapshot(sequence, keep, passages, store, live, rows))


def _hits(passages: pa.Table, rows: np.ndarray, scores: np.ndarray) -> list[Hit]:
    """Some rows of a table of many chunks as hits."""
    if not len(rows):
        return []
    (batch,) = take(passages, rows).to_batches()
    return hits_of(batch, np.arange(len(rows)), scores)


def _extended(store: np.ndarray, used: int, vectors: np.ndarray) -> np.ndarray:
    """A store whose first rows are the used ones of `store` and then `vectors`: the same one where it has room."""
    needed = used + len(vectors)
    if needed > len(store):
        larger = np.empty((max(needed, 2 * len(store)), store.shape[1]), np.float32)
        larger[:used] = store[:used]
        store = larger
    store[used:needed] = vectors  # no snapshot yet reads these rows
    return store


def _without_the_dead(snapshot: _Snapshot) -> _Snapshot:
    """The same state without the delta's dead rows, if they are many: documents put over and over take no more room."""
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
