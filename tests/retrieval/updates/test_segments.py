"""Segments in directories and object stores: writers at the same time, killed writers, and faults."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from obstore.exceptions import GenericError

from infembed_ray.retrieval.updates.write_ahead_log import ChangeLog, Delete, LogFault, Put
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder
from tests.retrieval.updates.test_write_ahead_log import VECTORS, ids_of, log_in, put


def test_an_unwritable_directory_is_reported_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogFault, match=r"changes=.*cannot be read \(Not a directory\); give a directory"):
        log_in(tmp_path / "file" / "changes").append([put("a")])
    if os.geteuid() != 0:  # root can write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(LogFault, match=r"cannot be written \(Permission denied\)"):
            log_in(tmp_path / "closed").append([put("a")])


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_in(tmp_path)
    log.append([put("a")])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LogFault, match=r"cannot be written \(No space left on device\)"):
            log.append([put("b")])
    assert os.listdir(tmp_path) == [f"{1:012d}.arrow"]
    assert log.append([put("c")]) == 2


def test_a_repeated_nfs_link_is_recognised_as_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def repeated(source: Path, target: Path) -> None:  # as NFS does it
        link(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", repeated)
    log = log_in(tmp_path)
    assert [log.append([put("a")]), log.append([put("b")]), log.last()] == [1, 2, 2]


def _write(directory: Path, writer: int, count: int) -> None:
    log = log_in(directory)
    for i in range(count):
        log.append([put(f"{writer}-{i}"), Delete(f"{writer}-{i - 1}")])


@pytest.mark.integration
def test_many_writers_lose_nothing_and_agree_on_one_order(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("forkserver")
    writers = [spawn.Process(target=_write, args=(tmp_path, writer, 12)) for writer in range(3)]
    for process in writers:
        process.start()
    live = log_in(tmp_path)
    seen: list[tuple[int, list[str]]] = []
    stop = threading.Event()

    def follow() -> None:
        while not stop.is_set() or live.has(len(seen) + 1):
            seen.extend((sequence, table.column("id").to_pylist()) for sequence, table in live.read(len(seen)))
            time.sleep(0.002)

    reader = threading.Thread(target=follow)
    reader.start()
    for process in writers:
        process.join()
        assert process.exitcode == 0
    stop.set()
    reader.join()
    assert [sequence for sequence, _ in seen] == list(range(1, 37))
    assert seen == [(s, t.column("id").to_pylist()) for s, t in log_in(tmp_path).read(0)]
    for writer in range(3):  # each writer's own order is kept
        assert [ids[0] for _, ids in seen if ids[0].startswith(f"{writer}-")] == [f"{writer}-{i}" for i in range(12)]
    assert sorted(os.listdir(tmp_path)) == [f"{s:012d}.arrow" for s in range(1, 37)]


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from infembed_ray.retrieval.updates.write_ahead_log import ChangeLog, Put

def die(*paths):
    os.kill(os.getpid(), signal.SIGKILL)

log = ChangeLog(Path(sys.argv[1]), {}, 4)
log.append([Put("kept", "text", np.ones(4))])
print("kept", flush=True)
setattr(os, sys.argv[2], die)
log.append([Put("lost", "text", np.ones(4))])
"""


@pytest.mark.integration
@pytest.mark.parametrize("moment", ["fsync", "link"])
def test_a_writer_killed_before_the_link_leaves_no_visible_segment(tmp_path: Path, moment: str) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], capture_output=True, text=True)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "kept\n")
    log = ChangeLog(tmp_path, {}, 4)
    assert ids_of(log) == ["kept"]
    assert log.append([Put("next", "text", VECTORS[0])]) == 2
    log.check(0)


def test_the_first_append_of_each_writer_syncs_all_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync_directory", synced.append)
    directory = tmp_path / "changes" / "lineage"
    for _ in range(2):  # the second may append before the first has synced
        log_in(directory).append([put("a")])
        assert set(synced) == {tmp_path, tmp_path / "changes", directory}
        synced.clear()


def test_an_append_that_fails_after_the_link_says_that_it_may_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_in(tmp_path)
    log.append([put("a")])

    def fails(directory: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable, "sync_directory", fails)
    with pytest.raises(LogFault, match="make the change again: it may or may not be kept"):
        log.append([put("b")])
    assert ids_of(log) == list("ab")


def test_a_log_in_an_object_store_is_the_same_log(tmp_path: Path, bucket: str) -> None:
    folder = Folder.open(f"{bucket}/changes/lineage", "changes")
    stored = ChangeLog(folder, log_in(tmp_path).metadata, 4)
    assert (stored.last(), stored.has(1), ids_of(stored)) == (0, False, [])
    for log in (log_in(tmp_path), stored):
        assert [log.append([put(id)]) for id in "ab"] == [1, 2]
        assert log.append([Delete("a")]) == 3
        log.check(0)
    other = ChangeLog(folder, stored.metadata, 4)
    assert other.last() == 3
    assert [table for _, table in other.read(0)] == [table for _, table in log_in(tmp_path).read(0)]
    assert other.digest(0, 3) == log_in(tmp_path).digest(0, 3)
    assert set(folder.entries()) == {f"{sequence:012d}.arrow" for sequence in (1, 2, 3)}
    folder.delete(f"{2:012d}.arrow")
    with pytest.raises(LogFault, match=rf"changes={folder}: 000000000002\.arrow is missing; restore it"):
        other.check(0)
    folder.write(f"{2:012d}.arrow", "damaged")
    with pytest.raises(LogFault, match=r"000000000002\.arrow is corrupted"):
        list(other.read(0))
    assert other.append([put("c")]) == 4
    assert other.prune(3) == 2
    assert set(folder.entries()) == {f"{sequence:012d}.arrow" for sequence in (3, 4)}


def test_two_writers_of_a_log_in_an_object_store_take_different_numbers(bucket: str) -> None:
    folder = Folder.open(f"{bucket}/changes/writers", "changes")
    slow, quick = ChangeLog(folder, {}, 4), ChangeLog(folder, {}, 4)
    last = slow.last

    def overtaken() -> int:
        found = last()
        quick.append([put("quick")])
        return found

    slow.last = overtaken  # type: ignore[method-assign]
    assert slow.append([put("slow")]) == 2
    assert ids_of(quick) == ["quick", "slow"]


def test_a_store_that_does_not_answer_is_a_fault_of_the_log(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ChangeLog(Folder.open(f"{bucket}/changes/broken", "changes"), {}, 4)

    def fails(*_: object) -> None:
        raise GenericError("connection refused")

    monkeypatch.setattr(Folder, "create", fails)
    with pytest.raises(LogFault, match=r"cannot be written \(connection refused\).*make the change again"):
        log.append([put("a")])
    monkeypatch.setattr(Folder, "read_range", fails)
    with pytest.raises(LogFault, match=r"000000000001\.arrow cannot be read \(connection refused\)"):
        list(log.read(0))
