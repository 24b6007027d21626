from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.updates.write_ahead_log import ChangeLog, Delete
from infembed_ray.retrieval.versions import use, verify, versions
from infembed_ray.storage import LATEST, MANIFEST
from tests.retrieval.test_index import write_index
from tests.retrieval.vectors import unit_vectors


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Three versions of a lineage, the last of them current."""
    for number, name in enumerate(("c1", "a2", "a3")):
        write_index(tmp_path / name, unit_vectors(10 + number, 4), 2, lineage="c1", folded=number)
    (tmp_path / LATEST).write_text("a3\n")
    for id in "xy":
        ChangeLog(tmp_path / "changes" / "c1", {}, 4).append([Delete(id)])
    return tmp_path


def test_versions_are_listed_oldest_first(output: Path) -> None:
    (output / "other").mkdir()
    (output / "other" / MANIFEST).write_text(json.dumps({"stage": "train", "identity": "other", "created": ""}))
    write_index(output / ".b4.partial", unit_vectors(10, 4), 2)
    listed = versions(output)
    assert [
        (v.id, v.facts.passages, v.facts.folded, v.facts.lineage, v.facts.recall_at_10, v.current) for v in listed
    ] == [
        ("c1", 10, 0, "c1", 1.0, False),
        ("a2", 11, 1, "c1", 1.0, False),
        ("a3", 12, 2, "c1", 1.0, True),
    ]
    assert [v.facts.bytes for v in listed] == [verify(output / v.id) for v in listed]


def test_the_pointer_goes_back_and_forth(output: Path) -> None:
    for version in ("c1", "a2", "c1", "a3"):
        use(output, version)
        assert Index.open(output).version == version
        assert [v.id for v in versions(output) if v.current] == [version]
    use(output, "c")
    assert Index.open(output).version == "c1"
    assert sorted(os.listdir(output)) == ["a2", "a3", "c1", "changes", LATEST]


def test_an_unknown_or_ambiguous_version_is_refused_with_the_valid_ones(output: Path) -> None:
    for version, message in (
        ("b", "no such version in .*; it has c1, a2, a3"),
        ("a", "several versions begin with it .* a2, a3"),
        ("", "no such"),
    ):
        with pytest.raises(InputError, match=f"^version={version}: {message}"):
            use(output, version)
    assert (output / LATEST).read_text() == "a3\n"
    with pytest.raises(InputError, match="index=nowhere: no such directory"):
        versions("nowhere")


@pytest.mark.parametrize("damage", ["corrupted", "missing"])
def test_latest_never_points_at_a_damaged_version(output: Path, damage: str) -> None:
    file = output / "a2" / "shard-00001" / "index.faiss"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for refused in (lambda: use(output, "a2"), lambda: verify(output / "a2")):
        with pytest.raises(InputError, match=f"shard-00001/index.faiss is {damage}"):
            refused()
    assert Index.open(output).version == "a3"
    assert verify(output) == verify(output / "a3") > 0


@pytest.mark.parametrize("damage", ["truncated", "a field more", "no shards", "a list"])
def test_a_damaged_manifest_is_reported_and_other_versions_work(
    output: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = output / "a3" / MANIFEST
    manifest = json.loads(file.read_text())
    if damage == "a field more":
        manifest["index"]["shards"][0]["new"] = 1
    elif damage == "no shards":
        del manifest["index"]["shards"]
    elif damage == "a list":
        manifest = []
    file.write_text(file.read_text()[:50] if damage == "truncated" else json.dumps(manifest))
    with pytest.raises(InputError, match=f"index={output / 'a3'}: manifest.json ") as refusal:
        verify(output)
    assert "\n" not in str(refusal.value)
    assert [version.id for version in versions(output)] == ["c1", "a2"]
    assert f"left out: {refusal.value}" in capsys.readouterr().out
    use(output, "a2")
    assert Index.open(output).version == "a2"


def test_an_exact_name_wins_over_a_prefix(output: Path) -> None:
    shutil.copytree(output / "a2", output / "a2-copy")
    use(output, "a2")
    assert [v.id for v in versions(output) if v.current] == ["a2"]
    use(output, "a2-")
    assert [v.id for v in versions(output) if v.current] == ["a2-copy"]


def test_latest_never_points_at_a_version_with_missing_changes(output: Path) -> None:
    (output / "changes" / "c1" / f"{1:012d}.arrow").unlink()
    with pytest.raises(InputError, match=r"000000000001\.arrow is missing"):
        use(output, "c1")
    assert [v.id for v in versions(output) if v.current] == ["a3"]
    use(output, "a3")  # in which it is folded
