import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from obstore.exceptions import GenericError

from infembed_ray.config.retrieval import FieldType
from infembed_ray.retrieval.shards import shard_of
from infembed_ray.retrieval.updates import write_ahead_log
from infembed_ray.retrieval.updates.write_ahead_log import (
    OP,
    VECTOR,
    Change,
    ChangeError,
    ChangeLog,
    Delete,
    LogFault,
    Put,
)
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder
from tests.retrieval.vectors import unit_vectors

METADATA: dict[str, FieldType] = {"year": "integer", "lang": "string", "published": "date"}
VECTORS = unit_vectors(8, 4)


def log_in(directory: Path) -> ChangeLog:
    return ChangeLog(directory, METADATA, 4)


def put(id: str, row: int = 0, **metadata: Any) -> Put:
    return Put(id, f"text of {id}", VECTORS[row], metadata)


def ids_of(log: ChangeLog, after: int = 0) -> list[str]:
    return [id for _, table in log.read(after) for id in table.column("id").to_pylist()]


def test_changes_are_read_as_they_were_appended(tmp_path: Path) -> None:
    log = log_in(tmp_path / "changes" / "a")
    assert (log.last(), list(log.read(0))) == (0, [])
    assert not (tmp_path / "changes").exists()  # reading creates nothing
    assert (
        log.append([put("é\n日本", 1, year=2020, published="2020-02-29"), Delete("gone"), put("b", 2, lang=None)]) == 1
    )
    assert log.append([put("c", 3)]) == 2
    assert log.last() == log_in(log.directory).last() == 2
    (first, one), (second, two) = log_in(log.directory).read(0)
    assert (first, second) == (1, 2)
    assert one.select([OP, "id", "year"]).to_pylist() == [
        {OP: "put", "id": "é\n日本", "year": 2020},
        {OP: "delete", "id": "gone", "year": None},
        {OP: "put", "id": "b", "year": None},
    ]
    assert one.column("published").cast(pa.string()).to_pylist() == ["2020-02-29", None, None]
    assert one.column("text").to_pylist() == ["text of é\n日本", None, "text of b"]
    np.testing.assert_array_equal(np.stack([v for v in one.column(VECTOR).to_pylist() if v]), VECTORS[1:3])
    np.testing.assert_array_equal(two.column(VECTOR).to_pylist(), VECTORS[3:4])
    assert [sequence for sequence, _ in log.read(1)] == [2]


