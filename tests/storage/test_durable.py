"""Durable files, as a reader, a crash and a second process see them."""

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from infembed_ray.storage import durable


@pytest.fixture
def calls(monkeypatch):
    """Every fsync and rename, in order: ("sync", name) or ("rename", from, to)."""
    seen = []
    fsync, replace, rename = os.fsync, Path.replace, Path.rename

    def record_fsync(descriptor):
        seen.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split(".")[0]))
        fsync(descriptor)

    def record(original):
        def call(self, target):
            seen.append(("rename", self.name.split(".")[0], Path(target).name.split(".")[0]))
            return original(self, target)

        return call

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record(replace))
    monkeypatch.setattr(Path, "rename", record(rename))
    return seen


def test_a_replaced_file_syncs_its_bytes_then_renames_then_syncs_its_directory(tmp_path, calls):
    root = tmp_path / "root"
    root.mkdir()
    durable.replace_json(root / "file.json", {"ä": [1, 2]})
    assert calls == [("sync", "file"), ("rename", "file", "file"), ("sync", "root")]
    assert json.loads((root / "file.json").read_text(encoding="utf-8")) == {"ä": [1, 2]}
    assert os.listdir(root) == ["file.json"]


def test_a_published_directory_is_synced_before_and_after_its_rename(tmp_path, calls):
    root = tmp_path / "root"
    (root / "partial").mkdir(parents=True)
    durable.publish_directory(root / "partial", root / "final")
    assert calls == [("sync", "partial"), ("rename", "partial", "final"), ("sync", "root")]


def test_a_failed_write_keeps_the_old_file_and_leaves_no_partial_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(RuntimeError, match="half way"), durable.replacing(file) as stream:
        stream.write(b"half of the ne")
        raise RuntimeError("half way")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_concurrent_writers_leave_one_complete_file(tmp_path):
    file = tmp_path / "file"
    with durable.replacing(file, shared=True) as first:
        first.write(b"first")
        with durable.replacing(file, shared=True) as second:
            second.write(b"second, longer")
    assert file.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.integration
def test_a_lock_excludes_another_process_until_its_holder_is_killed(tmp_path):
    script = textwrap.dedent(
        """
        import pathlib, sys, time
        from infembed_ray.storage import durable
        with durable.exclusive_lock(pathlib.Path(sys.argv[1])):
            print("held", flush=True)
            time.sleep(60)
        """
    )
    lock = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError), durable.exclusive_lock(lock):
            pass
    finally:
        holder.kill()
        holder.wait()
    with durable.exclusive_lock(lock):
        pass
    with durable.exclusive_lock(lock, wait=True):
        pass


def test_the_partial_file_of_a_killed_writer_is_overwritten(tmp_path):
    (tmp_path / "file.partial").write_bytes(b"much longer than what comes next")
    with durable.replacing(tmp_path / "file") as stream:
        stream.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_system_without_directory_sync_is_no_error(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    durable.sync_directory(tmp_path)
