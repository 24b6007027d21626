"""Logs of one JSON value per line, readable while they grow. A failed write does not end the run."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from infembed_ray.progress import say
from infembed_ray.storage import durable


def read(path: Path, offset: int = 0) -> tuple[list[Any], int]:
    """Read the complete lines after byte `offset`, and return them with the offset of their end.

    If the log was rewritten, so that no line ends at `offset`, all lines are read. Only a newline ends a line, not the
    other line separators of Unicode, which texts may contain.
    """
    if not path.exists():
        return [], 0
    with path.open("rb") as stream:
        stream.seek(max(offset - 1, 0))
        if offset and stream.read(1) != b"\n":
            offset = stream.seek(0)
        text = stream.read()
    whole = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.split(b"\n") if line], offset + len(whole)


def rewrite(path: Path, values: Iterable[Any]) -> None:
    """Replace the log atomically by these values."""
    with durable.replacing(path) as stream:
        stream.writelines(map(_line, values))


def append(path: Path, value: Any) -> None:
    """Append a line, whole and without buffering. If the disk is full, the line is dropped and a warning logged once.

    An exception would end one worker while the others wait for it.
    """
    line = _line(value)
    try:
        with path.open("ab", buffering=0) as stream:
            end = stream.seek(0, os.SEEK_END)
            if stream.write(line) < len(line):
                stream.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        _say_once(f"train: warning: lines of {path.name} are missing, because it cannot be written ({error.strerror})")


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


_say_once = cache(say)
