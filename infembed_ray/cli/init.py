"""`infembed init`: copy job scripts, their settings files and cluster descriptions out of an installed package."""

import shutil
from pathlib import Path

from infembed_ray.config.verbs import project_files
from infembed_ray.errors import InputError
from infembed_ray.progress import say

NAMES = ("jobs", "cluster.yaml", "constraints.txt")


def run(directory: str) -> None:
    """Copy jobs/, cluster.yaml and constraints.txt to a directory; overwrite nothing.

    Raises:
        InputError: one of them exists there, or the directory cannot be written.
    """
    target = Path(directory)
    if present := [name for name in NAMES if (target / name).exists()]:
        raise InputError(f"{target / present[0]} exists already; choose another directory, or delete it")
    try:
        shutil.copytree(project_files() / "jobs", target / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
        for name in NAMES[1:]:
            shutil.copyfile(project_files() / name, target / name)
    except OSError as error:
        fault = f"cannot be written ({error.strerror or error})"
        raise InputError.of(str(target), None, fault, "choose another directory") from error
    say(f"init: wrote {', '.join(NAMES)} to {target.resolve()}")
