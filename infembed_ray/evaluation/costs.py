"""What a model costs in an evaluation, as measured: texts per second, seconds per query, US dollars."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

PASSAGES, QUERIES, PAIRS, SEARCH, RANK = "passages", "queries", "pairs", "search", "rank"
"""What takes time: encoding passages or queries, scoring pairs, exact search over embeddings, ranking whole tasks."""

SPEED, LATENCY, USD = FIGURES = ("texts per second", "seconds per query", "USD")
MEANING = (
    "Measured in this evaluation, in large batches, without loading models: texts or pairs per second of one actor; seconds to "
    "encode a query and search exactly, or to score its pairs, or BM25's with its index; USD paid in this run. Empty: nothing "
    "was computed, because all was stored, or no price is known"
)


@dataclass
class Cost:
    """Adds up what a model computes. What is read from the store costs nothing and does not count."""

    pairs_per_query: float = 0.0
    usd: float = 0.0
    """NaN if a price is unknown or the model costs no money."""
    _units: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, part: str, units: int, seconds: float, usd: float = 0.0) -> None:
        """Add a part of the work: its passages, queries or pairs, and the seconds of the process that did it."""
        self._units[part] += units
        self._seconds[part] += seconds
        self.usd += usd

    @property
    def figures(self) -> dict[str, float]:
        """The known ones of `FIGURES`."""
        each = {part: self._seconds[part] / units for part, units in self._units.items()}
        computed = [part for part in (PASSAGES, QUERIES, PAIRS) if part in each]
        found = {}
        if computed:
            found[SPEED] = sum(self._units[part] for part in computed) / sum(self._seconds[part] for part in computed)
        if QUERIES in each and SEARCH in each:
            found[LATENCY] = each[QUERIES] + each[SEARCH]
        elif PAIRS in each:
            found[LATENCY] = each[PAIRS] * self.pairs_per_query
        elif RANK in each:
            found[LATENCY] = each[RANK]
        if computed and not math.isnan(self.usd):
            found[USD] = self.usd
        return found
