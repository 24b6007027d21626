"""Provenance: which code, job, submitter, image and nodes made an output.

Nothing is copied from the environment except the variables that are named here, with credentials masked, so no secret
reaches a manifest.
"""

from __future__ import annotations

import functools
import getpass
import hashlib
import json
import os
import platform
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infembed_ray import __version__
from infembed_ray.ray_compat import JOB_CONFIG_VARIABLE
from infembed_ray.redaction import masked
from infembed_ray.telemetry import running_ray

if TYPE_CHECKING:
    from infembed_ray.config.base import Settings

IMAGE = "INFEMBED_IMAGE"
"""Environment variable: name and digest of the container image. A container cannot find it out by itself."""
SUBMITTER = "INFEMBED_SUBMITTER"
"""Environment variable: who started the run. On a cluster, the user of the operating system says nothing."""
_PACKAGE = Path(__file__).parents[1]
_SHIPPED = "files"
"""Directory that only the wheel has: copies of job scripts."""
_GIB = 2**30
_GIT_TIMEOUT_S = 10


def collect() -> dict[str, Any]:
    """Return the provenance of an output that this process publishes now."""
    return {
        "code": code(),
        "python": platform.python_version(),
        "job": _job(),
        "submitter": masked(os.environ.get(SUBMITTER, "")) or _user(),
        "host": socket.gethostname(),
        "image": masked(os.environ.get(IMAGE, "")) or None,
        "nodes": _nodes(),
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
    """Return the code of this process.

    Returns:
        `version` of the package; `hash` of its files; `commit` and `uncommitted` (hash of the difference of the package from
        the commit), if it is imported from a git checkout. A job's working directory usually has no `.git`, but the hash.
    """
    commit = _git("rev-parse", "HEAD")
    changes = None if commit is None else _git("diff", "HEAD", "--binary", "--", str(_PACKAGE))
    return {
        "version": __version__,
        "hash": _hash_files(),
        "commit": commit,
        "uncommitted": hashlib.sha256(changes.encode()).hexdigest()[:16] if changes else None,
    }


def difference(manifest: Mapping[str, Any]) -> str | None:
    """Describe how the code that made an output differs from this process's code; None if it does not.

    Args:
        manifest: of the output. One of an earlier release has only the version.
    """
    made, here = manifest.get("provenance", {}).get("code"), code()
    if made is None:
        made = {"version": manifest.get("code_version")}
        same = made["version"] == here["version"]
    else:
        same = made.get("hash") == here["hash"]
    return None if same else f"other code made it: {_describe(made)}; this is {_describe(here)}"


def _describe(found: Mapping[str, str | None]) -> str:
    parts = [f"version {found['version']}"]
    if commit := found.get("commit"):
        parts.append(f"commit {commit[:12]}")
    if found.get("uncommitted"):
        parts.append("with uncommitted changes")
    elif not found.get("commit") and (digest := found.get("hash")):
        parts.append(f"files {digest}")
    return " ".join(parts)


def _git(*arguments: str) -> str | None:
    """Return the output of a git command on the checkout of this package; None if there is none."""
    root = _PACKAGE.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, check=True, timeout=_GIT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout of another user
        return None
    return done.stdout.decode(errors="replace").strip()


def _hash_files() -> str:
    """Hash names and bytes of the package's files: the first 16 hex digits of SHA-256."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*")):
        name = file.relative_to(_PACKAGE)
        if file.is_file() and "__pycache__" not in name.parts and name.parts[0] != _SHIPPED:
            content = file.read_bytes()
            digest.update(f"{name.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return None


def _job() -> dict[str, str] | None:
    """Return Ray's ids of the job that this process is the driver of; None without Ray."""
    ray = running_ray()
    if ray is None:
        return None
    submitted = json.loads(os.environ.get(JOB_CONFIG_VARIABLE) or "{}").get("metadata", {})
    found = {"id": ray.get_runtime_context().get_job_id(), "submission_id": submitted.get("job_submission_id")}
    return {name: value for name, value in found.items() if value}


def _nodes() -> list[dict[str, Any]]:
    """Return the cluster's present nodes, equal ones together: count, resources and accelerator."""
    ray = running_ray()
    if ray is None:
        return []
    kinds = Counter(json.dumps(_resources(node["Resources"]), sort_keys=True) for node in ray.nodes() if node["Alive"])
    return [{"count": count, **json.loads(kind)} for kind, count in sorted(kinds.items())]


def _resources(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return a node's resources without addresses; memory in whole GiB, because equal machines differ by some bytes."""
    accelerators = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    plain = {name: amount for name, amount in resources.items() if ":" not in name and not name.endswith("memory")}
    return {
        "resources": plain | {"memory_gib": round(resources.get("memory", 0) / _GIB)},
        "accelerator": accelerators[0] if accelerators else None,
    }
