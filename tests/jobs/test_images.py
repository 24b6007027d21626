"""docker/Dockerfile: in agreement with the package. Building the images needs a network, so no test does it."""

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_variant_has_its_own_build_of_faiss_and_only_known_extras(project: dict) -> None:
    extras = {
        base: set(names.split(","))
        for base, names in re.findall(r"AS (base-\w+)\n(?:#.*\n)*ENV EXTRAS=(\S+)", DOCKERFILE)
    }
    assert {base: names & {"cpu", "gpu"} for base, names in extras.items()} == {
        "base-cpu": {"cpu"},
        "base-cuda": {"gpu"},
    }
    assert set().union(*extras.values()) <= project["optional-dependencies"].keys()


def test_the_final_image_runs_as_a_user_without_rights_and_without_pip(project: dict) -> None:
    final = DOCKERFILE[DOCKERFILE.index("AS final") :]
    assert re.findall(r"^USER (.*)$", final, re.MULTILINE) == ["1000:1000"]  # as in the pods' securityContext
    assert "--without-pip /opt/infembed" in DOCKERFILE
    assert "pip" not in final
    system = DOCKERFILE[DOCKERFILE.index("AS system") : DOCKERFILE.index("AS builder")]
    assert "python3-pip" not in system


def test_what_the_image_copies_is_in_the_context() -> None:
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    copied = {name for line in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
