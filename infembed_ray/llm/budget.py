"""The USD that a journal has cost, so that a budget holds over all runs on it, even killed ones."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infembed_ray.config.llm import Limits
from infembed_ray.errors import InputError
from infembed_ray.llm.journal import decode, segments
from infembed_ray.llm.journal_index import JournalIndex
from infembed_ray.llm.journal_store import JournalPlace, sources
from infembed_ray.llm.lease import RateLimiter
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.rate_limits import USD, Amounts, Exchange, Grant, LeaseReport, Ledger
from infembed_ray.progress import say
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import read_json, write_json

UNJOURNALED = "unjournaled.json"
"""File beside the journal's segments. `usd`: what was spent on answers that are not in the journal. During a run and after a
kill instead `at_most_usd`: the most that may have been spent in all, if all was sent that was granted; `began_usd`: what was
spent when the run began; `holders`: processes that were granted a part of the budget (see `spend_record`)."""
NOTED_AHEAD = 0.01
"""Share of the budget that is noted as spent ahead of time, since each note waits for the disk."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RECORD = struct.Struct("dd")


def spent_usd(journal: JournalPlace, table: PriceTable) -> float:
    """Return what a journal has cost: the list price of its answers, and what runs noted beside it.

    Raises:
        InputError: it holds answers of a model whose price is unknown.
    """
    return _spent_usd(journal, _journaled_usd(journal, table), _read_note(journal))


def _spent_usd(journal: JournalPlace, journaled_usd: float, note: dict[str, Any]) -> float:
    if "at_most_usd" not in note:
        return journaled_usd + float(note["usd"])
    return max(journaled_usd, min(note["at_most_usd"], _recorded_usd(journal, note)))


def resume(journal: JournalPlace, table: PriceTable) -> float:
    """Return what a journal has cost, and settle what a killed run left, which must have ended.

    Granted but never sent requests of the killed run are written off; those in flight count at their worst case.

    Raises:
        InputError: the journal holds answers of a model whose price is unknown.
    """
    journaled_usd, note = _journaled_usd(journal, table), _read_note(journal)
    usd = _spent_usd(journal, journaled_usd, note)
    if "at_most_usd" in note:
        say(
            f"the last run on this journal was killed: {note['at_most_usd'] - usd:.4f} USD of its budget were "
            f"certainly not spent; {usd - journaled_usd:.4f} USD without an answer in the journal count as spent (`infembed "
            f"journal reconcile {journal}` writes them off)"
        )
        _write_note(journal, {"usd": usd - journaled_usd})
    _remove_records(journal)
    return usd


def reconcile(journal: JournalPlace) -> str:
    """Count only the journal's answers as spent from now on; return what the note said until then."""
    note = _read_note(journal)
    _write_note(journal, {"usd": 0.0})
    _remove_records(journal)
    return (
        f"at most {note['at_most_usd']:.4f} USD, answers included"
        if "at_most_usd" in note
        else f"{note['usd']:.4f} USD besides the answers"
    )


def rate_limiter(limits: Limits, slots: int, exchange: Exchange, journal: JournalPlace) -> RateLimiter:
    """Return the rate limiter of a process; with a budget, it keeps a record of what it spends beside the journal."""
    limiter = RateLimiter(limits, slots, exchange)
    if limits.budget_usd is not None:
        limiter.record = spend_record(journal, limiter.holder)
    return limiter


def spend_record(journal: JournalPlace, holder: str) -> memoryview[float] | None:
    """Create the record of what a process has spent, and of the worst case of what it has in flight: two USD numbers.

    The record is a mapped file, so a change costs no system call and survives the process, but not the machine.

    Returns:
        None if the journal is in an object store or the machine cannot keep such a record; then a killed run counts
        everything that was granted.
    """
    if isinstance(journal, Folder):
        return None
    try:
        journal.mkdir(parents=True, exist_ok=True)
        path = _record(journal, holder)
        path.write_bytes(bytes(_RECORD.size) + _BOOT_ID.read_bytes())
        with path.open("r+b") as stream:
            return memoryview(mmap.mmap(stream.fileno(), _RECORD.size)).cast("d")
    except OSError:
        return None


def _recorded_usd(journal: JournalPlace, note: dict[str, Any]) -> float:
    """Return what a killed run had spent or in flight, by the records of its processes; infinity if one is missing."""
    usd = note.get("began_usd", math.inf)
    try:
        for holder in note.get("holders", ()):
            if isinstance(journal, Folder):
                return math.inf
            record = _record(journal, holder).read_bytes()
            if record[_RECORD.size :] != _BOOT_ID.read_bytes():  # another machine's, or from before a crash of this one
                return math.inf
            usd += sum(_RECORD.unpack_from(record))
    except (OSError, struct.error):
        return math.inf
    return float(usd)


def _record(journal: Path, holder: str) -> Path:
    return journal / f"{holder}.spend"


def _remove_records(journal: JournalPlace) -> None:
    if isinstance(journal, Path):
        for record in journal.glob("*.spend"):
            with contextlib.suppress(OSError):
                record.unlink()


def note_unjournaled(journal: JournalPlace, table: PriceTable, spent_usd: float) -> None:
    """Note what was or may have been spent on answers that never arrived, once a run with a budget has ended.

    Args:
        spent_usd: the ledger's upper bound, in which a process that was killed counts all that it was granted.
    """
    spent_usd = min(spent_usd, _recorded_usd(journal, _read_note(journal)))
    _write_note(journal, {"usd": max(0.0, spent_usd - _journaled_usd(journal, table))})
    _remove_records(journal)


def _read_note(journal: JournalPlace) -> dict[str, Any]:
    return read_json(journal / UNJOURNALED) or {"usd": 0.0}


def _write_note(journal: JournalPlace, note: dict[str, Any]) -> None:
    write_json(journal / UNJOURNALED, note)


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
    """A ledger that writes what it grants of a budget beside the journal first, so a killed run is not forgotten."""

    def __init__(self, limits: Limits, spent_usd: float, journal: JournalPlace) -> None:
        super().__init__(limits, spent_usd)
        self._budget_usd = limits.budget_usd
        self._journal = journal
        self._noted_usd = -1.0
        self._began_usd = spent_usd
        self._noted: list[str] = []  # holders

    def exchange(self, report: LeaseReport) -> Grant:
        grant = super().exchange(report)
        if self._budget_usd is None:
            return grant
        holders = self._noted
        if report.holder in self._holders and report.holder not in holders:
            holders = [*holders, report.holder]
        if self.committed_usd > self._noted_usd or holders is not self._noted:
            noted = max(self.committed_usd, min(self._budget_usd, self.committed_usd + NOTED_AHEAD * self._budget_usd))
            began = self._clock()
            _write_note(self._journal, {"at_most_usd": noted, "began_usd": self._began_usd, "holders": holders})
            self._noted_usd, self._noted = noted, holders
            self.extend_leases(self._clock() - began)
        return grant

    def charge(self, used: Amounts, report: Sequence[str]) -> None:
        """Count what the ledger's own process used, and show its report to the user."""
        self._use({name: amount for name, amount in used.items() if name in self._used}, self._clock())
        self._began_usd += used[USD]
        self._noted_usd = -1.0  # the next exchange notes it
        self._warnings |= dict.fromkeys(report)

    def conclude(self) -> None:
        """Write what was really spent, once nothing is in flight."""
        if self._budget_usd is not None:
            _write_note(self._journal, {"at_most_usd": self.committed_usd})
            self._noted_usd = self.committed_usd
