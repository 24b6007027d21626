"""The USD that a journal has cost, so that a budget holds over all runs on it, even killed ones.

`unjournaled.json` beside the segments holds what the answers do not show. `usd`: spent on answers that never arrived. While
a run is active, and after a kill, instead `at_most_usd`: the most that may have been spent in all, grants included.

`infembed journal` reads line by line, also beside processes that append; memory holds the keys.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infembed_ray.config.llm import Limits
from infembed_ray.errors import InputError
from infembed_ray.llm.chat import Completion
from infembed_ray.llm.journal import decode, has_writer, segments, short
from infembed_ray.llm.journal_store import COPIES, copy_objects, directory_of, sources, upload_leftovers
from infembed_ray.llm.prices import PriceTable
from infembed_ray.progress import counted, say
from infembed_ray.storage.leases import lease
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import Place, read_json, write_json
from infembed_ray.storage.steps import open_place

UNJOURNALED = "unjournaled.json"
SHOWN = 20
"""Most damaged lines that `infembed journal stats` names."""


def held(limits: Limits, journal: Place) -> AbstractContextManager[object]:
    """Hold the lease on a journal's budget, if there is one: two runs on one journal would each spend all of it.

    Raises:
        InputError: another run spends it.
    """
    return nullcontext() if limits.budget_usd is None else lease(journal, "budget", "journal", journal)


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
    for leftover in journal.glob(f"{UNJOURNALED}.*.partial") if isinstance(journal, Path) else ():
        leftover.unlink(missing_ok=True)  # of a killed run; the lease admits one run at a time
    usd = spent_usd(journal, table)
    if "at_most_usd" in _read_note(journal):
        unanswered_usd = usd - _journaled_usd(journal, table)
        lost = f"{unanswered_usd:.4f} USD that it may have spent without an answer count as spent"
        remedy = f"`infembed journal reconcile {journal}` writes them off"
        say(f"the last run on this journal was killed: {lost}; {remedy}")
        _write_note(journal, {"usd": unanswered_usd})
    return usd


def note_unjournaled(journal: Place, table: PriceTable, committed_usd: float) -> None:
    """Note what was or may have been spent on answers that never arrived, once a run that committed this much has ended."""
    _write_note(journal, {"usd": max(0.0, committed_usd - _journaled_usd(journal, table))})


def _read_note(journal: Place) -> dict[str, Any]:
    return read_json(journal / UNJOURNALED) or {"usd": 0.0}


def _write_note(journal: Place, note: dict[str, Any]) -> None:
    write_json(journal / UNJOURNALED, note, shared=True)


def _journaled_usd(journal: Place, table: PriceTable) -> float:
    spent = 0.0
    for model, completion in JournalStats().read(sources(journal)):
        usd = table.usd(model, completion)
        if usd is None and table.price(model) is None:
            held = f"it holds answers of {model}, whose price is unknown"
            fault = f"{held}, so what is left of limits.budget_usd is unknown"
            raise InputError.of("journal", journal, fault, "give its prices in a file and set prices=FILE")
        spent += usd or 0.0  # tokens that were not counted are in the note, at their worst case
    return spent


@dataclass
class JournalStats:
    """What a journal holds besides its entries, as far as it was read."""

    segments: int = 0
    size: int = 0
    """In bytes."""
    entries: int = 0
    duplicates: int = 0
    """Lines whose key occurs in an earlier line, which counts instead."""
    torn: int = 0
    """Segments whose last line has no end: cut short by a crash, or being written."""
    damaged: list[str] = field(default_factory=list)
    """`FILE:LINE` of every damaged line."""

    def read(self, journals: Sequence[Path]) -> Iterator[tuple[str, Completion]]:
        """Yield the requested model and the completion of every entry of journals, directories or files."""
        seen = set[int]()
        for path in segments(journals):
            self.segments += 1
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    self.size += len(line)
                    entry = decode(line)
                    if not line.endswith(b"\n"):
                        self.torn += 1
                    elif entry is None:
                        self.damaged.append(f"{path}:{number}")
                    elif short(entry[0]) in seen:
                        self.duplicates += 1
                    else:
                        seen.add(short(entry[0]))
                        self.entries += 1
                        yield json.loads(line)["model"], entry[1]


def run(action: str, journal: str) -> int:
    """Run `infembed journal ACTION DIR`; return the exit status.

    Raises:
        InputError: there is no such journal, or it cannot be read or written.
    """
    try:
        place = open_place(journal, "DIR")
        if isinstance(place, Path) and not place.is_dir():
            raise InputError.of("DIR", journal, "no such directory", "give a journal's")
        if isinstance(place, Folder):
            upload_leftovers(place)
        return _stats(place) if action == "stats" else reconcile(place)
    except OSError as error:
        raise InputError(f"{error.filename or journal}: {error.strerror}; correct that and run it again") from error


def _stats(journal: Place) -> int:
    """Show what a journal holds, except what is being written to one in an object store."""
    stats, calls, tokens = JournalStats(), Counter[str](), Counter[tuple[str, str]]()
    for _, completion in stats.read([journal if isinstance(journal, Path) else copy_objects(journal) / COPIES]):
        calls[completion.model] += 1  # by the model's name at the endpoint
        tokens[completion.model, "prompt"] += completion.prompt_tokens
        tokens[completion.model, "completion"] += completion.completion_tokens
    say(f"{counted(stats.entries, 'entry', 'entries')}, {stats.size} bytes in {counted(stats.segments, 'segment')}")
    for model, number in calls.most_common():
        used = f"{tokens[model, 'prompt']} prompt + {tokens[model, 'completion']} completion tokens"
        say(f"  {model}: {counted(number, 'completion')}, {used}")
    torn, damaged = counted(stats.torn, "torn tail"), counted(len(stats.damaged), "damaged line")
    say(f"{counted(stats.duplicates, 'duplicate')}, {torn}, {damaged}")
    for place in stats.damaged[:SHOWN]:
        say(f"{place}: damaged; its request would be sent again")
    if len(stats.damaged) > SHOWN:
        say(f"and {len(stats.damaged) - SHOWN} more")
    return 1 if stats.damaged else 0


def reconcile(journal: Place) -> int:
    """Count only the journal's answers as spent from now on, and show what the note said; InputError while a run writes to it."""
    directory = journal if isinstance(journal, Path) else directory_of(journal)
    if any(map(has_writer, segments([directory]))):
        raise InputError.of("DIR", journal, "a run writes to it", "wait until it has ended")
    note = _read_note(journal)
    _write_note(journal, {"usd": 0.0})
    before = f"at most {note['at_most_usd']:.4f} USD, answers included" if "at_most_usd" in note else ""
    before = before or f"{note['usd']:.4f} USD besides the answers"
    say(f"{journal}: counted as spent until now: {before}; from now on only its answers")
    return 0
