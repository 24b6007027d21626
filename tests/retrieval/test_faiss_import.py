"""Errors for a FAISS that is missing, installed twice or broken: modules and metadata in a prepared directory."""

import sys
from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.retrieval.faiss_import import load


@pytest.mark.parametrize(
    ("distributions", "module", "expected"),
    [
        ([], "raise ImportError('libcublas.so.12: cannot open\\nsee the log')", "libcublas.so.12: cannot open see"),
        ([], None, "only a directory is left of it"),  # a namespace package
        (["faiss-cpu", "faiss-gpu"], "", "faiss-cpu and faiss-gpu are both installed"),
    ],
)
def test_the_fault_of_faiss_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distributions: list[str], module: str | None, expected: str
) -> None:
    for name in distributions:
        metadata = tmp_path / f"{name.replace('-', '_')}-1.15.1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.15.1\n")
    (tmp_path / "faiss").mkdir()
    if module is not None:
        (tmp_path / "faiss" / "__init__.py").write_text(module)
    monkeypatch.delitem(sys.modules, "faiss")
    monkeypatch.syspath_prepend(tmp_path)
    if module is None:
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(InputError, match=expected) as refused:
        load()
    assert "\n" not in str(refused.value)
    assert "pip install 'faiss-cpu<2'" in str(refused.value)
    sys.modules.pop("faiss", None)
