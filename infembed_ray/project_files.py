"""`infembed init`: the job scripts, their settings files and the cluster descriptions, for those without a checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

from infembed_ray.errors import InputError
from infembed_ray.progress import say

NAMES = ("jobs", "cluster.yaml", "constraints.txt")
_PACKAGED = Path(__file__).with_name("files")
"""Where a wheel has them. A checkout, and so an editable install, has them beside the package."""


def run(directory: str) -> None:
    """Copy jobs/, cluster.yaml and constraints.txt into a directory.

    Raises:
        InputError: one of them is there already, or the directory cannot be written. Nothing is ever overwritten.
    """
    source = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[1]
    target = Path(directory)
    if present := [name for name in NAMES if (target / name).exists()]:
        raise InputError(f"{target / present[0]} exists already and would be overwritten; name another directory")
    try:
        shutil.copytree(source / "jobs", target / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
        for name in NAMES[1:]:
            shutil.copyfile(source / name, target / name)
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror or error}); name another directory") from error
    say(f"init: wrote {', '.join(NAMES)} to {target.resolve()}")
