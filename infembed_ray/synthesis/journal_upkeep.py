"""Looking after a journal's files: what is in them, whether they are sound, merging them, taking them elsewhere.

Everything here reads line by line and may run beside processes that append to the journal; in memory are the keys.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from infembed_ray.errors import InputError
from infembed_ray.progress import say
from infembed_ray.storage import local_path
from infembed_ray.synthesis.chat import Completion
from infembed_ray.synthesis.journal import decode, new_segment, segments, sync_directory

MERGED_AT_ONCE = 500
"""Segments that one compaction merges at most: it holds a file open for each. The next one merges the others."""

SHOWN = 20
"""Damaged lines that `infembed journal verify` names."""

_BEGINNING = b'{"key": "'


@dataclass
class Survey:
    """What is in a journal. Tokens and models are those of its entries, duplicates not counted again."""

    segments: int = 0
    size: int = 0
    """In bytes."""
    entries: int = 0
    duplicates: int = 0
    """Lines whose key stands in an earlier line, which is the one that counts."""
    torn: int = 0
    """Segments whose last line has no end: torn by a crash, or being written."""
    damaged: list[str] = field(default_factory=list)
    """`FILE:LINE` of every damaged line."""
    calls: Counter[str] = field(default_factory=Counter)
    """By the model as the endpoint names it; so are the tokens."""
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    completion_tokens: Counter[str] = field(default_factory=Counter)

    def lines(self, paths: Iterable[Path]) -> Iterator[bytes]:
        """The lines that count, each ending in a newline, while everything is being counted."""
        seen: set[bytes] = set()
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
                    elif bytes.fromhex(entry[0]) in seen:
                        self.duplicates += 1
                    else:
                        seen.add(bytes.fromhex(entry[0]))
                        self._count(entry[1])
                        yield line

    def _count(self, completion: Completion) -> None:
        self.entries += 1
        self.calls[completion.model] += 1
        self.prompt_tokens[completion.model] += completion.prompt_tokens
        self.completion_tokens[completion.model] += completion.completion_tokens


def survey(journal: Path) -> Survey:
    """Read all of a journal, a directory or a file."""
    found = Survey()
    for _ in found.lines(segments([journal])):
        pass
    return found


def compact(directory: Path) -> Survey:
    """Merge the segments of processes that have ended into one, without duplicates and damaged lines.

    The new segment is complete and on the disk before an old one is removed, so a crash at any moment leaves every
    entry in at least one. Segments of living processes are left alone.

    Returns:
        What the merged segments held. One segment that holds nothing but entries stays as it is.

    Raises:
        InputError: a file is no segment (then nothing is touched); or the file system has no locks, so that nobody can
            tell living segments from others.
    """
    for path in segments([directory]):
        if _foreign(path):
            raise InputError(
                f"DIR={directory}: {path.name} holds nothing of a journal; give a journal's directory, or move it away"
            )
    found = Survey()
    with contextlib.ExitStack() as locks:
        unlocked = (path for path in segments([directory]) if _lock(path, locks))
        finished = list(itertools.islice(unlocked, MERGED_AT_ONCE))
        merged, path = new_segment(directory)
        locks.callback(merged.close)
        merged.writelines(found.lines(finished))
        wasteful = found.duplicates or found.torn or found.damaged
        if found.entries and (wasteful or len(finished) > 1):
            _finish(merged, directory)
        else:
            path.unlink()
            finished = [] if found.entries else finished
        for old in finished:
            old.unlink()
        sync_directory(directory)
    return found


def export(journal: Path, file: Path) -> Survey:
    """Write a journal's entries to one new file, which `replay` and `bring_in` take."""
    found = Survey()
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as stream:
        stream.writelines(found.lines(segments([journal])))
        _finish(stream, partial.parent)
    partial.rename(file)
    sync_directory(file.parent)
    return found


def bring_in(directory: Path, exported: Path) -> tuple[Survey, int]:
    """Append the entries of an exported file, or of another journal, that a journal lacks.

    Returns:
        What the other held; how many entries were appended.
    """
    known: set[str] = set()
    for line in Survey().lines(segments([directory])):
        known.add(_key(line))
    found = Survey()
    new = 0
    segment, path = new_segment(directory)
    with segment:
        for line in found.lines(segments([exported])):
            if _key(line) not in known:
                segment.write(line)
                new += 1
        _finish(segment, directory)
    if not new:
        path.unlink()
    return found, new


def _key(line: bytes) -> str:
    key: str = json.loads(line)["key"]
    return key


