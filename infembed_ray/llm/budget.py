"""The USD that a journal has cost, so that a budget holds over all runs on it, even killed ones.

`unjournaled.json` beside the segments holds what the answers do not show. `usd`: spent on answers that never arrived. While
a run is active, and after a kill, instead `at_most_usd`: the most that may have been spent in all, grants included.
"""

from __future__ import annotations

import json
from typing import Any

from infembed_ray.config.llm import Limits
from infembed_ray.errors import InputError
from infembed_ray.llm.journal import decode, segments, short
from infembed_ray.llm.journal_store import sources
from infembed_ray.llm.ledger import Ledger
from infembed_ray.llm.prices import PriceTable
from infembed_ray.progress import say
from infembed_ray.storage.places import Place, read_json, write_json

UNJOURNALED = "unjournaled.json"


def ledger(limits: Limits, spent_usd: float, journal: Place) -> Ledger:
    """Return a ledger that writes what it grants of a budget beside the journal first."""
    return Ledger(limits, spent_usd, note=lambda usd: note_at_most(journal, usd))


def note_at_most(journal: Place, usd: float) -> None:
    """Note durably the most that a journal may have cost, its answers included."""
    _write_note(journal, {"at_most_usd": usd})


def spent_usd(journal: Place, table: PriceTable) -> float:
    """Return what a journal has cost: the list price of its answers, and what may have been spent besides.

    Raises:
        InputError: it holds answers of a model whose price is unknown.
    """
    note, journaled_usd = _read_note(journal), _journaled_usd(journal, table)
    return max(journaled_usd, note["at_most_usd"]) if "at_most_usd" in note else journaled_usd + float(note["usd"])


def resume(journal: Place, table: PriceTable) -> float:
    """Return what a journal has cost; say so if the last run was killed, since all that it was granted counts as spent.

    Raises:
        InputError: the journal holds answers of a model whose price is unknown.
    """
    usd = spent_usd(journal, table)
    if "at_most_usd" in _read_note(journal):
        unanswered_usd = usd - _journaled_usd(journal, table)
        say(
            f"the last run on this journal was killed: {unanswered_usd:.4f} USD that it may have spent without an answer "
            f"count as spent; `infembed journal reconcile {journal}` writes them off"
        )
        _write_note(journal, {"usd": unanswered_usd})
    return usd


def reconcile(journal: Place) -> str:
    """Count only the journal's answers as spent from now on; return what the note said until then."""
    note = _read_note(journal)
    _write_note(journal, {"usd": 0.0})
    if "at_most_usd" in note:
        return f"at most {note['at_most_usd']:.4f} USD, answers included"
    return f"{note['usd']:.4f} USD besides the answers"


def note_unjournaled(journal: Place, table: PriceTable, committed_usd: float) -> None:
    """Note what was or may have been spent on answers that never arrived, once a run with a budget has ended.

    Args:
        committed_usd: of the ledger; a process that was killed counts all that it was granted.
    """
    _write_note(journal, {"usd": max(0.0, committed_usd - _journaled_usd(journal, table))})


def _read_note(journal: Place) -> dict[str, Any]:
    return read_json(journal / UNJOURNALED) or {"usd": 0.0}


def _write_note(journal: Place, note: dict[str, Any]) -> None:
    write_json(journal / UNJOURNALED, note)


def _journaled_usd(journal: Place, table: PriceTable) -> float:
    spent, seen = 0.0, set[int]()
    for segment in segments(sources(journal)):
        with segment.open("rb") as lines:
            for line in lines:
                entry = decode(line)
                if entry is None or short(entry[0]) in seen:
                    continue
                seen.add(short(entry[0]))
                model = json.loads(line)["model"]
                usd = table.usd(model, entry[1])
                if usd is None:
                    raise InputError(
                        f"journal={journal}: it holds answers of {model}, whose price is unknown, so what is left of "
                        "limits.budget_usd is unknown; give its prices in a file and set prices=FILE"
                    )
                spent += usd
    return spent
