"""`infembed doctor`: what of this machine's environment works, what does not, and the command that mends it."""

from __future__ import annotations

import importlib
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from infembed_ray.config.llm import Endpoint
from infembed_ray.errors import InputError, StartError, in_one_line
from infembed_ray.progress import say
from infembed_ray.storage.object_store import scratch

PACKAGE = "infembed-ray"
GIB = 2**30
LEAST_DISK_GIB, USUAL_DISK_GIB = 1, 10
USUAL_FILES = 4096
"""Open files that Ray's processes and many connections take."""
LEAST_SHARED_MEMORY = 0.5 * GIB
STALE_S = 600.0
"""Age from which the lock of a build counts as left over."""
TOKEN_FILE = "~/.ray/auth_token"


class Doubt(Exception):
    """Something works, but not as well as it could; the text says what to change."""


Finding = Iterator[str]
"""Yields facts; raises Doubt, InputError or StartError."""


def run(places: list[str], endpoint: str | None, key_env: str | None, port: int) -> int:
    """Check the environment and print a line for each finding.

    Args:
        places: directories and URIs that outputs go to.
        endpoint: URL of an LLM endpoint up to /v1; None: none is asked.
        key_env: environment variable with its key; None: it needs none.
        port: that an API would listen at.

    Returns:
        1 if something does not work, else 0.
    """
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("packages", _packages),
        ("gpu", _gpu),
        ("faiss", _faiss),
        ("deepspeed", _deepspeed),
        ("ray", _ray),
        ("limits", _limits),
        ("disk", _disk),
        ("port", lambda: _port(port)),
        *((f"output {place}", partial(_place, place)) for place in places),
    ]
    if endpoint:
        checks.append(("endpoint", lambda: _endpoint(endpoint, key_env)))
    failed = [name for name, check in checks if not _holds(name, check)]
    say(f"\nto mend: {', '.join(failed)}" if failed else "\neverything works")
    return int(bool(failed))


def _holds(name: str, check: Callable[[], Finding]) -> bool:
    """Print what a check finds; return whether it holds."""
    try:
        for fact in check():
            say(f"ok    {name}: {fact}")
    except Doubt as doubt:
        say(f"warn  {name}: {doubt}")
    except (InputError, StartError) as error:
        for fault in error.args:
            say(f"FAIL  {name}: {fault}")
        return False
    except Exception as error:  # a library that is broken in a way that nobody foresaw
        say(f"FAIL  {name}: {in_one_line(error)}; reinstall: pip install --force-reinstall {PACKAGE}")
        return False
    return True


def _packages() -> Finding:
    """Compare the installed versions with those that this package supports."""
    wrong = []
    for line in metadata.requires(PACKAGE) or []:
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{needed.name} is not installed: pip install '{needed}'")
            continue
        if not needed.specifier.contains(found, prereleases=True):
            wrong.append(f"{needed.name} {found} is not supported: pip install '{needed}'")
    if wrong:
        raise InputError(*wrong)
    versions = " ".join(f"{name} {metadata.version(name)}" for name in ("ray", "torch", "transformers", "deepspeed"))
    yield f"Python {'.'.join(map(str, sys.version_info[:3]))}, {versions}"


def _gpu() -> Finding:
    gpus = _nvidia_smi()
    import torch

    if not gpus:
        yield f"no NVIDIA GPU; torch uses {torch.get_num_threads()} threads"
        return
    if torch.version.cuda is None:
        raise InputError(
            f"{gpus[0]}, but torch {torch.__version__} runs on CPUs only: pip install --force-reinstall torch"
        )
    if not torch.cuda.is_available():
        raise InputError(
            f"{gpus[0]}, but torch {torch.__version__} cannot use it: install a driver for CUDA {torch.version.cuda}, or a "
            "torch for the driver's CUDA (nvidia-smi shows it)"
        )
    yield from gpus


