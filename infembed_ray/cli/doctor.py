"""`infembed doctor`: what of this machine's environment works, what does not, and the command that mends it."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from infembed_ray.errors import InputError, StartError, in_one_line
from infembed_ray.progress import say
from infembed_ray.telemetry import running_ray

PACKAGE = "infembed-ray"
KEY = "OPENAI_API_KEY"
TOKEN_FILE = "~/.ray/auth_token"
LEAST_FREE = 10 * 2**30
"""Bytes that a disk should have free."""


def run(places: list[str]) -> int:
    """Check the environment and print a line for each finding.

    Args:
        places: directories and URIs that outputs go to, and URLs of LLM endpoints.

    Returns:
        1 if something does not work, else 0.
    """
    checks: dict[str, Callable[[], Iterator[str]]] = {
        "packages": _packages,
        "gpu": _gpu,
        "faiss": _faiss,
        "deepspeed": _deepspeed,
        "disk": partial(_disk, Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()))),
        "ray": _ray,
        **{place: partial(_endpoint if place.startswith("http") else _place, place) for place in places},
    }
    failed = [name for name, check in checks.items() if not _holds(name, check)]
    say(f"\nto mend: {', '.join(failed)}" if failed else "\neverything works")
    return int(bool(failed))


def _holds(name: str, check: Callable[[], Iterator[str]]) -> bool:
    """Print what a check finds; return whether it holds."""
    try:
        for fact in check():
            say(f"ok    {name}: {fact}")
    except (InputError, StartError) as error:
        for fault in error.args:
            say(f"FAIL  {name}: {fault}")
        return False
    except Exception as error:  # a library that is broken in a way that nobody foresaw
        say(f"FAIL  {name}: {in_one_line(error)}; install this package again, from its checkout")
        return False
    return True


def _packages() -> Iterator[str]:
    """Compare the installed versions with those that this package supports."""
    wrong = []
    for needed in map(Requirement, metadata.requires(PACKAGE) or []):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        version = next((each.version for each in metadata.distributions(name=needed.name)), None)
        if version is None or not needed.specifier.contains(version, prereleases=True):
            state = "is not installed" if version is None else f"{version} is not supported"
            wrong.append(f"{needed.name} {state}: pip install '{needed}'")
    if wrong:
        raise InputError(*wrong)
    versions = " ".join(f"{name} {metadata.version(name)}" for name in ("ray", "torch", "transformers", "deepspeed"))
    yield f"Python {'.'.join(map(str, sys.version_info[:3]))}, {versions}"


def _gpu() -> Iterator[str]:
    import torch

    gpus = _nvidia_smi()
    if gpus and not torch.cuda.is_available():
        fault = f"{gpus[0]}, but torch {torch.__version__} for CUDA {torch.version.cuda} cannot use it"
        raise InputError(f"{fault}: install a torch for the CUDA that nvidia-smi shows, or a newer driver")
    yield from gpus or [f"no NVIDIA GPU; torch uses {torch.get_num_threads()} threads"]


def _nvidia_smi() -> list[str]:
    """Return name, memory and driver of each GPU."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _faiss() -> Iterator[str]:
    from infembed_ray.retrieval.faiss_import import load

    faiss = load()
    on_gpus = hasattr(faiss, "StandardGpuResources")
    remedy = "; for GPUs: pip uninstall -y faiss-cpu, then pip install 'faiss-gpu<2'"
    yield f"{faiss.__version__} for {'GPUs' if on_gpus else 'CPUs'}{remedy if _nvidia_smi() and not on_gpus else ''}"


def _deepspeed() -> Iterator[str]:
    if not _nvidia_smi():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns
    yield importlib.import_module("deepspeed").__version__


def _ray() -> Iterator[str]:
    token = os.environ.get("RAY_AUTH_TOKEN_PATH") or TOKEN_FILE
    has_token = bool(os.environ.get("RAY_AUTH_TOKEN")) or Path(token).expanduser().is_file()
    if os.environ.get("RAY_AUTH_MODE") == "token" and not has_token:
        written = f"write the cluster's to {token} (a new one: (umask 077; openssl rand -hex 32 > {token}))"
        raise InputError(f"RAY_AUTH_MODE=token, but there is no token: set RAY_AUTH_TOKEN, or {written}")
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        yield f"{metadata.version('ray')}; RAY_ADDRESS is not set, so each command starts a cluster of its own"
        return
    if address.startswith(("http://", "https://")):
        fault = "the address of the job API"
        raise InputError.of("RAY_ADDRESS", address, fault, "on the cluster it is HOST:6379 or auto")
    from infembed_ray.ray_cluster import connect

    connect()
    ray = running_ray()
    try:
        total = ray.cluster_resources()
        nodes = sum(node["Alive"] for node in ray.nodes())
        yield f"{address}: {nodes} nodes, {total.get('CPU', 0):g} CPUs, {total.get('GPU', 0):g} GPUs"
    finally:
        ray.shutdown()


def _place(value: str) -> Iterator[str]:
    from infembed_ray.storage.steps import open_place, require_writable

    place = open_place(value, "output")
    require_writable(place, "output")
    yield "can be written"
    if isinstance(place, Path):
        yield from _disk(place)


def _disk(place: Path) -> Iterator[str]:
    """Check the free space: Ray starts no task on a disk that is 95 % full."""
    from infembed_ray.storage.steps import existing

    usage = shutil.disk_usage(existing(place))
    free = f"{place}: {usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.0f}"
    if usage.free < max(LEAST_FREE, usage.total / 20):
        remedy = "free 10 GiB and 5 % of the disk, or use another one (RAY_TMPDIR for Ray's own files)"
        raise InputError(f"{free}; {remedy}")
    yield free


def _endpoint(url: str) -> Iterator[str]:
    """Ask an endpoint for its models, which is free."""
    key = os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/models", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            json.load(answer)
        yield "answers"
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise InputError.of(KEY, None, f"{url} refuses it (HTTP {error.code})", "set a valid one") from error
        yield f"answers with HTTP {error.code}"
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        remedy = "correct the URL, most end with /v1, or sign in to the proxy"
        raise InputError.of(url, None, "answers a page instead of its models", remedy) from error
    except (OSError, HTTPException, ValueError) as error:
        fault = f"cannot be reached ({getattr(error, 'reason', error)})"
        raise InputError.of(url, None, fault, "start it, or correct the URL") from error
