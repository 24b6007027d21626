import hashlib
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from infembed_ray.errors import InputError
from infembed_ray.retrieval import shard_files
from infembed_ray.retrieval.shard_files import (
    FileChecksums,
    ShardFacts,
    clear_attempts,
    local_directory,
    verify,
    verify_local,
    write_once,
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


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for copies."""
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    return tmp_path / "scratch"


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
    first = local_directory(folder, facts)
    assert {name: (first / name).read_bytes() for name in FILES} == {
        name: (root / facts.name / name).read_bytes() for name in FILES
    }
    for name in FILES:
        folder.delete(f"{facts.name}/{name}")
    assert local_directory(folder / "moved", facts) == first
    assert sorted(os.listdir(first)) == sorted([*FILES, "lock"])
    assert len(Shard.open(folder, facts)) == 50


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
    for refused in (lambda: local_directory(folder, facts), lambda: verify(folder, facts)):
        with pytest.raises(InputError, match=f"^index={folder}: {re.escape(name)} is {message}"):
            refused()
    folder.upload(root / name, name)
    assert (local_directory(folder, facts) / FILES[1]).read_bytes() == (root / name).read_bytes()
    verify(folder, facts)


def test_a_damaged_copy_of_this_machine_is_made_again(facts: ShardFacts, root: Path, bucket: str) -> None:
    folder = upload(root, facts, bucket, "copy")
    verify_local(folder, facts)
    file = local_directory(folder, facts) / FILES[0]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"x")
    verify_local(folder, facts)
    assert file.read_bytes() == whole


def test_a_late_attempt_at_a_shard_overwrites_no_other_one(bucket: str) -> None:
    folder, written = Folder.open(f"{bucket}/shard_files/late", "index"), []

    def write(directory: Path) -> ShardFacts:
        if not written:
            written.append(write_once(folder, "shard-00000", lambda other: made(other, 0)))
        return made(directory, 1)

    def made(directory: Path, seed: int) -> ShardFacts:
        return write_shard(directory, ["a", "b"], ["x", "y"], unit_vectors(2, 8, seed=seed))

    late = write_once(folder, "shard-00000", write)
    (published,) = written
    for facts in (published, late):
        verify(folder, facts)
    assert write_once(folder, "shard-00000", write) == late  # it is recorded
    folder.write("manifest.json", "{}")
    clear_attempts(folder, [published])
    verify(folder, published)
    assert set(folder.entries()) == {"manifest.json", *(f"{published.name}/{name}" for name in published.checksums)}


def test_a_shard_that_was_written_before_is_written_again_if_it_is_damaged(facts: ShardFacts, root: Path) -> None:
    assert write_once(root, facts.name, lambda _: facts) == facts
    assert write_once(root, facts.name, lambda _: 1 / 0) == facts  # type: ignore[arg-type, return-value]
    (root / facts.name / FILES[1]).write_bytes(b"")
    with pytest.raises(ZeroDivisionError):
        write_once(root, facts.name, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]


def test_a_full_disk_and_a_store_that_fails_are_told_apart(
    facts: ShardFacts, root: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = upload(root, facts, bucket, "faults")
    (tmp_path / "file").touch()
    with (
        monkeypatch.context() as patch,
        pytest.raises(InputError, match=f"^{SCRATCH}=.* which has {facts.bytes} bytes; free"),
    ):
        patch.setattr(shard_files, "scratch", lambda: tmp_path / "file")
        local_directory(folder, facts)

    class Broken:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def size(self) -> int:
            raise OSError("curlCode: 28, Timeout was reached")

    monkeypatch.setattr(shard_files, "open_binary", lambda *_: Broken())
    with pytest.raises(InputError, match=rf"^index={folder}: the object store failed \(curlCode: 28"):
        local_directory(folder, facts)


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


def test_a_block_that_the_disk_takes_in_parts_is_written_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, start: pwrite(fd, data[: (len(data) + 1) // 2], start))
    with pa.OSFile(str(file)) as source:
        FileChecksums.measure(file).copy(source, file.with_name("copy"), "place")
    assert file.with_name("copy").read_bytes() == file.read_bytes()
