"""Logs of one JSON value a line: readable while they grow, and never worth a run."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from infembed_ray.progress import say


def read(path: Path, offset: int = 0) -> tuple[list[Any], int]:
    """The whole lines from a byte of the log on, and where they end; all of them, if no line ends there any more.

    Lines end with a newline only, not with what Unicode takes for one besides: texts may hold those.
    """
    if not path.exists():
        return [], 0
    with path.open("rb") as stream:
        stream.seek(max(offset - 1, 0))
        if offset and stream.read(1) != b"\n":  # it was cut since
            offset = stream.seek(0)
        text = stream.read()
    whole = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.split(b"\n") if line], offset + len(whole)


def rewrite(path: Path, values: Iterable[Any]) -> None:
    """Let the log hold these, in one piece: whoever is killed meanwhile leaves the old one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        stream.writelines(map(_line, values))
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def append(path: Path, value: Any) -> None:
    """Add a line, on disk at once and whole. Where there is no room for it, it is left out, which is said once.

    An error would end one worker while the others wait for it.
    """
    line = _line(value)
    try:
        with path.open("ab", buffering=0) as stream:
            end = stream.seek(0, os.SEEK_END)
            if stream.write(line) < len(line):
                stream.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        _say_once(f"train: warning: {path.name} lacks lines, which cannot be written ({error.strerror})")


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


_say_once = cache(say)
