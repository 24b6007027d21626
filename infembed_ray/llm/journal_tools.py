"""Maintenance of a journal (`infembed journal`): statistics and checks, compaction and its budget.

All tools read line by line; memory holds the keys. Statistics may run beside processes that append to the journal.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from infembed_ray.errors import InputError
from infembed_ray.llm import budget
from infembed_ray.llm.journal import decode, has_writer, new_segment, partition_in, segments, short
from infembed_ray.llm.journal_store import COPIES, JournalPlace, copy_objects, directory_of, locked, upload_leftovers
from infembed_ray.progress import counted, say
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder, convert_errors, is_uri
from infembed_ray.storage.steps import local_path

SHOWN = 20
"""Most damaged lines that `infembed journal stats` names."""

_BEGINNING = b'{"key": "'


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

    def __add__(self, other: JournalStats) -> JournalStats:
        return JournalStats(
            *(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def lines(self, paths: Iterable[Path]) -> Iterator[bytes]:
        """Yield the line of every entry, without duplicates, and count everything."""
        seen = set[int]()
        for path in paths:
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
                        completion = entry[1]
                        self.entries += 1
                        self.calls[completion.model] += 1
                        self.prompt_tokens[completion.model] += completion.prompt_tokens
                        self.completion_tokens[completion.model] += completion.completion_tokens
                        yield line


def scan(journal: Path) -> JournalStats:
    """Read all of a journal, a directory or a file."""
    stats = JournalStats()
    for _ in stats.lines(segments([journal])):
        pass
    return stats


def compact(directory: Path, folder: Folder | None = None) -> JournalStats:
    """Merge the segments of a journal into one for each partition, without duplicates and damaged lines.

    The new segment is complete and on disk before an old one is removed, so a crash at any moment leaves every entry in at
    least one of them.

    Args:
        folder: in an object store, whose objects are copied to the directory; it is changed alike.

    Returns:
        What the merged segments held. A single segment without duplicates and damage stays as it is.

    Raises:
        InputError: a file is no segment, or a process writes to one; then nothing changes.
    """
    busy = InputError(f"DIR={directory}: another compaction is at work; wait until it has ended")
    with durable.exclusive_lock(directory / ".compaction.lock", busy=busy):
        groups: defaultdict[str | None, list[Path]] = defaultdict(list)
        for path in segments([directory]):
            with path.open("rb") as stream:
                if not _BEGINNING.startswith(stream.read(len(_BEGINNING))):
                    raise InputError(
                        f"DIR={directory}: {path.name} is no segment; give a journal's directory, or move it away"
                    )
            groups[partition_in(path.name)].append(path)
        _require_ended(directory)
        merged = [_merge(directory, folder, partition, paths) for partition, paths in groups.items()]
    return sum(merged, JournalStats())


def _require_ended(directory: Path) -> None:
    if any(map(has_writer, segments([directory]))):
        raise InputError(f"DIR={directory}: a run writes to it; wait until it has ended")


def _merge(directory: Path, folder: Folder | None, partition: str | None, paths: list[Path]) -> JournalStats:
    stats = JournalStats()
    segment, merged = new_segment(directory, partition)
    with segment:
        segment.writelines(stats.lines(paths))
        if stats.entries and len(paths) == 1 and not (stats.duplicates or stats.torn or stats.damaged):
            merged.unlink()
            return stats
        durable.sync(segment)
    durable.sync_directory(directory)
    if folder is not None:
        folder.upload(merged, merged.name)
    for old in paths if stats.entries else [*paths, merged]:
        old.unlink()
        if folder is not None:
            with contextlib.suppress(FileNotFoundError):
                folder.delete(old.name)
    durable.sync_directory(directory)
    return stats


def compact_objects(folder: Folder) -> JournalStats:
    """Merge the objects of a journal in an object store as `compact` merges segments.

    The lock keeps `copy_objects` of other processes of this node from removing the merged file before it is uploaded.

    Raises:
        InputError: a process of this node writes to the journal, or the object store failed. Every entry is still in at least
            one object.
    """
    _require_ended(directory_of(folder))
    copies = copy_objects(folder) / COPIES
    with convert_errors(str(folder), "DIR"), locked(copies):
        return compact(copies, folder)


# ----------------------------------------------------------------------------------------------- `infembed journal`


def run(action: str, journal: str) -> int:
    """Run `infembed journal ACTION DIR`; return the exit status.

    Raises:
        InputError: there is no such journal, or it cannot be read or written.
    """
    try:
        place: JournalPlace = Folder.open(journal, "DIR") if is_uri(journal) else local_path(journal, "DIR")
        if isinstance(place, Path) and not place.is_dir():
            raise InputError(f"DIR={journal}: no such directory; give a journal's")
        if isinstance(place, Folder):
            upload_leftovers(place)
        return _ACTIONS[action](place)
    except OSError as error:
        raise InputError(f"{error.filename or journal}: {error.strerror}; correct that and run it again") from error


def _stats(journal: JournalPlace) -> int:
    """Show what a journal holds, except what is being written to one in an object store."""
    stats = scan(journal if isinstance(journal, Path) else copy_objects(journal) / COPIES)
    say(f"{counted(stats.entries, 'entry', 'entries')}, {stats.size} bytes in {counted(stats.segments, 'segment')}")
    for model, calls in stats.calls.most_common():
        tokens = f"{stats.prompt_tokens[model]} prompt + {stats.completion_tokens[model]} completion tokens"
        say(f"  {model}: {counted(calls, 'completion')}, {tokens}")
    say(_faults(stats))
    for place in stats.damaged[:SHOWN]:
        say(f"{place}: damaged; its request would be sent again")
    if len(stats.damaged) > SHOWN:
        say(f"and {len(stats.damaged) - SHOWN} more")
    return 1 if stats.damaged else 0


def _compact(journal: JournalPlace) -> int:
    merged = compact(journal) if isinstance(journal, Path) else compact_objects(journal)
    left = counted(merged.entries, "entry", "entries")
    say(f"merged {counted(merged.segments, 'segment')}: {left} left, {merged.size} bytes before")
    say(f"left out {_faults(merged)}")
    return 0


def _reconcile(journal: JournalPlace) -> int:
    _require_ended(journal if isinstance(journal, Path) else directory_of(journal))
    say(f"{journal}: counted as spent until now: {budget.reconcile(journal)}; from now on only its answers")
    return 0


_ACTIONS: dict[str, Callable[[JournalPlace], int]] = {
    "stats": _stats,
    "compact": _compact,
    "reconcile": _reconcile,
}


def _faults(stats: JournalStats) -> str:
    damaged = counted(len(stats.damaged), "damaged line")
    return f"{counted(stats.duplicates, 'duplicate')}, {counted(stats.torn, 'torn tail')}, {damaged}"
