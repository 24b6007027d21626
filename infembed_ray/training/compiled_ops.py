"""Builds of DeepSpeed's C++ ops: one process per machine at a time, and a killed build does not block the next one.

DeepSpeed compiles an op when a process first needs it. torch guards that build with a lock file in the op's build
directory. A killed process leaves the file behind, and every later process would wait for it forever.
"""

from __future__ import annotations

import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from infembed_ray import durable
from infembed_ray.errors import InputError
from infembed_ray.progress import say
from infembed_ray.training.deepspeed_compat import BUILD_LOCK, wrap_op_builds

WAIT_LIMIT_S = 1200.0
"""Longest wait for another process's build, which takes half a minute, or minutes on a busy machine."""
ANNOUNCE_AFTER_S = 5.0
"""Shorter waits are not logged: the workers of a machine load a finished op one after the other."""
POLL_S = 0.1


def build_one_at_a_time() -> None:
    """Make every build of a DeepSpeed op in this process hold an flock, which the kernel releases with the process.

    A build directory that a killed process of this host left is deleted, and the op is built again. The flock excludes
    only processes that called this function: do not run another DeepSpeed program that builds in the same
    TORCH_EXTENSIONS_DIR at the same time.
    """
    wrap_op_builds(_build)


def _build(op: str, directory: Path, compile_op: Callable[[], Any]) -> Any:
    torch_lock = directory / BUILD_LOCK
    with locked(directory.with_name(f".{op}.lock"), op) as builder_host:
        if builder_host != socket.gethostname():
            if torch_lock.exists():
                say(
                    f"train: waiting for {builder_host or 'another process'}, which builds DeepSpeed's op {op}; "
                    f"if no process builds it any more, delete {torch_lock}"
                )
            return compile_op()
        if torch_lock.exists():
            say(f"train: {torch_lock} was left by a killed build; building {op} again")
            _discard(directory)
        module = compile_op()
        torch_lock.unlink(missing_ok=True)  # a torch that keeps the file would make it look like a killed build
        return module


@contextmanager
def locked(file: Path, op: str) -> Iterator[str | None]:
    """Hold an exclusive flock on a file and yield the host whose builds it guards, or None where flock is unsupported.

    A network file system may apply a flock on one host only. The first host to build therefore writes its name into the
    file, and only that host may treat an unfinished build as killed.

    Args:
        file: Lock file; created if missing, never removed.
        op: Name of the op, for messages.

    Raises:
        InputError: another process held the lock for `WAIT_LIMIT_S`.
    """
    with ExitStack() as held:
        if not _wait_for_lock(held, file, op):
            yield None
            return
        host = file.read_text()
        if not host:
            host = socket.gethostname()
            file.write_text(host)
        yield host


def _wait_for_lock(held: ExitStack, file: Path, op: str) -> bool:
    """Wait for the lock; return False where the file system has no flock."""
    file.open("a").close()  # a file that cannot be opened is an error, unlike one that cannot be locked
    announced = False
    began = time.monotonic()
    while True:
        try:
            held.enter_context(durable.exclusive_lock(file))
            return True
        except BlockingIOError:
            waited = time.monotonic() - began
        except OSError:
            return False
        if waited >= WAIT_LIMIT_S:
            raise InputError(
                f"{file}: another process has been building DeepSpeed's op {op} for over {WAIT_LIMIT_S / 60:g} "
                f"minutes; end the process that holds this file (`fuser {file}`)"
            )
        if waited >= ANNOUNCE_AFTER_S and not announced:
            announced = True
            say(f"train: waiting up to {WAIT_LIMIT_S / 60:g} minutes for another build of DeepSpeed's op {op} ({file})")
        time.sleep(POLL_S)


def _discard(directory: Path) -> None:
    """Delete a build directory. Compilers that outlived their build then write into the renamed directory only."""
    old = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.old")
    directory.rename(old)
    shutil.rmtree(old, ignore_errors=True)
