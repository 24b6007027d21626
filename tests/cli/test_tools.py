"""`infembed init` from a checkout; tests/test_packaging.py runs it from a wheel."""

from pathlib import Path

import pytest

from infembed_ray.cli.main import main
from infembed_ray.config.verbs import VERBS


def test_every_settings_file_that_init_writes_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"init: wrote jobs, cluster.yaml, constraints.txt to {tmp_path}\n"
    for verb, entry in VERBS.items():
        entry.settings.load(str(tmp_path / "jobs" / "configs" / f"{verb}.yaml"))
        assert (tmp_path / "jobs" / f"{verb}.py").is_file()


def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.yaml").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert str(tmp_path / "cluster.yaml") in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.yaml"]
    assert (tmp_path / "cluster.yaml").read_text() == "mine"


def test_a_directory_that_cannot_be_created_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["init", str(tmp_path / "file" / "below")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"infembed init: {tmp_path / 'file' / 'below'}: cannot be written (Not a directory)")
