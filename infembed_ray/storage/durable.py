"""Durable files: every sync, atomic replacement and file lock of the package.

A file survives a power failure only when its bytes and the name in its directory are both synced (fsync(2), "Calling fsync()
does not necessarily ensure that the entry in the directory containing the file has also reached disk").
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def sync(stream: IO[Any]) -> None:
    """Flush an open file and sync its bytes."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Sync a directory, so the names of its files survive a power failure. Some file systems cannot; they are left alone."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, shared: bool = False) -> Iterator[IO[bytes]]:
    """Replace a file atomically by what the block writes: a reader sees the old file or the new one.

    If the block raises, the old file stays. A killed writer leaves `NAME.partial`, which the next writer overwrites.

    Args:
        shared: whether several processes may write the file at once. Each then has a partial file of its own, which stays
            if the process is killed; the last writer wins.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial" if shared else f"{path.name}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            sync(stream)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def replace_json(path: Path, value: Any, shared: bool = False) -> None:
    """Replace a file atomically by indented JSON; `shared` as for `replacing`."""
    with replacing(path, shared) as stream:
        stream.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")


def publish_directory(partial: Path, path: Path) -> None:
    """Rename a directory whose files are synced to its final name."""
    sync_directory(partial)
    partial.rename(path)
    sync_directory(path.parent)


@contextlib.contextmanager
def exclusive_lock(path: Path, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive flock on a file, which is created and never removed.

    The kernel releases the lock when the process ends. A removed lock file could be locked twice: the old file by one
    process, the new one by another.

    Args:
        wait: wait for another holder instead of raising.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
    """
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
