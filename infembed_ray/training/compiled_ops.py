"""Builds of DeepSpeed's C++ ops: one process of a machine at a time, and a killed build does not block the next one.

DeepSpeed compiles an op when a process first needs it. torch (2.13) guards that build with a file named `lock` in the
op's build directory. A process that is killed leaves the file behind, and all later processes wait for it without end.
"""

from __future__ import annotations

import fcntl
import functools
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils.cpp_extension import _get_build_directory

from infembed_ray.errors import InputError
from infembed_ray.progress import say

WAIT_LIMIT_S = 1200.0
"""Longest wait for another process's build. A build takes half a minute, on a busy machine some minutes."""
ANNOUNCE_AFTER_S = 5.0
"""Shorter waits are not logged: the workers of a machine load a finished op one after the other."""
POLL_S = 0.1


def build_one_at_a_time() -> None:
    """Make every build of a DeepSpeed op in this process hold an flock; the kernel releases it with the process.

    A build directory that a killed process of this host left is deleted and built again. The flock excludes only processes that
    called this function: run no other DeepSpeed program that builds in the same TORCH_EXTENSIONS_DIR meanwhile.
    """
    build = OpBuilder.jit_load
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def jit_load(builder: OpBuilder, verbose: bool = True) -> Any:
        directory = Path(_get_build_directory(builder.name, verbose=False))
        torch_lock = directory / "lock"
        with locked(directory.with_name(f".{builder.name}.lock"), builder.name) as builder_host:
            if builder_host != socket.gethostname():
                if torch_lock.exists():
                    say(
                        f"train: waiting for {builder_host or 'another process'}, which builds DeepSpeed's op {builder.name}; "
                        f"if nothing builds it any more, delete {torch_lock}"
                    )
                return build(builder, verbose)
            if torch_lock.exists():
                say(f"train: {torch_lock} is left from a build that was killed: building {builder.name} again")
                _discard(directory)
            module = build(builder, verbose)
            torch_lock.unlink(missing_ok=True)  # a torch that keeps the file would make it look like a killed build
            return module

    OpBuilder.jit_load = jit_load


@contextmanager
def locked(file: Path, op: str) -> Iterator[str | None]:
    """Hold an exclusive flock on a file, and give the host whose builds it guards; None where files cannot be locked.

    A flock can be valid on one host only, though the file is shared. So the first host to build writes its name into the file, and
    only that one may take a build for a killed one.

    Args:
        file: created if missing; it stays.
        op: name of the op that the caller builds.

    Raises:
        InputError: another process has held it for `WAIT_LIMIT_S`.
    """
    announced = False
    began = time.monotonic()
    with file.open("a+") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
            except OSError:  # the file system has no flock
                yield None
                return
            if waited >= WAIT_LIMIT_S:
                raise InputError(
                    f"{file}: another process has been building DeepSpeed's op {op} for over {WAIT_LIMIT_S / 60:g} "
                    f"minutes; end the process that holds this file (`fuser {file}`)"
                )
            if waited >= ANNOUNCE_AFTER_S and not announced:
                announced = True
                say(
                    f"train: waiting up to {WAIT_LIMIT_S / 60:g} minutes for another process that builds DeepSpeed's "
                    f"op {op} ({file})"
                )
            time.sleep(POLL_S)
        lock.seek(0)
        host = lock.read()
        if not host:
            host = socket.gethostname()
            lock.write(host)
            lock.flush()
        yield host


def _discard(directory: Path) -> None:
    """Delete a build directory. Compilers that outlived their build write into the old directory, not into the new one."""
    old = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.old")
    directory.rename(old)
    shutil.rmtree(old, ignore_errors=True)
