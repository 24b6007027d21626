"""Batch assignment without duplicate texts in a batch, so that no record's positive is another one's negative."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.training.collate import flatten

Texts = Sequence[Sequence[int]] | Mapping[int, Sequence[int]]
"""Record -> numbers of its texts that occur in other records too."""

_LOOK = 64
"""Maximum number of deferred records, and of batches searched for one that fits: it bounds the cost of an epoch."""


def shared_texts(records: Sequence[TrainingRecord]) -> list[list[int]]:
    """Number the instructions, queries and passages of every record that occur in other records too."""
    of_records = []
    for record in records:
        of_records.append(
            {
                _digest(kind, text)
                for t in flatten(record)
                for kind, texts in (
                    ("instruction", [t.instruction]),
                    ("query", [t.query]),
                    ("passage", [t.passage, *t.other_positives]),
                )
                for text in texts
                if text
            }
        )
    uses = Counter(text for texts in of_records for text in texts)
    return [sorted(text for text in texts if uses[text] > 1) for texts in of_records]


def _digest(kind: str, text: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{kind}/{text}".encode(), digest_size=7).digest(), "big")


def assign(order: Sequence[int], texts: Texts, count: int, rng: random.Random) -> tuple[list[list[int]], int]:
    """Assign records to batches that differ in size by at most one.

    Records that share a text are dealt one after the other, each to the next batch, so that a text returns to a batch
    only after all others had it. A record that conflicts by another of its texts is deferred to a later batch.

    Args:
        order: Records of an epoch, shuffled.
        texts: Texts of every record.
        count: Number of batches.
        rng: Generator of random numbers.

    Returns:
        The batches, and the number of records that had to go to a batch with one of their texts.
    """
    batches = _Batches(texts, count)
    turns = rng.sample(range(count), count)
    gaps, left = _deal(batches, iter(_clustered(order, texts)), [turns[n % count] for n in range(len(order))])
    repeated = 0
    for gap, row in zip(gaps, left, strict=True):
        batch = gap
        if not batches.fits(row, gap):
            candidates = [] if batches.in_all(row) else rng.sample(range(count), min(count, _LOOK))
            batch = batches.make_room(row, gap, candidates)
            repeated += batch == gap
        batches.put(row, batch)
    return batches.rows, repeated


def _clustered(order: Sequence[int], texts: Texts) -> list[int]:
    """Group the records by the most frequent of their shared texts, in their order."""
    uses = Counter(text for row in order for text in texts[row])
    clusters: dict[int, list[int]] = defaultdict(list)
    for row in order:
        clusters[max(texts[row], key=lambda text: (uses[text], text)) if texts[row] else -1 - row].append(row)
    return [row for cluster in clusters.values() for row in cluster]


def _deal(batches: _Batches, stream: Iterator[int], turns: Sequence[int]) -> tuple[list[int], list[int]]:
    """Give a fitting record to the batch of each turn; return the batches left a record short, and the records left."""
    deferred: deque[int] = deque()
    unplaceable: list[int] = []
    gaps: list[int] = []
    for batch in turns:
        fitting = next((row for row in deferred if batches.fits(row, batch)), None)
        if fitting is not None:
            deferred.remove(fitting)
        while fitting is None and len(deferred) < _LOOK and (row := next(stream, None)) is not None:
            if batches.fits(row, batch):
                fitting = row
            else:
                (unplaceable if batches.in_all(row) else deferred).append(row)
        if fitting is None:
            gaps.append(batch)
        else:
            batches.put(fitting, batch)
    return gaps, [*deferred, *stream, *unplaceable]


class _Batches:
    """Batches being filled; `rows` are the records of each."""

    def __init__(self, texts: Texts, count: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(count)]
        self._texts = texts
        self._held: list[set[int]] = [set() for _ in range(count)]
        self._spread: Counter[int] = Counter()  # text -> number of batches that hold it

    def fits(self, row: int, batch: int) -> bool:
        """Return whether a batch holds none of a record's texts."""
        return self._held[batch].isdisjoint(self._texts[row])

    def in_all(self, row: int) -> bool:
        """Return whether every batch holds one and the same text of a record."""
        return any(self._spread[text] == len(self.rows) for text in self._texts[row])

    def put(self, row: int, batch: int) -> None:
        """Add a record to a batch."""
        new = [text for text in self._texts[row] if text not in self._held[batch]]
        self.rows[batch].append(row)
        self._held[batch].update(new)
        self._spread.update(new)

    def make_room(self, row: int, gap: int, candidates: Sequence[int]) -> int:
        """Move a record from a candidate batch that `row` fits into the gap; return that batch, or the gap if none fits."""
        for batch in candidates:
            moving = next((r for r in self.rows[batch] if self.fits(r, gap)), None)
            if moving is not None and self.fits(row, batch):
                self.rows[batch].remove(moving)
                left = {text for r in self.rows[batch] for text in self._texts[r]}
                self._spread.subtract(self._held[batch] - left)
                self._held[batch] = left
                self.put(moving, gap)
                return batch
        return gap
