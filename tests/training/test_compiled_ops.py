"""Builds of DeepSpeed's ops after a killed build, and while another process builds."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from infembed_ray.errors import InputError
from infembed_ray.training import compiled_ops
from tests.support.waiting import wait_until

SOURCE = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_tiny() { return PyModule_Create(&module); }
"""
BUILD = """
import sys
from deepspeed.ops.op_builder.builder import OpBuilder
from infembed_ray.training.compiled_ops import build_one_at_a_time

class Tiny(OpBuilder):
    BUILD_VAR = "DS_BUILD_TINY"
    def absolute_name(self): return "deepspeed.ops.tiny_op"
    def sources(self): return [sys.argv[1]]

build_one_at_a_time()
print("the answer is", Tiny("tiny").load().answer())
"""
COMPILER = """#!/bin/sh
case " $* " in *" -c "*)
    touch {started}
    while [ ! -e {go} ]; do sleep 0.1; done
    while [ "$1" != -o ]; do shift; done
    echo garbage > "$2"
    touch {done}
    exit 1 ;;
esac
exec {compiler} "$@"
"""
"""Stand-in for a slow compiler: waits until a file appears, then writes garbage."""


@pytest.mark.integration
def test_killed_build_is_rebuilt_by_the_next_process(tmp_path):
    source, slow = tmp_path / "tiny.cpp", tmp_path / "slow" / "g++"
    source.write_text(SOURCE)
    started, go, done = (tmp_path / name for name in ("started", "go", "done"))
    slow.parent.mkdir()
    slow.write_text(COMPILER.format(started=started, go=go, done=done, compiler=shutil.which("c++")))
    slow.chmod(0o755)
    command = [sys.executable, "-c", BUILD, str(source)]
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    output = tmp_path / "output"
    with output.open("w") as log:  # not a pipe, which the orphaned compiler would keep open
        killed = subprocess.Popen(
            command, env=environment | {"CXX": str(slow)}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_until(lambda: started.exists() or killed.poll() is not None, 120)
        killed.kill()
        killed.wait()
        left = tmp_path / "extensions" / "tiny" / "lock"
        assert left.exists()
        retry = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert "the answer is 42" in retry.stdout, retry.stderr
        assert [line for line in retry.stdout.splitlines() if str(left) in line] == [
            f"train: {left} was left by a killed build; building tiny again"
        ]
        go.touch()
        wait_until(done.exists, 120)
        assert b"garbage" not in (tmp_path / "extensions" / "tiny" / "tiny.o").read_bytes()
        assert not list((tmp_path / "extensions").glob("*.old"))
    finally:
        go.touch()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(killed.pid, signal.SIGKILL)


def test_wait_for_a_lock_is_logged_and_times_out_with_the_file_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compiled_ops, "ANNOUNCE_AFTER_S", 0.2)
    monkeypatch.setattr(compiled_ops, "WAIT_LIMIT_S", 0.6)
    file = tmp_path / ".tiny.lock"
    capsys.readouterr()  # drop the output of DeepSpeed's import
    with file.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError) as error, compiled_ops.locked(file, "tiny"):
            pytest.fail("the file was locked twice")
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    (announced,) = capsys.readouterr().out.splitlines()
    assert "op tiny" in announced
    assert str(file) in announced
    with compiled_ops.locked(file, "tiny"):
        pass
    assert capsys.readouterr().out == ""


def test_build_of_another_host_is_not_discarded(tmp_path, monkeypatch):
    """NFS and Lustre may apply a flock on one host only."""
    file = tmp_path / ".tiny.lock"
    with compiled_ops.locked(file, "tiny") as host:
        assert host == socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    with compiled_ops.locked(file, "tiny") as host:
        assert host not in ("another", None)


def test_build_runs_without_lock_where_flock_is_unsupported(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with compiled_ops.locked(tmp_path / ".tiny.lock", "tiny") as host:
        assert host is None
