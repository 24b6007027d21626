"""State of an unfinished run, for `infembed runs`: a small file beside its output, which the finished run deletes.

`OUTPUT/.<identity>.state.json` holds the command, the newest line of progress, and the error that ended the run.
"""

import contextlib
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from infembed_ray import telemetry
from infembed_ray.errors import in_one_line
from infembed_ray.redaction import masked
from infembed_ray.storage.places import Place, delete, write_json

SUFFIX = ".state.json"
UPDATE_S = 10.0
"""Least time between two updates of the progress."""


@contextlib.contextmanager
def recorded(place: Place, stage: str, run: str) -> Iterator[None]:
    """Name this run in figures and log lines, and record its state while the block runs.

    A state that cannot be written is left out: the run matters more.

    Args:
        place: of the outputs of the stage.
        run: identity of the output.
    """
    file = place / f".{run}{SUFFIX}"
    program = sys.argv[0]
    words = ["python", program] if program.endswith(".py") else [Path(program).name]
    state: dict[str, Any] = {
        "stage": stage,
        "run": run,
        "command": masked(shlex.join([*words, *sys.argv[1:]])),
        "host": socket.gethostname(),
    }
    state |= {"pid": os.getpid(), "began": _now(), "updated": _now(), "progress": "", "error": None}
    written = time.monotonic()

    def write(**changes: str) -> None:
        nonlocal written
        written = time.monotonic()
        state.update(changes, updated=_now())
        with contextlib.suppress(Exception):  # stores raise errors of three libraries
            write_json(file, state)

    def progress(line: str) -> None:
        state["progress"] = masked(line)
        if time.monotonic() - written >= UPDATE_S:
            write()

    write()
    with telemetry.running(stage, run, progress):
        try:
            yield
        except BaseException as error:
            write(error=in_one_line(error, stage))
            raise
    with contextlib.suppress(Exception):
        delete(file)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
