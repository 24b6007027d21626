"""A live shard: the immutable published shard (base), and the changes of the write-ahead log on top.

Passages put since are vectors in memory (delta), searched exactly; deleted or replaced rows of the base are masked (tombstones). A
search reads one snapshot, and `refresh` builds the next beside it, so they do not block each other.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.retrieval import filters
from infembed_ray.retrieval.answers import Behind, ScoreQuery, ShardAnswer, ShardQuery, nearest
from infembed_ray.retrieval.chunks import as_chunks
from infembed_ray.retrieval.faiss_import import faiss
from infembed_ray.retrieval.filters import Filter
from infembed_ray.retrieval.lexical import DeltaTerms, terms_of
from infembed_ray.retrieval.passages import CHUNKS, TEXT, VectorRows, row_of, take
from infembed_ray.retrieval.shards import Hit, Shard, hits_of
from infembed_ray.retrieval.updates.write_ahead_log import OP, VECTOR, ChangeLog, LogFault

_DEAD_ROWS = 1024
"""Least rows of the delta from which dead rows are dropped, once they are more than half."""
DELETED = -1
_CACHED_MASKS = 16
"""Filters whose mask of the base is cached, one byte per passage each."""
_PIECE_BYTES = 64 << 20
"""Bytes of changes applied at once; 32-bit offsets end at 2^31 numbers."""
_REFRESHES_PER_LOOK = 10
"""Refreshes per look for the head of the log: one second of a replica that refreshes every 100 ms."""
_MAX_CHUNKS = 64
"""Chunks of the delta's passages, before they are joined."""
_ROUNDING = 1e-5
"""More than float32 inner products of unit vectors differ by with the order of summation."""


@dataclass(frozen=True, eq=False)
class LiveState:
    """An immutable state of a shard with m rows in the delta.

    Attributes:
        sequence: of the last change in it.
        keep: (base rows,) bool, False for tombstones; None: all rows are live.
        passages: m rows of the delta, with the columns of the base.
        store: (at least vector_rows.size, d) float32 vectors of the delta; those beyond belong to later snapshots.
        live: (m,) bool, False for rows that were deleted or replaced.
        rows: id of each document that differs from the base -> its live row in the delta, or `DELETED`.
        terms: of the delta's texts; rows beyond m belong to later snapshots; None without a lexical index.
    """

    sequence: int
    keep: np.ndarray | None
    passages: pa.Table
    store: np.ndarray
    live: np.ndarray
    rows: Mapping[str, int]
    terms: DeltaTerms | None

    @cached_property
    def vector_rows(self) -> VectorRows:
        """The vectors of each row of the delta."""
        return VectorRows.of(self.passages)


def delta_place(row: Any) -> Any:
    """The place of a row of the delta, or of an array of rows: negative, unlike a row of the base. Its own inverse."""
    return -1 - row


def extended(store: np.ndarray, used: int, vectors: np.ndarray) -> np.ndarray:
    """Append vectors to the used rows of `store`, in place if there is room."""
    needed = used + len(vectors)
    if needed > len(store):
        larger = np.empty((max(needed, 2 * len(store)), store.shape[1]), np.float32)
        larger[:used] = store[:used]
        store = larger
    store[used:needed] = vectors  # no snapshot reads these rows yet
    return store


def without_dead_rows(snapshot: LiveState) -> LiveState:
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
        store=snapshot.store[: snapshot.vector_rows.size][snapshot.vector_rows.spread(live)],
        live=np.ones(count, bool),
        rows={id: row if row == DELETED else int(place[row]) for id, row in snapshot.rows.items()},
    )


