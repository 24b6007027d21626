from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from infembed_ray.errors import InputError
from infembed_ray.retrieval import shard_files
from infembed_ray.retrieval.shard_files import (
    FileChecksums,
    ShardFacts,
    clear_finished,
    drop_other_attempts,
    finished_shard,
    local_directory,
    mark_finished,
    shard_directory,
    verify,
    verify_local,
)
from infembed_ray.retrieval.shards import Build, Shard
from infembed_ray.storage.object_store import SCRATCH, Folder
from tests.retrieval.vectors import unit_vectors
from tests.support.shards import write_shard

FILES = ["index.faiss", "passages.arrow", "vectors.npy"]


@pytest.fixture
def facts(tmp_path: Path) -> ShardFacts:
    ids, texts = [f"p{i}" for i in range(50)], [f"text {i}" for i in range(50)]
    directory = tmp_path / "index" / "shard-00000"
    return write_shard(directory, ids, texts, unit_vectors(50, 8), build=Build("IVF4,Flat"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "index"


def upload(root: Path, facts: ShardFacts, bucket: str, name: str) -> Folder:
    folder = Folder.open(f"{bucket}/shard_files/{name}", "index")
    for file in facts.checksums:
        folder.upload(root / facts.name / file, f"{facts.name}/{file}")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused_by_name(facts: ShardFacts, root: Path, name: str) -> None:
    (root / "shard-00000" / name).unlink()
    for refused in (Shard.open, verify):
        with pytest.raises(InputError, match=f"^index={root}: shard-00000/{name} is missing"):
            refused(root, facts)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["one bit", "truncated", "longer"])
def test_a_corrupted_file_is_found_by_verification_and_one_of_another_size_by_opening(
    facts: ShardFacts, root: Path, name: str, damage: str
) -> None:
    verify(root, facts)
    file = root / "shard-00000" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= damage == "one bit"
    file.write_bytes({"one bit": content, "truncated": content[:-1], "longer": content + b"\0"}[damage])
    with pytest.raises(InputError, match=f"shard-00000/{name} is corrupted"):
        verify(root, facts)
    if damage == "one bit":
        assert local_directory(root, facts) == root / "shard-00000"
    else:
        with pytest.raises(InputError, match=r"shard-00000(/" + name + r")? is corrupted \(\d+ bytes instead of \d+\)"):
            Shard.open(root, facts)


def test_a_shard_in_a_store_is_copied_once_for_all_indexes_with_the_same_files(
    facts: ShardFacts, root: Path, bucket: str, tmp_path: Path
) -> None:
    folder = upload(root, facts, bucket, "once")
    first = local_directory(folder, facts, tmp_path / "cache")
    assert {name: (first / name).read_bytes() for name in FILES} == {
        name: (root / facts.name / name).read_bytes() for name in FILES
    }
    for name in FILES:
        folder.delete(f"{facts.name}/{name}")
    assert local_directory(folder / "moved", facts, tmp_path / "cache") == first
    assert sorted(os.listdir(first)) == sorted([*FILES, "lock"])
    assert len(Shard.open(folder, facts, cache=tmp_path / "cache")) == 50


@pytest.mark.parametrize("damage", ["one bit", "truncated", "missing"])
def test_a_damaged_object_is_refused_and_copied_once_it_is_restored(
    facts: ShardFacts, root: Path, bucket: str, tmp_path: Path, damage: str
) -> None:
    folder = upload(root, facts, bucket, damage.split()[-1])
    name = f"{facts.name}/{FILES[1]}"
    content = bytearray((root / name).read_bytes())
    content[-1] ^= damage == "one bit"
    (tmp_path / "damaged").write_bytes(content[:-1] if damage == "truncated" else content)
    if damage == "missing":
        folder.delete(name)
    else:
        folder.upload(tmp_path / "damaged", name)
    message = "missing" if damage == "missing" else "corrupted"
    for refused in (lambda: local_directory(folder, facts, tmp_path / "cache"), lambda: verify(folder, facts)):
        with pytest.raises(InputError, match=f"^index={folder}: {re.escape(name)} is {message}"):
            refused()
    folder.upload(root / name, name)
    assert (local_directory(folder, facts, tmp_path / "cache") / FILES[1]).read_bytes() == (root / name).read_bytes()
    verify(folder, facts)


def test_a_damaged_copy_of_this_machine_is_found_although_the_store_is_whole(
    facts: ShardFacts, root: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    folder = upload(root, facts, bucket, "copy")
    verify_local(folder, facts)
    copy = local_directory(folder, facts)
    (copy / FILES[0]).write_bytes((copy / FILES[0]).read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=rf"^index={folder}: .*{FILES[0]} is corrupted.*; delete {copy} and run again"):
        verify_local(folder, facts)
    shutil.rmtree(copy)
    verify_local(folder, facts)


def test_a_late_attempt_at_a_shard_overwrites_no_other_one(bucket: str, tmp_path: Path) -> None:
    folder = Folder.open(f"{bucket}/shard_files/late", "index")
    written = []
    for seed in range(2):
        with shard_directory(folder, "shard-00000") as directory:
            made = write_shard(directory, ["a", "b"], ["x", "y"], unit_vectors(2, 8, seed=seed))
            written.append(mark_finished(folder, "shard-00000", directory, made))
    published, late = written
    for facts in written:
        verify(folder, facts)
    assert finished_shard(folder, "shard-00000") == late
    clear_finished(folder)
    folder.write("manifest.json", "{}")
    drop_other_attempts(folder, [published])
    verify(folder, published)
    assert set(folder.entries()) == {"manifest.json", *(f"{published.name}/{name}" for name in published.checksums)}


def test_a_full_disk_and_a_store_that_fails_are_told_apart(
    facts: ShardFacts, root: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = upload(root, facts, bucket, "faults")
    (tmp_path / "file").touch()
    with pytest.raises(
        InputError, match=rf"^INFEMBED_SCRATCH={tmp_path / 'file'}: .* which has {facts.bytes} bytes; free"
    ):
        local_directory(folder, facts, tmp_path / "file")

    class Broken:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def size(self) -> int:
            raise OSError("curlCode: 28, Timeout was reached")

    monkeypatch.setattr(shard_files, "open_binary", lambda *_: Broken())
    with pytest.raises(InputError, match=rf"^index={folder}: the object store failed \(curlCode: 28"):
        local_directory(folder, facts, tmp_path / "cache")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of several blocks."""
    monkeypatch.setattr(shard_files, "BLOCK", 10)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(35)))
    return path


@pytest.mark.parametrize("size", [0, 1, 10, 11, 35])
def test_a_checksum_covers_each_block(file: Path, tmp_path: Path, size: int) -> None:
    content = bytes(range(size))
    file.write_bytes(content)
    blocks = [content[start : start + 10] for start in range(0, size, 10)]
    expected = FileChecksums(size, "".join(hashlib.sha256(block).hexdigest()[:16] for block in blocks))
    assert FileChecksums.measure(file) == expected
    with pa.OSFile(str(file)) as source:
        expected.verify(source, "place")
        expected.copy(source, tmp_path / "copy", "place")
    assert (tmp_path / "copy").read_bytes() == content


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({33: 0}, "place is corrupted .the checksum of the block at byte 30 differs"),
        ({0: 1}, "block at byte 0 "),
        ("shorter", r"place is corrupted \(34 bytes instead of 35\)"),
        ("longer", r"36 bytes instead of 35"),
    ],
)
def test_a_damaged_file_is_refused_and_not_copied(file: Path, damage: Any, message: str) -> None:
    whole = FileChecksums.measure(file)
    content = bytearray(file.read_bytes())
    if isinstance(damage, dict):
        for place, value in damage.items():
            content[place] = value
    file.write_bytes({"shorter": content[:-1], "longer": content + b"\0"}.get(str(damage), content))
    copy = file.with_name("copy")
    with pa.OSFile(str(file)) as source:
        for refused in (lambda: whole.verify(source, "place"), lambda: whole.copy(source, copy, "place")):
            with pytest.raises(InputError, match=message):
                refused()
    assert not copy.exists()


def test_a_block_that_the_disk_takes_in_parts_is_written_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, start: pwrite(fd, data[: (len(data) + 1) // 2], start))
    with pa.OSFile(str(file)) as source:
        FileChecksums.measure(file).copy(source, file.with_name("copy"), "place")
    assert file.with_name("copy").read_bytes() == file.read_bytes()