def test_an_append_of_any_size_is_one_segment(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    made: list[Change] = [put(f"{i:03d}", i % 8) for i in range(3000)]
    made.insert(7, Put("large", "x" * 100_000, VECTORS[0]))
    assert log.append(made) == 1
    assert ids_of(log) == [change.id for change in made]
    many = ChangeLog(tmp_path / "many", METADATA, 4, shards=3000)  # whose header is longer than the first read
    assert many.append(made) == 1
    assert sorted(ids_of(many)) == sorted(change.id for change in made)
    for shard in (0, 1, 2999):
        ((_, table),) = many.read(0, shard)
        assert table.column("id").to_pylist() == [change.id for change in made if shard_of(change.id, 3000) == shard]


def test_a_shard_reads_its_own_changes_in_their_order_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ChangeLog(tmp_path, METADATA, 4, shards=5)
    made = [[put(f"{i}-{n}", n, year=i) for n in range(8)] + [Delete(f"{i}-3")] for i in range(20)]
    made.append([Put(f"large-{n}", "x" * 50_000, VECTORS[0]) for n in range(8)])
    for changes in made:
        log.append(changes)
    read: list[int] = []
    bytes_of = ChangeLog._bytes

    def counted(self: ChangeLog, sequence: int, start: int, length: int | None) -> bytes | None:
        content = bytes_of(self, sequence, start, length)
        read.append(len(content or b""))
        return content

    monkeypatch.setattr(ChangeLog, "_bytes", counted)
    for shard in range(5):
        segments = list(log.read(0, shard))
        assert [sequence for sequence, _ in segments] == list(range(1, 22))  # also those that do not touch it
        for (_, table), changes in zip(segments, made, strict=True):
            assert table.column("id").to_pylist() == [c.id for c in changes if shard_of(c.id, 5) == shard]
            assert table.schema == log.schema
    large = (tmp_path / f"{21:012d}.arrow").stat().st_size
    assert sum(read) < 2.5 * large + 5 * 20 * 20_000


@pytest.mark.parametrize("place", ["magic", "count", "section", "checksum"])
def test_a_damaged_header_stops_every_shard(tmp_path: Path, place: str) -> None:
    log = ChangeLog(tmp_path, METADATA, 4, shards=3)
    log.append([put(f"{n}") for n in range(8)])
    file = tmp_path / f"{1:012d}.arrow"
    content = bytearray(file.read_bytes())
    size = 16 + content[12] * 52  # of the header without its checksum
    content[{"magic": 2, "count": 15, "section": 20, "checksum": size + 5}[place]] ^= 1
    file.write_bytes(content)
    for shard in (0, 1, 2, None):
        with pytest.raises(LogFault, match=r"000000000001\.arrow is corrupted"):
            list(log.read(0, shard))


def test_a_damaged_section_stops_its_own_shard(tmp_path: Path) -> None:
    log = ChangeLog(tmp_path, METADATA, 4, shards=3)
    log.append([put(f"{n}") for n in range(8)])
    file = tmp_path / f"{1:012d}.arrow"
    file.write_bytes(file.read_bytes()[:-1])  # of the last shard
    for shard in (2, None):
        with pytest.raises(LogFault, match=r"000000000001\.arrow is corrupted"):
            list(log.read(0, shard))
    assert len(list(log.read(0, 0))) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("a", yaer=2020), r"document 'a': metadata 'yaer' is no column of the index; did you mean year\?"),
        (put("a", year="2020"), r"document 'a': metadata 'year'='2020' must be a whole number"),
        (put("a", published="yesterday"), "must be a date as in 2024-05-31"),
        (Put("a", "text", VECTORS[0][:3]), r"its vector must be finite and of shape \(4,\), got shape \(3,\)"),
        (Put("a", "text", VECTORS[0] * np.nan), "its vector must be finite"),
        (Put("", "text", VECTORS[0]), "id='': empty"),
        (Put("\ud800", "text", VECTORS[0]), "its id must be text without lone surrogates"),
        (Put("a", "\ud800", VECTORS[0]), "its text must be text without lone surrogates"),
        (Delete("\ud800"), "its id must be text"),
    ],
)
def test_an_invalid_change_rejects_the_whole_append(tmp_path: Path, change: Change, message: str) -> None:
    log = log_in(tmp_path / "log")
    with pytest.raises(ChangeError, match=message) as refusal:
        log.append([put("fine"), change])
    assert "\n" not in str(refusal.value)
    assert log.last() == 0


