"""`infembed journal`: statistics and checks of a journal, and its budget.

Both read line by line; memory holds the keys. Statistics may run beside processes that append to the journal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from infembed_ray.errors import InputError
from infembed_ray.llm import budget
from infembed_ray.llm.journal import decode, has_writer, segments, short
from infembed_ray.llm.journal_store import COPIES, copy_objects, directory_of, upload_leftovers
from infembed_ray.progress import counted, say
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import open_place

SHOWN = 20
"""Most damaged lines that `infembed journal stats` names."""


@dataclass
class JournalStats:
    """Contents of a journal. Tokens and calls leave out duplicates."""

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
    calls: Counter[str] = field(default_factory=Counter)
    """By the model's name at the endpoint, as are the tokens."""
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    completion_tokens: Counter[str] = field(default_factory=Counter)


def scan(journal: Path) -> JournalStats:
    """Read all of a journal, a directory or a file."""
    stats, seen = JournalStats(), set[int]()
    for path in segments([journal]):
        stats.segments += 1
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                stats.size += len(line)
                entry = decode(line)
                if not line.endswith(b"\n"):
                    stats.torn += 1
                elif entry is None:
                    stats.damaged.append(f"{path}:{number}")
                elif short(entry[0]) in seen:
                    stats.duplicates += 1
                else:
                    seen.add(short(entry[0]))
                    stats.entries += 1
                    stats.calls[entry[1].model] += 1
                    stats.prompt_tokens[entry[1].model] += entry[1].prompt_tokens
                    stats.completion_tokens[entry[1].model] += entry[1].completion_tokens
    return stats


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
        return _stats(place) if action == "stats" else _reconcile(place)
    except OSError as error:
        raise InputError(f"{error.filename or journal}: {error.strerror}; correct that and run it again") from error


def _stats(journal: Place) -> int:
    """Show what a journal holds, except what is being written to one in an object store."""
    stats = scan(journal if isinstance(journal, Path) else copy_objects(journal) / COPIES)
    say(f"{counted(stats.entries, 'entry', 'entries')}, {stats.size} bytes in {counted(stats.segments, 'segment')}")
    for model, calls in stats.calls.most_common():
        tokens = f"{stats.prompt_tokens[model]} prompt + {stats.completion_tokens[model]} completion tokens"
        say(f"  {model}: {counted(calls, 'completion')}, {tokens}")
    torn, damaged = counted(stats.torn, "torn tail"), counted(len(stats.damaged), "damaged line")
    say(f"{counted(stats.duplicates, 'duplicate')}, {torn}, {damaged}")
    for place in stats.damaged[:SHOWN]:
        say(f"{place}: damaged; its request would be sent again")
    if len(stats.damaged) > SHOWN:
        say(f"and {len(stats.damaged) - SHOWN} more")
    return 1 if stats.damaged else 0


def _reconcile(journal: Place) -> int:
    directory = journal if isinstance(journal, Path) else directory_of(journal)
    if any(map(has_writer, segments([directory]))):
        raise InputError.of("DIR", journal, "a run writes to it", "wait until it has ended")
    say(f"{journal}: counted as spent until now: {budget.reconcile(journal)}; from now on only its answers")
    return 0
