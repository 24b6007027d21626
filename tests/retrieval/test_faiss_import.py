"""Errors for a FAISS that is missing, installed twice or broken; a bare Python imports it from a prepared directory."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def install(site: Path, distribution: str) -> None:
    """Write the metadata of a distribution."""
    metadata = site / f"{distribution.replace('-', '_')}-1.15.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {distribution}\nVersion: 1.15.1\n")


def imported(site: Path) -> str:
    """Import FAISS from this directory; returns its version, or the error's line."""
    program = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(site)!r}]
from infembed_ray.errors import InputError
try:
    from infembed_ray.retrieval.faiss_import import faiss
except InputError as error:
    print(error)
else:
    print(faiss.__version__)
"""
    bare = [sys.executable, "-I", "-S", "-c", program]  # without this environment's own packages
    return subprocess.run(bare, check=True, capture_output=True, text=True).stdout.removesuffix("\n")


@pytest.mark.parametrize(
    ("distributions", "module", "expected"),
    [
        (["faiss-cpu"], "__version__ = '1.15.1'", "1.15.1"),
        ([], "__version__ = 'of conda'", "of conda"),
        ([], None, "No module named 'faiss'"),
        (["faiss-cpu", "faiss-gpu"], "__version__ = '1.15.1'", "faiss-cpu and faiss-gpu are both installed"),
        (
            ["faiss-gpu"],
            "raise ImportError('libcublas.so.12: cannot open\\nsee the log')",
            "libcublas.so.12: cannot open see",
        ),
    ],
)
def test_faiss_is_imported_or_its_fault_is_named(
    tmp_path: Path, distributions: list[str], module: str | None, expected: str
) -> None:
    for distribution in distributions:
        install(tmp_path, distribution)
    if module is not None:
        (tmp_path / "faiss.py").write_text(module)
    said = imported(tmp_path)
    assert expected in said
    assert "\n" not in said
    if not expected[-1].isalnum() or " " in expected.removeprefix("of "):
        assert "pip install 'infembed-ray[cpu]'" in said


def test_the_remains_of_uninstalling_one_of_both_are_refused(tmp_path: Path) -> None:
    (tmp_path / "faiss").mkdir()
    assert "only a directory is left of it" in imported(tmp_path)