def _finish(stream: BinaryIO, directory: Path) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    sync_directory(directory)


def _foreign(path: Path) -> bool:
    """Whether a file neither begins like an entry nor has one further on."""
    try:
        with path.open("rb") as stream:
            begins = stream.read(len(_BEGINNING))
            if _BEGINNING.startswith(begins):
                return False
            stream.seek(0)
            return not any(decode(line) for line in stream)
    except FileNotFoundError:  # just merged by another compaction
        return False


def _lock(path: Path, locks: contextlib.ExitStack) -> bool:
    """Whether this process now holds the lock of a segment, which then has no living writer and still exists."""
    try:
        stream = locks.enter_context(path.open("r+b"))
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        raise InputError(
            f"journal={path.parent}: its file system has no locks ({error.strerror}), which tell the segments of living "
            "processes from others; copy the journal to one that has them when no run uses it"
        ) from error
    return os.fstat(stream.fileno()).st_nlink > 0


# ----------------------------------------------------------------------------------------------- `infembed journal`


def _report(found: Survey) -> None:
    say(f"{found.entries} entries, {found.size} bytes in {found.segments} segments")
    for model, calls in found.calls.most_common():
        tokens = f"{found.prompt_tokens[model]} prompt + {found.completion_tokens[model]} completion tokens"
        say(f"  {model}: {calls} completions, {tokens}")
    say(f"{found.duplicates} duplicates, {found.torn} torn tails, {len(found.damaged)} damaged lines")


def _stats(journal: Path) -> int:
    _report(survey(journal))
    return 0


def _verify(journal: Path) -> int:
    found = survey(journal)
    _report(found)
    for place in found.damaged[:SHOWN]:
        say(f"{place}: damaged; its request would be asked again")
    if len(found.damaged) > SHOWN:
        say(f"and {len(found.damaged) - SHOWN} more")
    return 1 if found.damaged or found.torn else 0


def _compact(directory: Path) -> int:
    found = compact(directory)
    say(f"merged {found.segments} segments: {found.entries} entries stay, {found.size} bytes before")
    say(f"left out {found.duplicates} duplicates, {found.torn} torn tails, {len(found.damaged)} damaged lines")
    return 0


def _export(journal: Path, file: Path) -> int:
    if file.exists():
        raise InputError(f"FILE={file}: exists; name a new one, or remove it first")
    if file.suffix != ".jsonl":
        raise InputError(f"FILE={file}: replay takes .jsonl files; name it {file.with_suffix('.jsonl').name}")
    found = export(journal, file)
    say(f"{file}: {found.entries} entries; use it as replay=[{file}]")
    return 0


def _import(directory: Path, file: Path) -> int:
    found, new = bring_in(directory, file)
    damaged = len(found.damaged) + found.torn
    say(f"{directory}: {new} new of {found.entries} entries; {damaged} damaged lines left out")
    return 0


ACTIONS: dict[str, tuple[Callable[..., int], str]] = {
    "stats": (_stats, "entries, models, tokens, bytes"),
    "verify": (_verify, "check every line; exit status 1 if some are damaged"),
    "compact": (_compact, "merge finished segments; drop duplicates and damaged lines"),
    "export": (_export, "all entries as one .jsonl FILE, usable as replay"),
    "import": (_import, "take the entries of an exported FILE, or of another journal, that are missing here"),
}
"""What `infembed journal` can do. Those that end in FILE take one."""


def run(action: str, journal: str, file: str | None) -> int:
    """Do one of ACTIONS; returns the exit status.

    Raises:
        InputError: no such journal; a FILE is missing or superfluous.
    """
    paths = [local_path(journal, "DIR")]
    if not paths[0].is_dir() and not (action == "import" and not paths[0].exists()):
        raise InputError(f"DIR={journal}: no such directory; give a journal's")
    if action in ("export", "import"):
        if file is None:
            raise InputError(f"FILE is missing: write it as `infembed journal {action} DIR FILE`")
        paths.append(local_path(file, "FILE"))
        if action == "import" and not paths[1].exists():
            raise InputError(f"FILE={file}: no such file; give what `infembed journal export` wrote")
    elif file is not None:
        raise InputError(f"FILE={file}: `infembed journal {action}` takes none; leave it out")
    try:
        return ACTIONS[action][0](*paths)
    except FileNotFoundError as error:
        raise InputError(
            f"DIR={journal}: {error.filename} was merged into another segment meanwhile; run it again"
        ) from error
    except OSError as error:
        raise InputError(f"{error.filename or journal}: {error.strerror}; mend it and run it again") from error
