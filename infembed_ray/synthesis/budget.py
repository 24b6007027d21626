"""What a journal has cost, so that a budget holds over all runs on it, however they ended."""

from __future__ import annotations

import json
from pathlib import Path

from infembed_ray.config import Limits
from infembed_ray.errors import InputError
from infembed_ray.storage import write_json
from infembed_ray.synthesis.journal import decode, segments
from infembed_ray.synthesis.journal_index import JournalIndex
from infembed_ray.synthesis.limits import Figures, Grant, Ledger, Report
from infembed_ray.synthesis.prices import PriceTable

UNJOURNALED = "unjournaled.json"
"""USD spent on answers that are not in the journal, in its directory: a budget counts them, run after run. While a run
is on, or after it was killed, instead the most that it may have spent so far."""
NOTED_AHEAD = 0.01
"""So much of the budget is noted as spent ahead of time, since each note waits for the disk."""


def spent_usd(journal: Path, table: PriceTable) -> float:
    """What a journal has cost: the list price of all it holds, and what runs noted beside it.

    Raises:
        InputError: it holds answers of a model whose price is not known.
    """
    noted, journaled = journal / UNJOURNALED, _journaled_usd(journal, table)
    spent: dict[str, float] = json.loads(noted.read_text()) if noted.is_file() else {"usd": 0.0}
    return max(journaled, spent["at_most_usd"]) if "at_most_usd" in spent else journaled + spent["usd"]


def note_unjournaled(journal: Path, table: PriceTable, spent_usd: float) -> None:
    """Note what was spent, or may have been, on answers that never arrived."""
    write_json(journal / UNJOURNALED, {"usd": max(0.0, spent_usd - _journaled_usd(journal, table))})


def _journaled_usd(journal: Path, table: PriceTable) -> float:
    spent, seen = 0.0, JournalIndex()  # 16 bytes an entry
    for segment in segments([journal]):
        with segment.open("rb") as lines:
            for line in lines:
                entry = decode(line)
                if entry is None or seen.find(entry[0]) is not None:
                    continue
                seen.add(entry[0], file=0, offset=0)
                model = json.loads(line)["model"]
                usd = table.usd(model, entry[1])
                if usd is None:
                    raise InputError(
                        f"journal={journal}: it holds answers of {model}, whose price is not known, so nobody knows "
                        "what is left of limits.budget_usd; give its prices in a file and set prices=FILE"
                    )
                spent += usd
    return spent


class NotedLedger:
    """A ledger that notes beside the journal what it grants of a budget, before it does: a kill must not forget it.

    Args:
        limits, slots, spent_usd: of the `Ledger`.
        journal: the journal's directory.
    """

    def __init__(self, limits: Limits, slots: int, spent_usd: float, journal: Path) -> None:
        self._ledger = Ledger(limits, slots, spent_usd)
        self._budget_usd = limits.budget_usd
        self._note = journal / UNJOURNALED
        self._noted_usd = -1.0

    def exchange(self, report: Report) -> Grant:
        """See `Ledger.exchange`."""
        grant = self._ledger.exchange(report)
        committed_usd = self._ledger.committed_usd
        if self._budget_usd is not None and committed_usd > self._noted_usd:
            self._noted_usd = min(self._budget_usd, committed_usd + NOTED_AHEAD * self._budget_usd)
            self._note.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._note, {"at_most_usd": max(self._noted_usd, committed_usd)})
        return grant

    def conclude(self) -> None:
        """Nothing is in flight any more: note what was spent, and no more than that."""
        if self._budget_usd is not None:
            self._noted_usd = self._ledger.committed_usd
            write_json(self._note, {"at_most_usd": self._noted_usd})

    def figures(self) -> Figures:
        """See `Ledger.figures`."""
        return self._ledger.figures()
