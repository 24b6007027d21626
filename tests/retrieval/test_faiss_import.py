"""Errors for a FAISS that is missing, installed twice or broken; a bare Python imports it from a prepared directory."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
REMEDIES = ("pip install 'infembed-ray[cpu]'", "pip install 'infembed-ray[gpu]'")
UNINSTALL = "pip uninstall -y faiss-cpu faiss-gpu, then "


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An empty directory of installed packages."""
    return tmp_path


def install(site: Path, distribution: str, module: str | None = None) -> None:
    """Write the metadata of a distribution, and optionally its module `faiss`."""
    metadata = site / f"{distribution.replace('-', '_')}-1.15.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {distribution}\nVersion: 1.15.1\n")
    if module is not None:
        (site / "faiss").mkdir()
        (site / "faiss" / "__init__.py").write_text(module)


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


@pytest.mark.parametrize("distribution", ["faiss-cpu", "faiss-gpu"])
def test_one_distribution_is_imported(site: Path, distribution: str) -> None:
    install(site, distribution, "__version__ = '1.15.1'")
    assert imported(site) == "1.15.1"


def test_a_build_without_metadata_is_imported(site: Path) -> None:
    (site / "faiss.py").write_text("__version__ = 'of conda'")
    assert imported(site) == "of conda"


def test_none_installed_names_both_remedies(site: Path) -> None:
    said = imported(site)
    assert said.startswith("FAISS is not installed; ")
    assert all(remedy in said for remedy in REMEDIES)
    assert "\n" not in said


def test_both_installed_are_refused(site: Path) -> None:
    install(site, "faiss-cpu", "__version__ = '1.15.1'")
    install(site, "faiss-gpu")
    said = imported(site)
    assert said.startswith(f"faiss-cpu and faiss-gpu are both installed and overwrite each other; {UNINSTALL}")
    assert all(remedy in said for remedy in REMEDIES)


def test_the_remains_of_uninstalling_one_of_both_are_refused(site: Path) -> None:
    (site / "faiss").mkdir()
    assert imported(site).startswith(f"FAISS is broken: only a directory without its files is left of it; {UNINSTALL}")


def test_missing_files_are_named(site: Path) -> None:
    install(site, "faiss-gpu", "raise ImportError('libcublas.so.12: cannot open shared object file\\nsee the log')")
    said = imported(site)
    assert said.startswith(
        f"FAISS cannot be imported (libcublas.so.12: cannot open shared object file see the log); {UNINSTALL}"
    )


def test_metadata_without_the_module_is_refused(site: Path) -> None:
    install(site, "faiss-cpu")
    assert imported(site).startswith(f"FAISS cannot be imported (No module named 'faiss'); {UNINSTALL}")


def test_only_verbs_that_need_faiss_are_refused(site: Path) -> None:
    """`infembed` with the packages of this environment, but a FAISS that does not import."""
    (site / "faiss.py").write_text("raise ModuleNotFoundError(\"No module named 'faiss'\", name='faiss')")

    def infembed(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(site)!r}]; from infembed_ray.cli.main import main; sys.exit(main())"
        return subprocess.run([sys.executable, "-c", program, *arguments], check=False, capture_output=True, text=True)

    assert infembed("--help").returncode == 0
    assert infembed("serve", "key", "team", str(site / "keys")).returncode == 0
    refused = infembed("index", "versions", str(site))
    assert refused.returncode == 2
    assert refused.stderr.startswith("infembed index versions: FAISS ")
    assert refused.stderr.count("\n") == 1
