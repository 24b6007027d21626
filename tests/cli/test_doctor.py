"""Broken environments, each with the line that names the fault and its remedy. The faults are real: ports, files, servers."""

import os
import subprocess
from types import SimpleNamespace

import pytest

from infembed_ray.cli import doctor
from infembed_ray.cli.main import main
from tests.support.ports import free_port
from tests.support.stand_in_llm import stand_in


@pytest.fixture(autouse=True)
def usual(monkeypatch):
    """No variables of the machine that runs the tests, and no import of what another test checks."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


def of(check, capsys):
    """Run one check; return whether it holds, and its lines."""
    capsys.readouterr()
    holds = doctor._holds("x", check)
    return holds, capsys.readouterr().out.splitlines()


def fault(check, capsys):
    holds, lines = of(check, capsys)
    assert not holds
    assert lines[-1].startswith("FAIL  x: ")
    return lines[-1].removeprefix("FAIL  x: ")


def distribution(root, name, version):
    """Write the metadata of an installed distribution."""
    made = root / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A machine whose driver has a GPU, which this machine's torch and FAISS cannot use; its line."""
    if __import__("torch").cuda.is_available():
        pytest.skip("this machine's torch has a GPU")
    line = "NVIDIA A100-SXM4-40GB, 40960 MiB, 550.54.15"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{line}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return line


def test_a_whole_environment_has_no_fault(capsys, tmp_path):
    assert main(["doctor", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "everything works"
    assert {line.split()[0] for line in lines[:-2]} == {"ok"}


def test_an_unsupported_version_is_named_with_the_command(capsys, tmp_path, monkeypatch):
    distribution(tmp_path, "transformers", "4.57.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert fault(doctor._packages, capsys) == "transformers 4.57.0 is not supported: pip install 'transformers<6,>=5.0'"


def test_two_distributions_of_faiss_are_a_fault(capsys, tmp_path, monkeypatch):
    distribution(tmp_path, "faiss-cpu", "1.15.0")
    distribution(tmp_path, "faiss-gpu", "1.15.0")
    monkeypatch.syspath_prepend(tmp_path)
    said = fault(doctor._faiss, capsys)
    assert "both installed" in said
    assert "pip uninstall -y faiss-cpu faiss-gpu" in said


def test_a_gpu_that_torch_cannot_use_is_a_fault(capsys, gpu):
    assert fault(doctor._gpu, capsys).startswith(f"{gpu}, but torch ")
    holds, lines = of(doctor._faiss, capsys)
    assert holds
    if not hasattr(__import__("faiss"), "StandardGpuResources"):
        assert "for GPUs: pip uninstall -y faiss-cpu" in lines[-1]


@pytest.mark.parametrize("address", ["127.0.0.1", "http://127.0.0.1:8265"])
def test_an_address_where_no_cluster_answers_is_a_fault(address, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address if "/" in address else f"{address}:{free_port()}")
    assert "RAY_ADDRESS=" in fault(doctor._ray, capsys)


def test_token_mode_without_a_token_is_a_fault(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    _, _, remedy = fault(doctor._ray, capsys).partition("(a new one: ")
    subprocess.run(["bash", "-ec", remedy.partition("))")[0] + ")"], check=True)
    assert (tmp_path / "none").stat().st_mode & 0o77 == 0
    assert next(doctor._ray())


def test_an_output_that_cannot_be_written_is_a_fault(capsys, tmp_path):
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "out")
    assert main(["doctor", place]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"to mend: {place}"


@pytest.mark.parametrize(
    ("free", "total", "holds"), [(5, 100, 0), (9.9, 20, 0), (40, 1000, 0), (60, 1000, 1), (11, 12, 1)]
)
def test_little_free_space_is_a_fault(free, total, holds, capsys, monkeypatch, tmp_path):
    usage = SimpleNamespace(free=free * 2**30, total=total * 2**30)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    for check in (lambda: doctor._disk(tmp_path / "x"), lambda: doctor._place(str(tmp_path / "new" / "out"))):
        held, lines = of(check, capsys)
        assert held == bool(holds)
        assert f"{free:.1f} GiB free of {total}" in lines[-1]


def test_a_bucket_that_does_not_exist_is_a_fault(bucket, capsys):
    missing = bucket.replace("s3://", "s3://no-such-", 1)
    assert "output=" in fault(lambda: doctor._place(missing), capsys)
    assert of(lambda: doctor._place(bucket), capsys) == (True, ["ok    x: can be written"])


def test_an_endpoint_answers_or_is_a_fault_that_does_not_show_the_key(capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with stand_in() as server:
        assert of(lambda: doctor._endpoint(server.url), capsys)[0]
    said = fault(lambda: doctor._endpoint(f"http://127.0.0.1:{free_port()}/v1"), capsys)
    assert "cannot be reached" in said
    assert "sk-secret" not in said
