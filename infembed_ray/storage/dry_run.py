"""What a dry run says of the output: its place and state, and whether the disk has room. Nothing is written."""

import shutil
from collections.abc import Generator
from pathlib import Path

from infembed_ray.errors import InputError
from infembed_ray.storage.object_store import SCRATCH
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import Step, existing

GIB = 2**30


def state(step: Step, *reused: Place) -> Generator[str, None, bool]:
    """Say where the output will be, and whether it exists.

    Args:
        reused: what an interrupted run leaves besides `step.partial`.

    Returns:
        Whether an earlier run published it, so that nothing is left to check.
    """
    place = step.remote.base if step.remote else step.path
    if done := step.found():
        yield f"output {place}: finished on {done.manifest['created']}, so there is nothing to do"
    elif any(place.exists() for place in (step.partial, *reused)) or (step.remote and step.remote.exists()):
        yield f"output {place}: an interrupted run is there, and this run resumes it"
    else:
        yield f"output {place}: new"
    return done is not None


def require_space(step: Step, needed: float, *reused: Path, of_workers: bool = False) -> str:
    """Return how much disk a run needs besides what an interrupted one left; InputError if there is less.

    Args:
        of_workers: they write the output; if it is in an object store, to the disks of their own nodes.
    """
    if of_workers and step.remote is not None:
        return f"disk: about {gib(needed)} at most in {SCRATCH} of the node of a worker 0, less on other nodes"
    left = (file for place in (step.partial, *reused) for file in place.rglob("*") if file.is_file())
    more = max(0.0, needed - sum(file.stat().st_size for file in left))
    free = shutil.disk_usage(existing(step.root)).free
    if more > free:
        fault = f"the run needs about {gib(more)}, but {gib(free)} are free there"
        raise InputError.of("output", step.root, fault, "free some, or choose another disk")
    return f"disk: about {gib(more)} at most, {gib(free)} are free"


def gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size < 10 * GIB else f"{size / GIB:,.0f} GiB"
