from pathlib import Path

import pytest

from tests.support.files import write_jsonl
from tests.synthesis.runs import ROWS


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 seeds, all different."""
    return write_jsonl(tmp_path_factory.mktemp("seeds") / "seeds.jsonl", ROWS)
