"""The USD that a journal has cost, so that a budget holds over all runs on it, even killed ones."""

from __future__ import annotations

import json

from infembed_ray import durable
from infembed_ray.config.llm import Limits
from infembed_ray.errors import InputError
from infembed_ray.llm.journal import decode, segments
from infembed_ray.llm.journal_index import JournalIndex
from infembed_ray.llm.journal_store import JournalPlace, sources
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.rate_limits import Grant, LeaseReport, Ledger
from infembed_ray.object_store import Folder

UNJOURNALED = "unjournaled.json"
"""File beside the journal's segments. `usd`: what was spent on answers that are not in the journal. `at_most_usd`, during a
run and after a kill: the most that may have been spent in all."""
NOTED_AHEAD = 0.01
"""Share of the budget that is noted as spent ahead of time, since each note waits for the disk."""


def spent_usd(journal: JournalPlace, table: PriceTable) -> float:
    """Return what a journal has cost: the list price of its answers, and what runs noted beside it.

    Raises:
        InputError: it holds answers of a model whose price is unknown.
    """
    journaled = _journaled_usd(journal, table)
    noted = _read_note(journal)
    return max(journaled, noted["at_most_usd"]) if "at_most_usd" in noted else journaled + noted["usd"]


def note_unjournaled(journal: JournalPlace, table: PriceTable, spent_usd: float) -> None:
    """Note what was or may have been spent on answers that never arrived."""
    _write_note(journal, {"usd": max(0.0, spent_usd - _journaled_usd(journal, table))})


def _read_note(journal: JournalPlace) -> dict[str, float]:
    if isinstance(journal, Folder):
        text = journal.read(UNJOURNALED)
    else:
        note = journal / UNJOURNALED
        text = note.read_text() if note.is_file() else None
    found: dict[str, float] = {"usd": 0.0} if text is None else json.loads(text)
    return found


def _write_note(journal: JournalPlace, note: dict[str, float]) -> None:
    if isinstance(journal, Folder):
        journal.write(UNJOURNALED, json.dumps(note))
    else:
        journal.mkdir(parents=True, exist_ok=True)
        durable.replace_json(journal / UNJOURNALED, note)


def _journaled_usd(journal: JournalPlace, table: PriceTable) -> float:
    spent, seen = 0.0, JournalIndex()  # 16 bytes an entry
    for segment in segments(sources(journal)):
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
                        f"journal={journal}: it holds answers of {model}, whose price is unknown, so what is left of "
                        "limits.budget_usd is unknown; give its prices in a file and set prices=FILE"
                    )
                spent += usd
    return spent


class DurableLedger(Ledger):
    """A ledger that writes what it grants of a budget beside the journal first, so a killed run is not forgotten.

    Args:
        limits, slots, spent_usd: of the `Ledger`.
        journal: where the journal is.
    """

    def __init__(self, limits: Limits, slots: int, spent_usd: float, journal: JournalPlace) -> None:
        super().__init__(limits, slots, spent_usd)
        self._budget_usd = limits.budget_usd
        self._journal = journal
        self._noted_usd = -1.0

    def exchange(self, report: LeaseReport) -> Grant:
        """See `Ledger.exchange`."""
        grant = super().exchange(report)
        if self._budget_usd is not None and self.committed_usd > self._noted_usd:
            noted = max(self.committed_usd, min(self._budget_usd, self.committed_usd + NOTED_AHEAD * self._budget_usd))
            began = self._clock()
            _write_note(self._journal, {"at_most_usd": noted})
            self._noted_usd = noted
            self.extend_leases(self._clock() - began)
        return grant

    def conclude(self) -> None:
        """Write what was really spent, once nothing is in flight."""
        if self._budget_usd is not None:
            _write_note(self._journal, {"at_most_usd": self.committed_usd})
            self._noted_usd = self.committed_usd