def _nvidia_smi() -> list[str]:
    """Return name, memory and driver of each GPU."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _faiss() -> Finding:
    from infembed_ray.retrieval.faiss_import import load

    faiss = load()
    on_gpus = hasattr(faiss, "StandardGpuResources")
    yield f"{faiss.__version__} for {'GPUs' if on_gpus else 'CPUs'}"
    if _nvidia_smi() and not on_gpus:
        raise Doubt("this machine has GPUs: pip uninstall -y faiss-cpu, then pip install 'infembed-ray[gpu]'")


def _deepspeed() -> Finding:
    locks = [lock for lock in _extensions().glob("**/lock") if time.time() - lock.stat().st_mtime > STALE_S]
    if locks:
        raise InputError(
            *(f"a killed build left {lock}, for which a training waits for ever: rm {lock}" for lock in locks)
        )
    gpus = _nvidia_smi()
    if not gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns
    yield str(importlib.import_module("deepspeed").__version__)
    if gpus and not (shutil.which("nvcc") or os.environ.get("CUDA_HOME")):
        raise Doubt(
            "no nvcc and no CUDA_HOME: offload to the CPU cannot compile its optimizer; install the CUDA toolkit"
        )


def _extensions() -> Path:
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path("~/.cache/torch_extensions").expanduser()


def _ray() -> Finding:
    token = os.environ.get("RAY_AUTH_TOKEN_PATH") or TOKEN_FILE
    has_token = bool(os.environ.get("RAY_AUTH_TOKEN")) or Path(token).expanduser().is_file()
    if os.environ.get("RAY_AUTH_MODE") == "token" and not has_token:
        raise InputError(
            f"RAY_AUTH_MODE=token, but there is no token: set RAY_AUTH_TOKEN, or write the cluster's to {token} "
            f"(a new one: (umask 077; openssl rand -hex 32 > {token}))"
        )
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        yield f"{metadata.version('ray')}; RAY_ADDRESS is not set, so each command starts a cluster of its own"
        return
    if not address.startswith("ray://") and re.match(r"https?://", address):
        raise InputError.of(
            "RAY_ADDRESS", address, "the address of the job API", "on the cluster it is HOST:6379 or auto"
        )
    from infembed_ray.ray_cluster import connect

    connect()
    import_ray = importlib.import_module("ray")
    try:
        total = import_ray.cluster_resources()
        nodes = sum(node["Alive"] for node in import_ray.nodes())
        yield f"{address}: {nodes} nodes, {total.get('CPU', 0):g} CPUs, {total.get('GPU', 0):g} GPUs"
    finally:
        import_ray.shutdown()


def _limits() -> Finding:
    memory = psutil.virtual_memory()
    yield f"{os.cpu_count()} CPUs, {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB memory free"
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < USUAL_FILES:
        raise Doubt(f"{files} open files are allowed; Ray and many connections need more: ulimit -n {min(most, 65536)}")
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < LEAST_SHARED_MEMORY:
        raise Doubt(f"/dev/shm has {size / GIB:.2f} GiB, so Ray's objects go to disk: docker run --shm-size=2g ...")


def _disk() -> Finding:
    places = {scratch(), Path(os.environ.get("RAY_TMPDIR", "/tmp")), Path.cwd()}
    for place in sorted(places):
        existing = next(path for path in (place, *place.parents) if path.exists())
        free = shutil.disk_usage(existing).free / GIB
        if free < LEAST_DISK_GIB:
            raise InputError.of(str(place), None, f"{free:.2f} GiB free", "free some space, or use another disk")
        yield f"{place}: {free:.0f} GiB free"
        if free < USUAL_DISK_GIB:
            raise Doubt(f"{place}: {free:.1f} GiB free, which models and indexes may exceed")


def _port(port: int) -> Finding:
    from infembed_ray.serving.address import require_free_port

    require_free_port("127.0.0.1", port)
    yield f"{port} is free"


def _place(value: str) -> Finding:
    from infembed_ray.storage.steps import open_place, require_writable

    require_writable(open_place(value, "output"), "output")
    yield "can be written"


def _endpoint(url: str, key_env: str | None) -> Finding:
    from infembed_ray.llm.chat import RunFailure
    from infembed_ray.llm.endpoint import list_models

    if key_env and not os.environ.get(key_env):
        raise InputError(f"{key_env} is not set: export {key_env}=..., or --key-env '' for an endpoint without keys")
    try:
        models = list_models(Endpoint(base_url=url, api_key_env=key_env or None))
    except RunFailure as failure:
        raise InputError(str(failure)) from failure
    yield f"{url} answers" + (f", with {len(models)} models" if models is not None else "; it does not list its models")