def damaged(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes({"one bit": content, "truncated": content[:-1], "empty": b""}[how])


@pytest.mark.parametrize("how", ["one bit", "truncated", "empty"])
def test_reading_stops_before_a_damaged_segment_and_names_it(tmp_path: Path, how: str) -> None:
    log = log_in(tmp_path)
    for id in "abc":
        log.append([put(id)])
    damaged(tmp_path / f"{2:012d}.arrow", how)
    segments: Iterator[tuple[int, pa.Table]] = log.read(0)
    assert next(segments)[0] == 1
    with pytest.raises(LogFault, match=r"000000000002\.arrow is corrupted .*; restore it") as refusal:
        next(segments)
    assert "\n" not in str(refusal.value)
    assert log.append([put("d")]) == 4  # appends continue meanwhile


def test_a_missing_segment_is_not_the_end_of_the_log(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    for id in "abcd":
        log.append([put(id)])
    log.check(0)
    (tmp_path / f"{3:012d}.arrow").rename(tmp_path / "aside")
    with pytest.raises(LogFault, match=r"000000000003\.arrow is missing; restore it"):
        log_in(tmp_path).check(0)
    assert log_in(tmp_path).append([put("e")]) == 5  # the missing number is not reused
    (tmp_path / "aside").rename(tmp_path / f"{3:012d}.arrow")
    assert ids_of(log_in(tmp_path)) == list("abcde")
    log.check(0)


def test_pruning_keeps_the_last_folded_segment_and_those_after_it(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    for id in "abcd":
        log.append([put(id)])
    assert (log.prune(0), log.prune(3), log.prune(3)) == (0, 2, 0)
    log_in(tmp_path).check(3)
    assert ids_of(log_in(tmp_path), after=2) == ["c", "d"]
    with pytest.raises(LogFault, match=r"000000000001\.arrow is missing"):
        log_in(tmp_path).check(0)
    assert log_in(tmp_path).append([put("e")]) == 5
    for sequence in (3, 4, 5):
        (tmp_path / f"{sequence:012d}.arrow").unlink()
    with pytest.raises(LogFault, match=r"000000000003\.arrow is missing"):
        log_in(tmp_path).check(3)  # the next append would start at 1 again, unread


@pytest.mark.parametrize(
    ("metadata", "shards", "fault"),
    [(METADATA, 3, "is of an index of 1 shards"), ({"year": "number"}, 1, "has other columns than the index")],
)
def test_a_log_of_another_index_is_refused(
    tmp_path: Path, metadata: dict[str, FieldType], shards: int, fault: str
) -> None:
    log_in(tmp_path).append([put("a")])
    with pytest.raises(LogFault, match=fault):
        list(ChangeLog(tmp_path, metadata, 4, shards).read(0))


def test_a_long_log_is_not_listed_for_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_ahead_log, "_LISTED_PER_CALL", 2)
    log = log_in(tmp_path)
    listed: list[int] = []
    listdir = os.listdir

    def counted(path: Path) -> list[str]:
        listed.append(len(listdir(path)))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", counted)
    assert [log.append([put(f"{n}")]) for n in range(40)] == list(range(1, 41))
    assert sum(listed) <= 2 * 40 + 40


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


def test_many_writers_lose_nothing_and_agree_on_one_order(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        log = log_in(tmp_path)
        for i in range(12):
            log.append([put(f"{writer}-{i}"), Delete(f"{writer}-{i - 1}")])

    live, seen = log_in(tmp_path), []
    with ThreadPoolExecutor(3) as threads:
        writers = [threads.submit(write, writer) for writer in range(3)]
        while len(seen) < 36:
            seen += [(sequence, table.column("id").to_pylist()) for sequence, table in live.read(len(seen))]
            assert not any(writer.done() and writer.exception() for writer in writers)
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
os.link = die
log.append([Put("lost", "text", np.ones(4))])
"""


@pytest.mark.integration
def test_a_writer_killed_before_the_link_leaves_no_visible_segment(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
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
        sequence = last()
        quick.append([put("quick")])
        return sequence

    slow.last = overtaken  # type: ignore[method-assign]
    assert slow.append([put("slow")]) == 2
    assert ids_of(quick) == ["quick", "slow"]


def test_a_store_that_does_not_answer_is_a_fault_of_the_log(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ChangeLog(Folder.open(f"{bucket}/changes/broken", "changes"), {}, 4)

    def fails(*_: object) -> None:
        raise GenericError("connection refused")

    monkeypatch.setattr(Folder, "put", fails)
    with pytest.raises(LogFault, match=r"cannot be written \(connection refused\).*make the change again"):
        log.append([put("a")])
    monkeypatch.setattr(Folder, "read_range", fails)
    with pytest.raises(LogFault, match=r"000000000001\.arrow cannot be read \(connection refused\)"):
        list(log.read(0))
