from pathlib import Path

import pytest

from infembed_ray.cli.main import main
from infembed_ray.retrieval.compaction import Compaction
from infembed_ray.retrieval.updates.write_ahead_log import Delete
from infembed_ray.storage.steps import resolve
from tests.retrieval.test_compaction import fold, log_of, publish


def test_versions_are_listed_used_and_verified_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "index"
    first = publish(output)
    log_of(output).append([Delete("d1")])
    second = fold(Compaction.open(str(output)))

    capsys.readouterr()
    assert main(["index", "versions", str(output)]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["version", "created", "passages"]
    assert {row.split()[0]: row.split()[-1] for row in rows} == {first.name: first.name, "latest": first.name}
    assert second.name in next(row for row in rows if row.startswith("latest"))

    assert main(["index", "use", str(output), first.name[:6]]) == 0
    assert resolve(output) == first
    assert str(first) in capsys.readouterr().out
    assert main(["index", "verify", str(output)]) == 0
    assert "1 segment of changes since" in capsys.readouterr().out
    assert main(["index", "use", str(output), "none"]) == 2
    assert "infembed index use: version=none: no such version" in capsys.readouterr().err
