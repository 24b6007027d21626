"""The wheel and the source distribution as pip builds them, and the requirements of their extras."""

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import Parser
from importlib import metadata as installed
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
LINUX = {"platform_system": "Linux", "sys_platform": "linux", "python_version": "3.12"}


def tracked(*places: str) -> set[str]:
    """Files of the checkout below these paths, without .pyc files."""
    files = (file for place in places for file in [ROOT / place, *(ROOT / place).rglob("*")] if file.is_file())
    return {str(file.relative_to(ROOT)) for file in files if file.suffix != ".pyc"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that pip builds from the source distribution; if it is complete, both are."""
    pytest.importorskip("hatchling", reason="the build backend; pip install hatchling")
    directory = tmp_path_factory.mktemp("dist")
    sdist = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", directory]
    subprocess.run(sdist, cwd=ROOT, check=True)
    (source,) = directory.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", directory]
    subprocess.run([*pip, source], check=True)
    (built,) = directory.glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.fixture(scope="session")
def requirements(wheel: zipfile.ZipFile) -> list[Requirement]:
    return [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist", [])]


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def required(requirements: Iterable[Requirement], extra: str) -> set[str]:
    """Names of the distributions that `infembed-ray[extra]` requires on Linux, including those of our own extras."""
    names: set[str] = set()
    for one in requirements:
        if one.marker and not one.marker.evaluate(LINUX | {"extra": extra}):
            continue
        if one.name == "infembed-ray":
            names = names.union(*(required(requirements, inner) for inner in one.extras))
        else:
            names.add(canonicalize_name(one.name))
    return names


def faiss(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.startswith("faiss")}


def test_two_extras_name_one_faiss_each(wheel: zipfile.ZipFile, requirements: list[Requirement]) -> None:
    extras = metadata(wheel).get_all("Provides-Extra", [])
    named = {extra: faiss(required(requirements, extra)) for extra in extras}
    assert {extra: names for extra, names in named.items() if names} == {"cpu": {"faiss-cpu"}, "gpu": {"faiss-gpu"}}
    assert faiss(required(requirements, "")) == set()
    versions = {name: str(pins()[name].specifier) for name in ("faiss-cpu", "faiss-gpu")}
    assert len(set(versions.values())) == 1  # CPU and GPU nodes read the same indexes


def pins() -> dict[str, Requirement]:
    lines = (
        line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    )
    return {canonicalize_name(one.name): one for one in map(Requirement, filter(None, lines))}


def test_what_users_install_is_pinned(requirements: list[Requirement]) -> None:
    extras = ("", "cpu", "gpu", "onnx", "aws", "milvus", "trackers", "mteb", "quickstart")
    assert set().union(*(required(requirements, extra) for extra in extras)) <= pins().keys()


def test_the_pages_name_the_oldest_torch_that_the_requirement_allows(requirements: list[Requirement]) -> None:
    (oldest,) = (bound.version for one in requirements if one.name == "torch" for bound in one.specifier)
    assert f"torch {oldest} or later" in (ROOT / "docs/start/install.md").read_text(encoding="utf-8")
    assert f"torch {oldest}, the oldest" in (ROOT / "docs/status.md").read_text(encoding="utf-8")


def test_what_the_package_imports_is_required(requirements: list[Requirement]) -> None:
    """Directly, not by way of another package; `grpc` comes with pymilvus, and `faiss` with one of two extras."""
    files = (ROOT / "infembed_ray").rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    modules = {name.partition(".")[0] for name in named} - sys.stdlib_module_names - {"infembed_ray", "faiss", "grpc"}
    owners = installed.packages_distributions()
    asked = set().union(*(required(requirements, extra) for extra in ("", "onnx", "milvus", "trackers", "mteb")))
    missing = {module for module in modules if not {canonicalize_name(n) for n in owners.get(module, [module])} & asked}
    assert missing == set()


def test_the_tests_run_with_the_pinned_versions() -> None:
    present = {canonicalize_name(found.metadata["Name"]): found.version for found in installed.distributions()}
    chosen = [pin for name, pin in pins().items() if name in present and (not pin.marker or pin.marker.evaluate())]
    assert len(chosen) > 40
    assert not [
        f"{pin}: {version}" for pin in chosen if (version := present[canonicalize_name(pin.name)]) not in pin.specifier
    ]


def test_the_wheel_contains_the_package_and_the_files_of_init(wheel: zipfile.ZipFile) -> None:
    shipped = {f"infembed_ray/files/{name}" for name in tracked("jobs", "cluster.yaml", "constraints.txt")}
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == tracked("infembed_ray") | shipped


def test_init_of_an_installed_wheel_writes_the_files_of_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    site, target = tmp_path / "site", tmp_path / "new" / "project"
    wheel.extractall(site)
    program = "import sys; from infembed_ray.cli.main import main; sys.exit(main(['init', *sys.argv[1:]]))"
    subprocess.run(
        [sys.executable, "-c", program, target], env=os.environ | {"PYTHONPATH": str(site)}, cwd=tmp_path, check=True
    )
    written = {str(file.relative_to(target)): file.read_bytes() for file in target.rglob("*") if file.is_file()}
    assert written == {name: (ROOT / name).read_bytes() for name in tracked("jobs", "cluster.yaml", "constraints.txt")}
