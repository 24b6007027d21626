"""What tests of tasks share: a scratch directory of their own for the corpora."""

from pathlib import Path

import pytest

from infembed_ray.storage.object_store import SCRATCH


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    return tmp_path / "scratch"
