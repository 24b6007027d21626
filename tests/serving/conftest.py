"""A small index and the settings that serve it."""

import json
import os
import shutil
from pathlib import Path

import pytest

from infembed_ray.config.serving import ServeSettings
from tests.serving.indexes import PASSAGES, YEARS, publish_index
from tests.support.ports import free_port


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="session")
def minilm(minilm: str, root: Path) -> str:
    """MiniLM with a weight of exclusions."""
    shutil.copytree(minilm, root / "minilm", copy_function=os.symlink)
    (root / "minilm" / "infembed.json").write_text(json.dumps({"exclusion_weight": 0.4}))
    return str(root / "minilm")


@pytest.fixture(scope="session")
def index(root: Path, minilm: str) -> str:
    return str(publish_index(root / "one", minilm, PASSAGES, metadata=YEARS, types={"year": "integer"}))


@pytest.fixture(scope="session")
def settings(index: str) -> ServeSettings:
    return ServeSettings(
        index=index,
        port=free_port(),
        request_timeout_s=8,
        cpus_per_encoder=0.5,
        dtype="float32",
        wait=False,
    )
