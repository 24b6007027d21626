import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import pytest

from infembed_ray.llm import budget, journal_store
from infembed_ray.llm.journal import Journal, lock_ended, segments
from infembed_ray.llm.journal_store import (
    COPIES,
    StoredJournal,
    copy_objects,
    directory_of,
    open_journal,
    upload_leftovers,
)
from infembed_ray.llm.prices import PriceTable
from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.places import read_text
from tests.support import faulty_store
from tests.support.chat import completion, request
from tests.support.waiting import wait_until

NEVER = 3600.0
SOON = 0.01
numbers = itertools.count()


@pytest.fixture
def folder(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    move_to_node("first", tmp_path, monkeypatch)
    return Folder.open(f"{bucket}/journal-{next(numbers)}", "journal")


def move_to_node(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on with the scratch directory of another node."""
    monkeypatch.setenv(SCRATCH, str(tmp_path / name))


def append(journal: Journal, *texts: str) -> None:
    async def all_at_once() -> None:
        await asyncio.gather(*(journal.append(request(text), completion(f"answer to {text}")) for text in texts))

    asyncio.run(all_at_once())


def answered(journal: Journal, texts: Iterable[str]) -> str:
    """Return the texts whose answers are in the journal."""
    return "".join(text for text in texts if journal.get(request(text).key) is not None)


def uploaded(folder: Folder) -> bytes:
    return b"".join(
        (read_text(folder / name) or "").encode() for name in sorted(folder.entries()) if name.endswith(".jsonl")
    )


def test_another_node_reads_what_a_closed_journal_holds(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(folder, partition="1of2", upload_s=NEVER)
    append(journal, *"abc")
    [segment] = segments([directory_of(folder)])
    lines = segment.read_bytes()
    journal.close()
    assert uploaded(folder) == lines
    assert not list(segments([directory_of(folder)]))

    move_to_node("second", tmp_path, monkeypatch)
    assert answered(open_journal(folder), "abcd") == "abc"
    assert answered(open_journal(folder, partition="1of2"), "abcd") == "abc"
    assert answered(open_journal(folder, partition="2of2"), "abcd") == ""


def test_losing_a_node_loses_only_what_was_not_uploaded(folder: Folder) -> None:
    journal = open_journal(folder, upload_s=SOON)
    append(journal, *"abc")
    wait_until(lambda: uploaded(folder).count(b"\n") == 3)
    journal = open_journal(folder, upload_s=NEVER)
    append(journal, "d")
    assert answered(open_journal(folder), "abcd") == "abcd"
    shutil.rmtree(directory_of(folder))
    assert answered(open_journal(folder), "abcd") == "abc"


def test_a_full_object_is_uploaded_before_its_time(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_store, "UPLOAD_BYTES", 1 << 20)
    journal = open_journal(folder, upload_s=NEVER)

    async def write() -> None:
        await asyncio.gather(*(journal.append(request(str(n)), completion("x" * 600_000)) for n in range(3)))

    asyncio.run(write())
    wait_until(lambda: len(folder.entries()) >= 1)
    journal.close()
    sizes = [entry.size for entry in folder.entries().values()]
    assert sum(sizes) > 1_800_000
    assert len(open_journal(folder)) == 3


_WRITE_UNTIL_KILLED = """
import asyncio, sys
from infembed_ray.llm.journal_store import open_journal
from infembed_ray.storage.object_store import Folder
from tests.support.chat import completion, request

async def main():
    journal = open_journal(Folder(sys.argv[1]), upload_s=0.3)
    for number in range(10**6):
        await journal.append(request(str(number)), completion("x" * 200))
        print(number, flush=True)

asyncio.run(main())
"""


def test_a_killed_process_loses_nothing(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", _WRITE_UNTIL_KILLED, folder.uri]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as writer:
        assert writer.stdout is not None
        wait_until(lambda: len(folder.entries()) >= 2)
        assert list(segments([directory_of(folder)]))
        upload_leftovers(folder)  # the writer lives: nothing happens
        assert list(segments([directory_of(folder)]))
        writer.send_signal(signal.SIGKILL)
        confirmed = writer.stdout.read().split()
    assert len(confirmed) > 10
    upload_leftovers(folder)
    move_to_node("second", tmp_path, monkeypatch)
    journal = open_journal(folder)
    assert all(journal.get(request(number).key) for number in confirmed[:-1])
    keys = [json.loads(line)["key"] for line in uploaded(folder).splitlines()]
    assert len(keys) == len(set(keys))


def test_a_store_that_fails_for_a_while_stops_nothing_and_loses_nothing(
    folder: Folder, faulty: faulty_store.Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    journal = open_journal(folder, upload_s=SOON, warn=warnings.append)
    faulty.decide = faulty_store.writes_refused
    append(journal, *"ab")
    wait_until(lambda: len(warnings) == 1)
    append(journal, *"cd")
    faulty.decide = lambda request: faulty_store.FORWARD
    append(journal, *"ef")
    wait_until(lambda: uploaded(folder).count(b"\n") == 6)
    assert len(warnings) == 1
    assert warnings[0].startswith(f"journal={folder}: uploads fail and are repeated, the node keeps the answers: ")
    move_to_node("second", tmp_path, monkeypatch)
    assert answered(open_journal(folder), "abcdefg") == "abcdef"


def test_the_tools_work_on_a_journal_in_an_object_store(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for partition in ("1of2", "2of2"):
        journal = open_journal(folder, partition=partition, upload_s=NEVER)
        append(journal, f"a {partition}", f"b {partition}")
        journal.close()
    move_to_node("second", tmp_path, monkeypatch)
    assert budget.run("stats", folder.uri) == 0
    assert "4 entries" in capsys.readouterr().out
    assert budget.run("reconcile", folder.uri) == 0


def test_a_journal_in_an_object_store_can_be_replayed_by_its_uri(folder: Folder, tmp_path: Path) -> None:
    journal = open_journal(folder, upload_s=NEVER)
    append(journal, "a")
    journal.close()
    assert answered(open_journal(tmp_path / "own", [folder.uri]), "ab") == "a"


def test_the_budget_counts_answers_and_notes_in_an_object_store(folder: Folder) -> None:
    table = PriceTable("2026-01-01", {"small": (1.0, 1.0)})
    journal = open_journal(folder, upload_s=NEVER)
    append(journal, "a", "b")
    journal.close()
    answers = 2 * (7 + 3) * 1e-6
    assert budget.spent_usd(folder, table) == pytest.approx(answers)
    budget.note_unjournaled(folder, table, answers + 5.0)
    assert budget.spent_usd(folder, table) == pytest.approx(answers + 5.0)
    budget.note_at_most(folder, 6.0)
    assert budget.spent_usd(folder, table) == 6.0


def test_copies_of_deleted_objects_are_removed(folder: Folder) -> None:
    journal = open_journal(folder, upload_s=NEVER)
    append(journal, "a")
    journal.close()
    [name] = folder.entries()
    copies = copy_objects(folder) / COPIES
    assert [path.name for path in segments([copies])] == [name]
    folder.delete(name)
    copy_objects(folder)
    assert not list(segments([copies]))


def test_what_a_dying_writer_still_uploads_is_uploaded_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(folder, upload_s=SOON)
    assert isinstance(journal, StoredJournal)
    append(journal, "a")

    def lock_once_it_is_dead(path: Path, locks: contextlib.ExitStack) -> BinaryIO | None:
        for lines, text in enumerate("bc", start=2):
            append(journal, text)
            wait_until(lambda lines=lines: uploaded(folder).count(b"\n") == lines)
        assert journal._uploads is not None
        journal.stop_uploads()
        Journal.close(journal)
        return lock_ended(path, locks)

    monkeypatch.setattr(journal_store, "lock_ended", lock_once_it_is_dead)
    upload_leftovers(folder)
    assert not list(segments([directory_of(folder)]))
    assert uploaded(folder).count(b"\n") == 3


def test_a_copy_of_another_size_is_copied_again(folder: Folder) -> None:
    for text in "ab":
        journal = open_journal(folder, upload_s=NEVER)
        append(journal, text)
        journal.close()
    copies = copy_objects(folder) / COPIES
    next(segments([copies])).write_bytes(b"")
    assert answered(open_journal(folder), "ab") == "ab"
