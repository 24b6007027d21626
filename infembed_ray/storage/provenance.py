"""Provenance: which code, job, submitter, image and cluster made an output.

Nothing is copied from the environment except the variables that are named here, with credentials masked, so no secret
reaches a manifest.
"""

import functools
import getpass
import json
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infembed_ray import __version__
from infembed_ray.ray_compat import JOB_CONFIG_VARIABLE
from infembed_ray.redaction import masked
from infembed_ray.storage.places import fingerprint_files
from infembed_ray.telemetry import running_ray

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


@functools.cache
def code() -> dict[str, str | None]:
    """Return the code of this process: `version` of the package, `hash` of its files, and `commit`.

    The commit is known if the package is imported from a git checkout, and ends in `+` if that has uncommitted changes. A
    job's working directory usually has no `.git`, but the hash.
    """
    files = [file for file in sorted(_PACKAGE.rglob("*")) if file.is_file()]
    hashed = [file for file in files if not _NOT_CODE & set(file.relative_to(_PACKAGE).parts[:-1])]
    return {"version": __version__, "hash": fingerprint_files(hashed, _PACKAGE), "commit": _commit()}


def warnings(manifest: Mapping[str, Any]) -> list[str]:
    """Return a warning if other code than this process's made an output; else none."""
    made, here = manifest.get("provenance", {}).get("code"), code()
    if made is None or made["hash"] == here["hash"]:
        return []
    told = [f"version {each['version']} {each['commit'] or each['hash']}" for each in (made, here)]
    return [f"warning: other code made it: {told[0]}; this is {told[1]}"]


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
