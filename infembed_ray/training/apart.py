"""Dealing records out to steps so that no text stands twice in one: no record's positive is another's negative."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from infembed_ray.records import Record
from infembed_ray.training.tuples import flatten

Texts = Sequence[Sequence[int]] | Mapping[int, Sequence[int]]
"""Record -> numbers of its texts that other records have too."""

_LOOK = 64
"""Most records that wait for a step, or steps that are looked at for one that fits: it bounds what an epoch costs."""


def shared_texts(records: Sequence[Record]) -> list[list[int]]:
    """Numbers of the instructions, queries and passages of every record that other records have too."""
    of_records = []
    for record in records:
        kinds = ("instruction", "query", "passage")
        of_records.append({_digest(kind, getattr(t, kind)) for t in flatten(record) for kind in kinds})
    uses = Counter(text for texts in of_records for text in texts)
    return [sorted(text for text in texts if uses[text] > 1) for texts in of_records]


def _digest(kind: str, text: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{kind}/{text}".encode(), digest_size=7).digest(), "big")


def deal(order: Sequence[int], texts: Texts, count: int, rng: random.Random) -> tuple[list[list[int]], int]:
    """Deal records out to steps that differ in size by at most one.

    Records that share a text are dealt one after the other, each to the next step, as cards are: no text comes back to
    a step before all others had it. Who still does not fit, for another of its texts, waits for the next step.

    Args:
        order: the records of an epoch, shuffled.
        texts: of every record.
        count: of steps.
        rng: deals.

    Returns:
        the steps, and how many records had to go to one where a text of theirs stands already.
    """
    steps = _Steps(texts, count)
    places = rng.sample(range(count), count)
    stream = iter(_clustered(order, texts))
    waiting: deque[int] = deque()
    hopeless: list[int] = []
    gaps: list[int] = []
    for n in range(len(order)):
        step = places[n % count]
        fitting = next((row for row in waiting if steps.fits(row, step)), None)
        if fitting is not None:
            waiting.remove(fitting)
        while fitting is None and len(waiting) < _LOOK and (row := next(stream, None)) is not None:
            if steps.fits(row, step):
                fitting = row
            else:
                (hopeless if steps.everywhere(row) else waiting).append(row)
        if fitting is None:
            gaps.append(step)
        else:
            steps.put(fitting, step)
    repeated = 0
    for gap, row in zip(gaps, [*waiting, *stream, *hopeless], strict=True):
        step = gap
        if not steps.fits(row, gap):
            looked_at = [] if steps.everywhere(row) else rng.sample(range(count), min(count, _LOOK))
            step = steps.make_room(row, gap, looked_at)
            repeated += step == gap
        steps.put(row, step)
    return steps.rows, repeated


def _clustered(order: Sequence[int], texts: Texts) -> list[int]:
    """The same records, those together that have the same text; of a record's texts, the one that most records have."""
    uses = Counter(text for row in order for text in texts[row])
    clusters: dict[int, list[int]] = defaultdict(list)
    for row in order:
        clusters[max(texts[row], key=lambda text: (uses[text], text)) if texts[row] else -1 - row].append(row)
    return [row for cluster in clusters.values() for row in cluster]


class _Steps:
    """Steps being filled.

    Attributes:
        rows: records of each step.
    """

    def __init__(self, texts: Texts, count: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(count)]
        self._texts = texts
        self._held: list[set[int]] = [set() for _ in range(count)]
        self._spread: Counter[int] = Counter()  # in how many steps a text stands

    def fits(self, row: int, step: int) -> bool:
        """Are all texts of a record new to a step?"""
        return self._held[step].isdisjoint(self._texts[row])

    def everywhere(self, row: int) -> bool:
        """Does a text of a record stand in every step?"""
        return any(self._spread[text] == len(self.rows) for text in self._texts[row])

    def put(self, row: int, step: int) -> None:
        """Add a record to a step."""
        new = [text for text in self._texts[row] if text not in self._held[step]]
        self.rows[step].append(row)
        self._held[step].update(new)
        self._spread.update(new)

    def make_room(self, row: int, gap: int, steps: Sequence[int]) -> int:
        """Move another record into the gap from a step, of these, that `row` fits; that step, or the gap if none does."""
        for step in steps:
            moving = next((r for r in self.rows[step] if self.fits(r, gap)), None)
            if moving is not None and self.fits(row, step):
                self.rows[step].remove(moving)
                left = {text for r in self.rows[step] for text in self._texts[r]}
                self._spread.subtract(self._held[step] - left)
                self._held[step] = left
                self.put(moving, gap)
                return step
        return gap