class LiveShard:
    """A shard with changes. Any threads can search while one refreshes.

    Args:
        folded: sequence of the last change that the base includes.
        until: last change to apply; None: apply all.

    Raises:
        LogFault: a change after `folded` is missing or damaged.
    """

    def __init__(self, shard: Shard, log: ChangeLog, number: int, folded: int, until: int | None = None) -> None:
        log.check(folded)
        self.base = shard
        self._log = log
        self._number = number
        self._until = until
        self._refreshing = threading.Lock()
        self._refreshes = self._head = 0
        self._base_mask = lru_cache(_CACHED_MASKS)(lambda filter: filter.mask(shard.passages))
        no_vectors, no_passages = np.empty((0, log.dimension), np.float32), shard.passages.schema.empty_table()
        terms = None if shard.lexical is None else DeltaTerms()
        self._snapshot = LiveState(folded, None, no_passages, no_vectors, np.empty(0, bool), {}, terms)
        self.refresh()

    def __len__(self) -> int:
        snapshot = self._snapshot
        base = len(self.base) if snapshot.keep is None else int(snapshot.keep.sum())
        return base + int(snapshot.live.sum())

    @property
    def sequence(self) -> int:
        """Sequence of the last change that searches see."""
        return self._snapshot.sequence

    @property
    def head(self) -> int:
        """Sequence of the last change in the log, as of the last look for it."""
        return max(self._head, self.sequence)

    @property
    def changed(self) -> int:
        """Documents that differ from the base: a search compares each of them, until compaction folds them in."""
        return len(self._snapshot.rows)

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
                for number, table in self._log.read(sequence, self._number):
                    sequence, size = number, size + table.nbytes
                    if len(table):
                        changes.append(table)
                    if size >= _PIECE_BYTES:
                        self._apply(sequence, changes)
                        changes, size = [], 0
                    if sequence == self._until:
                        break
            finally:
                self._apply(sequence, changes)
            return True

    def search_many(self, queries: Sequence[ShardQuery]) -> list[ShardAnswer | Exception]:
        """Answer requests from one snapshot; those with equal `k` and filter share one FAISS call.

        Returns:
            For each request its answer, or its error (FilterError, ValueError, Behind).
        """
        if any(query.min_sequence > self.sequence for query in queries):
            with contextlib.suppress(LogFault):  # the next refresh reports it
                self.refresh()
        snapshot = self._snapshot
        answers: list[ShardAnswer | Exception] = [Behind(snapshot.sequence)] * len(queries)
        alike: dict[tuple[Any, ...], list[int]] = {}
        for position, query in enumerate(queries):
            try:
                self._require(query)
                if query.min_sequence <= snapshot.sequence:
                    kind = query.k, query.depth, query.texts is None
                    filter = filters.parse(query.filter, self._log.metadata)
                    alike.setdefault((filter, *kind), []).append(position)
            except ValueError as error:
                answers[position] = error
        for (filter, *_), positions in alike.items():
            asked = ShardQuery.together([queries[position] for position in positions])
            together, start = self._search(snapshot, asked, filter), 0
            for position in positions:
                end = start + len(queries[position].vectors)
                answers[position] = together if len(positions) == 1 else together.part(start, end)
                start = end
        return answers

    def get(self, id: str) -> Hit | None:
        """The passage of an id, with score 0; None if there is none."""
        snapshot = self._snapshot
        if (place := self._place(snapshot, id)) is None:
            return None
        (hit,) = hits_of(self._passages(snapshot, np.array([place])), np.zeros(1))
        return hit

    def scores(self, query: ScoreQuery) -> np.ndarray:
        """Score passages by their best chunks: (n, m) float32 inner products; NaN for ids without a passage."""
        snapshot = self._snapshot
        scores = np.full((len(query.vectors), len(query.ids)), np.nan, np.float32)
        places = [self._place(snapshot, id) for id in query.ids]
        here = [number for number, place in enumerate(places) if place is not None]
        passages = np.array([places[number] for number in here], np.int64)
        for row, vector in zip(scores, query.vectors, strict=True):
            row[here], _ = self._exact(snapshot, vector, passages)
        return scores

    def content(self, rows_at_once: int = 1 << 14) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """All passages of the current snapshot, by id ascending.

        Yields:
            Up to `rows_at_once` passages, and the (n, d) float32 vectors of their chunks.
        """
        snapshot, base = self._snapshot, self.base
        of_base = np.arange(len(base)) if snapshot.keep is None else np.flatnonzero(snapshot.keep)
        of_delta = np.flatnonzero(snapshot.live)
        ids = [base.passages.column("id").take(of_base), snapshot.passages.column("id").take(of_delta)]
        order = pc.sort_indices(pa.chunked_array([chunk for part in ids for chunk in part.chunks], TEXT)).to_numpy()
        places = np.concatenate([of_base, delta_place(of_delta)])[order]
        for start in range(0, len(places), rows_at_once):
            some = places[start : start + rows_at_once]
            yield self._passages(snapshot, some), self._vectors(snapshot, np.concatenate(self._chunks(snapshot, some)))

    def _require(self, query: ShardQuery) -> None:
        if query.k < 1:
            raise ValueError(f"k={query.k}: must be at least 1")
        shape = query.vectors.shape
        if len(shape) != 2 or shape[1] != self._log.dimension or not np.isfinite(query.vectors).all():
            raise ValueError(f"query vectors must be (n, {self._log.dimension}) finite numbers, got shape {shape}")
        if query.texts is not None and query.depth < query.k:
            raise ValueError(f"depth={query.depth}: must be at least k={query.k}")
        if query.texts is not None and self.base.lexical is None:
            raise ValueError("this shard has no lexical index; build it with lexical=true")

    def _search(self, snapshot: LiveState, query: ShardQuery, filter: Filter | None) -> ShardAnswer:
        """The best passages of each query in base and delta; exact over the delta."""
        vectors = np.ascontiguousarray(query.vectors, dtype=np.float32)
        k = query.k if query.texts is None else query.depth
        keep, live = snapshot.keep, snapshot.live
        if filter is not None:
            mask = self._base_mask(filter)
            keep = mask if keep is None else mask & keep
            live = live & filter.mask(snapshot.passages)
        scores, rows = self.base.search_rows(vectors, min(k, max(len(self.base), 1)), keep)
        if not len(vectors) or (query.texts is None and not live.any() and self.base.rows.starts is None):
            return ShardAnswer(self.base.hits(rows, scores), snapshot.sequence)
        of_delta = snapshot.vector_rows.largest(vectors @ snapshot.store[: snapshot.vector_rows.size].T)
        of_delta[:, ~live] = -np.inf
        of_each = zip(vectors, scores, rows, of_delta, strict=True)
        best = [self._best(snapshot, k, *of_query) for of_query in of_each]
        if query.texts is None:
            hits = self._hits(snapshot, vectors, best)
            return ShardAnswer([nearest(of_vector, k) for of_vector in hits], snapshot.sequence)
        lexical = []
        for number, (text, vector) in enumerate(zip(query.texts, vectors, strict=True)):
            words = self._words(snapshot, text, keep, live)
            by_words = np.flatnonzero(words)
            if len(by_words) > k:  # of equal scores at the end, some
                by_words = by_words[np.argpartition(words[by_words], -k)[-k:]]
            places = np.union1d(best[number][1], np.where(by_words < len(self.base), by_words, by_words - len(words)))
            best[number] = self._exact(snapshot, vector, places)[0], places
            lexical.append(words[places])
        return ShardAnswer(self._hits(snapshot, vectors, best), snapshot.sequence, lexical)

    def _best(
        self, snapshot: LiveState, k: int, vector: np.ndarray, scores: np.ndarray, rows: np.ndarray, delta: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores and places of the best `k` passages in base and delta, and of those with the score of the last one.

        Args:
            scores, rows: the best of the base, padded with row -1.
            delta: products with the passages of the delta, -inf for those that may not be found.
        """
        together = np.concatenate([np.where(rows < 0, -np.inf, scores), delta])
        last = max(0, len(together) - k)
        least = max(np.partition(together, last)[last] - _ROUNDING, np.finfo(np.float32).min)
        in_base, near = (rows >= 0) & (scores >= least), delta_place(np.flatnonzero(delta >= least))
        exact = np.concatenate([scores[in_base], self._exact(snapshot, vector, near)[0]])
        places = np.concatenate([rows[in_base], near])
        if len(exact) > k:
            best = exact >= np.partition(exact, -k)[-k]
            exact, places = exact[best], places[best]
        return exact, places

    def _words(self, snapshot: LiveState, text: str, keep: np.ndarray | None, live: np.ndarray) -> np.ndarray:
        """BM25 of the rows of the base, then of the delta from its last row to its first, so that places are indices."""
        assert self.base.lexical is not None
        assert snapshot.terms is not None
        terms = terms_of(text)
        of_base = self.base.lexical.scores(terms)
        if keep is not None:
            of_base[~keep] = 0
        of_delta = snapshot.terms.scores(self.base.lexical, terms, len(live)) * live
        return np.concatenate([of_base, of_delta[::-1]])

    def _chunks(self, snapshot: LiveState, passages: np.ndarray) -> list[np.ndarray]:
        """The places of the vectors of passages in base and delta: in one array, or with chunks, an array for each passage."""
        if self.base.rows.starts is None:
            return [passages]
        of_base, of_delta = self.base.rows.of_passages, snapshot.vector_rows.of_passages
        return [of_base([row]) if row >= 0 else delta_place(of_delta([delta_place(row)])) for row in passages]

    def _exact(self, snapshot: LiveState, vector: np.ndarray, passages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The scores of passages in base and delta, and the numbers of their best chunks."""
        chunks = self._chunks(snapshot, passages)
        scores = _scores(vector, self._vectors(snapshot, np.concatenate([np.empty(0, np.int64), *chunks])))
        if self.base.rows.starts is None:
            return scores, np.zeros(len(scores), np.int64)
        starts = np.cumsum([0, *map(len, chunks)])
        best = [int(scores[start:end].argmax()) for start, end in pairwise(starts)]
        return scores[starts[:-1] + best] if best else scores, np.array(best, np.int64)

    def _vectors(self, snapshot: LiveState, places: np.ndarray) -> np.ndarray:
        """The vectors of m places of vectors in base and delta, (m, d) float32."""
        vectors = np.empty((len(places), self._log.dimension), np.float32)
        in_base = places >= 0
        vectors[in_base] = self.base.vectors(places[in_base])
        vectors[~in_base] = snapshot.store[delta_place(places[~in_base])]
        return vectors

    def _passages(self, snapshot: LiveState, places: np.ndarray) -> pa.Table:
        """The passages of places in base and delta."""
        in_base = places >= 0
        of_delta = take(snapshot.passages, delta_place(places[~in_base]))
        # From base and delta to the places' order.
        back = np.argsort(np.argsort(~in_base, kind="stable"), kind="stable")
        return pa.concat_tables([self.base.take(places[in_base]), of_delta]).take(pa.array(back))

    def _hits(
        self, snapshot: LiveState, vectors: np.ndarray, best: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> list[list[Hit]]:
        """The passages of scores and places of each query, with their best chunks."""
        scores, places = (np.concatenate(parts) for parts in zip(*best, strict=True))
        passages = self._passages(snapshot, places)
        every = hits_of(passages, scores)
        if self.base.rows.starts is not None:
            numbers = [self._exact(snapshot, vector, own)[1] for vector, (_, own) in zip(vectors, best, strict=True)]
            cut = zip(every, passages.column(CHUNKS).to_pylist(), np.concatenate(numbers).tolist(), strict=True)
            every = [hit._replace(chunk=as_chunks(hit.text, bounds)[number]) for hit, bounds, number in cut]
        return [every[start:end] for start, end in pairwise([0, *np.cumsum([len(some) for some, _ in best])])]

    def _place(self, snapshot: LiveState, id: str) -> int | None:
        """The place of a document; None if there is none."""
        row = snapshot.rows.get(id)
        if row is None:
            return row_of(self.base.passages, id)
        return None if row == DELETED else int(delta_place(row))

    def _apply(self, sequence: int, tables: Sequence[pa.Table]) -> None:
        """Make the snapshot after changes to this shard, up to `sequence`, the current one."""
        before = self._snapshot
        if not tables:
            self._snapshot = replace(before, sequence=sequence)
            return
        changes = pa.concat_tables(tables)
        final = {id: row for row, id in enumerate(changes.column("id").to_pylist())}  # the last change to an id wins
        changes = changes.take(pa.array(final.values(), pa.int64()))
        rows, live, keep = dict(before.rows), before.live.copy(), before.keep
        in_base = {id: row for id in final if (row := row_of(self.base.passages, id)) is not None}
        if in_base:
            keep = np.ones(len(self.base), bool) if keep is None else keep.copy()
            keep[list(in_base.values())] = False
        for id in final:
            if (row := rows.pop(id, DELETED)) != DELETED:
                live[row] = False
        rows |= dict.fromkeys(in_base, DELETED)
        put = changes.filter(pc.equal(changes.column(OP), "put"))
        rows |= {id: len(live) + row for row, id in enumerate(put.column("id").to_pylist())}
        live = np.concatenate([live, np.ones(len(put), bool)])
        passages = pa.concat_tables([before.passages, put.select(before.passages.column_names)])
        if passages.column("id").num_chunks > _MAX_CHUNKS:
            passages = passages.combine_chunks()
        vectors = put.column(VECTOR).combine_chunks().flatten().to_numpy().reshape(-1, self._log.dimension)
        vectors = vectors.astype(self.base.precision)  # as compaction stores them
        store = extended(before.store, before.vector_rows.size, vectors)
        if before.terms is not None:
            before.terms.add(len(before.live), put.column("text").to_pylist())
        self._snapshot = without_dead_rows(LiveState(sequence, keep, passages, store, live, rows, before.terms))


def _scores(vector: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The scores of m vectors.

    FAISS computes them, as it does for the base: a matrix product can give equal vectors unequal scores.
    """
    scores = np.empty(len(rows), np.float32)
    if len(rows):
        (ordered,), (places,) = faiss.knn(vector[None], rows, len(rows), faiss.METRIC_INNER_PRODUCT)
        scores[places] = ordered
    return scores
