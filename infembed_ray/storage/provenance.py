"""Provenance: which code, job, submitter, image and cluster made an output.

Nothing is copied from the environment except the variables that are named here, with credentials masked, so no secret
reaches a manifest.
"""

from __future__ import annotations

import functools
import getpass
import json
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infembed_ray import __version__
from infembed_ray.ray_compat import JOB_CONFIG_VARIABLE
from infembed_ray.redaction import masked
from infembed_ray.storage.places import fingerprint_files
from infembed_ray.telemetry import running_ray

if TYPE_CHECKING:
    from infembed_ray.config.base import Settings

IMAGE = "INFEMBED_IMAGE"
"""Environment variable: name and digest of the container image. A container cannot find it out by itself."""
SUBMITTER = "INFEMBED_SUBMITTER"
"""Environment variable: who started the run. On a cluster, the user of the operating system says nothing."""
_PACKAGE = Path(__file__).parents[1]
_NOT_CODE = {"files", "__pycache__"}
"""Directories of the package whose files are not hashed: only the wheel has `files`, copies of job scripts."""
_COMMIT = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
_GIT_TIMEOUT_S = 10


def collect() -> dict[str, Any]:
    """Return the provenance of an output that this process publishes now."""
    ray = running_ray()
    return {
        "code": code(),
        "python": platform.python_version(),
        "job": None if ray is None else _job(ray),
        "submitter": masked(os.environ.get(SUBMITTER, "")) or _user(),
        "host": socket.gethostname(),
        "image": masked(os.environ.get(IMAGE, "")) or None,
        "cluster": {} if ray is None else {k: n for k, n in ray.cluster_resources().items() if "node:" not in k},
    }


def given(settings: Settings, name: str) -> str | None:
    """Return the value of the setting that an input has its name from, if there is one."""
    value: Any = settings.model_dump(mode="json")
    for part in name.partition(" ")[0].split("."):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


@functools.cache
def code() -> dict[str, str | None]:
    """Return the code of this process: `version` of the package, `hash` of its files, and `commit`.

    The commit is known if the package is imported from a git checkout, and ends in `+` if that has uncommitted changes. A
    job's working directory usually has no `.git`, but the hash.
    """
    files = [file for file in sorted(_PACKAGE.rglob("*")) if file.is_file()]
    hashed = [file for file in files if not _NOT_CODE & set(file.relative_to(_PACKAGE).parts[:-1])]
    return {"version": __version__, "hash": fingerprint_files(hashed, _PACKAGE), "commit": _commit()}


def difference(manifest: Mapping[str, Any]) -> str | None:
    """Describe how the code that made an output differs from this process's code; None if it does not."""
    made, here = manifest.get("provenance", {}).get("code"), code()
    if made is None or made["hash"] == here["hash"]:
        return None
    return f"other code made it: {_describe(made)}; this is {_describe(here)}"


def _describe(code: Mapping[str, str | None]) -> str:
    return f"version {code['version']} " + (f"commit {code['commit']}" if code["commit"] else f"files {code['hash']}")


def _commit() -> str | None:
    root = _PACKAGE.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(_COMMIT, cwd=root, capture_output=True, check=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout of another user
        return None
    return done.stdout.decode().strip()


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return None


def _job(ray: Any) -> dict[str, str]:
    """Return Ray's ids of the job that this process is the driver of."""
    submitted = json.loads(os.environ.get(JOB_CONFIG_VARIABLE) or "{}").get("metadata", {})
    ids = {"id": ray.get_runtime_context().get_job_id(), "submission_id": submitted.get("job_submission_id")}
    return {name: value for name, value in ids.items() if value}
