from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from infembed_ray.errors import InputError
from infembed_ray.retrieval import checksums
from infembed_ray.retrieval.checksums import FileChecksums


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK", 10)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(35)))
    return path


class Source:
    """A file that notes its reads, and fails at one of them."""

    def __init__(self, path: Path, fails_at: int | None = None) -> None:
        self.reads: list[int] = []
        self._content = path.read_bytes()
        self._fails_at = fails_at

    def size(self) -> int:
        return len(self._content)

    def read_at(self, count: int, start: int) -> bytes:
        self.reads.append(start)
        if start == self._fails_at:
            raise OSError("connection reset")
        return self._content[start : start + count]


@pytest.mark.parametrize("size", [0, 1, 10, 11, 35])
def test_a_checksum_covers_each_block(tmp_path: Path, size: int) -> None:
    content = bytes(range(size))
    (tmp_path / "file").write_bytes(content)
    blocks = [content[start : start + 10] for start in range(0, size, 10)]
    expected = FileChecksums(size, "".join(hashlib.sha256(block).hexdigest()[:16] for block in blocks))
    assert FileChecksums.measure(tmp_path / "file") == expected
    with pa.OSFile(str(tmp_path / "file")) as source:
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


def test_an_interrupted_copy_resumes_with_the_blocks_that_are_missing_or_damaged(file: Path) -> None:
    whole = FileChecksums.measure(file)
    copy, partial = file.with_name("copy"), file.with_name("copy.partial")
    with pytest.raises(OSError, match="connection reset"):
        whole.copy(Source(file, fails_at=20), copy, "place")
    content = bytearray(partial.read_bytes())
    content[5] ^= 1
    partial.write_bytes(content)
    again = Source(file)
    whole.copy(again, copy, "place")
    assert {0, 20} <= set(again.reads) <= {0, 20, 30}  # 30 may have been read before the failure
    assert copy.read_bytes() == file.read_bytes()
    assert not partial.exists()


def test_a_block_that_the_disk_takes_in_parts_is_written_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, start: pwrite(fd, data[: (len(data) + 1) // 2], start))
    FileChecksums.measure(file).copy(Source(file), file.with_name("copy"), "place")
    assert file.with_name("copy").read_bytes() == file.read_bytes()
