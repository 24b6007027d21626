import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from infembed_ray.config.retrieval import CompactSettings
from infembed_ray.errors import InputError
from infembed_ray.retrieval.build import Tasks
from infembed_ray.retrieval.compaction import compact
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.shard_files import INDEX_FILE
from infembed_ray.retrieval.updates.write_ahead_log import ChangeLog, Delete, LogFault
from infembed_ray.retrieval.versions import finished, prune, use, verify, versions
from infembed_ray.storage.steps import LATEST, MANIFEST, resolve
from tests.retrieval.lineage import BASE, changes, check, first_step, fold_all, log_of, publish, segments
from tests.retrieval.oracle import Oracle
from tests.retrieval.test_index import write_index
from tests.retrieval.vectors import unit_vectors


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Three versions of a lineage, the last of them current."""
    for number, name in enumerate(("c1", "a2", "a3")):
        write_index(tmp_path / name, unit_vectors(10 + number, 4), 2, lineage="c1", folded=number)
    (tmp_path / LATEST).write_text("a3\n")
    for id in "xy":
        ChangeLog(tmp_path / "changes" / "c1", {}, 4, 2).append([Delete(id)])
    return tmp_path


def test_versions_are_listed_oldest_first(output: Path) -> None:
    (output / "other").mkdir()
    (output / "other" / MANIFEST).write_text(json.dumps({"stage": "train", "identity": "other", "created": ""}))
    (output / "web").mkdir()
    (output / "web" / MANIFEST).write_text('{"name": "a web application"}')
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
    shutil.copytree(output / "a2", output / "a2-copy")
    for version, current in (("a2", "a2"), ("a2-", "a2-copy")):  # an exact name wins over a prefix
        use(output, version)
        assert [v.id for v in versions(output) if v.current] == [current]


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


@pytest.mark.parametrize("damage", ["missing", "corrupted"])
def test_latest_never_points_at_a_version_whose_changes_are_damaged(output: Path, damage: str) -> None:
    segment = output / "changes" / "c1" / f"{1:012d}.arrow"
    segment.unlink() if damage == "missing" else segment.write_bytes(b"")
    with pytest.raises(InputError, match=rf"000000000001\.arrow is {damage}"):
        use(output, "c1")
    assert [v.id for v in versions(output) if v.current] == ["a3"]
    use(output, "a3")  # in which it is folded


@pytest.mark.integration
def test_pruning_deletes_changes_that_every_version_left_has_folded_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "index"
    names, oracle = [publish(output).name], Oracle(BASE)
    for seed in range(4):
        oracle.apply(changes(seed))
        log_of(output).append(changes(seed))
        names.append(fold_all(output))
    assert segments(output) == [1, 2, 3, 4]  # the first version reads all of them
    oracle.apply(changes(9))
    log_of(output).append(changes(9))
    names.append(fold_all(output, keep=3))
    assert [version.id for version in versions(output)] == names[-3:]
    assert segments(output) == [3, 4, 5]
    assert f"deleted version {names[0]} (keep_versions=3)" in capsys.readouterr().out
    for name in names[-3:]:  # each rolls back, and forward, to the same documents
        use(output, name)
        check(Index.open(output), oracle, 5)
    use(output, names[-3])
    log_of(output).append([Delete("d1")])
    oracle.apply([Delete("d1")])
    kept = [names[-3], fold_all(output, keep=2)]  # what it was made from stays
    assert {version.id for version in versions(output)} == {*kept, names[-1]}
    assert segments(output) == [3, 4, 5, 6]
    check(Index.open(output), oracle, 6)
    use(output, names[-1])
    shutil.copytree(output / kept[-1], output / "copy")
    done = finished(first_step(str(output)))  # a nightly build of the same corpus
    assert done is not None
    assert resolve(output) == done.path == output / kept[-1]
    check(Index.open(done.address), oracle, 6)
    shutil.rmtree(output / "copy")
    (output / kept[-1] / "shard-00000" / INDEX_FILE).unlink()
    done = finished(first_step(str(output)))
    assert done is not None
    assert done.path == output / names[-1]


@pytest.mark.integration
def test_changes_stay_while_a_version_cannot_be_read(tmp_path: Path) -> None:
    output = tmp_path / "index"
    publish(output)
    for seed in range(3):
        log_of(output).append(changes(seed))
        fold_all(output)
    oldest, *_ = versions(output)
    manifest = output / oldest.id / MANIFEST
    whole = manifest.read_text()
    manifest.write_text("damaged")
    prune(resolve(output))
    assert segments(output) == [1, 2, 3]
    manifest.write_text(whole)
    shutil.rmtree(output / oldest.id)
    prune(resolve(output))
    assert segments(output) == [1, 2, 3]  # the next version has folded in the first change, which marks the log's begin
    prune(resolve(output), keep=2)
    assert segments(output) == [2, 3]


def test_a_version_is_not_built_again_under_a_log_that_lacks_its_first_changes(tmp_path: Path) -> None:
    output = tmp_path / "index"
    publish(output)
    for seed in range(3):
        log_of(output).append(changes(seed))
        fold_all(output, keep=2)
    for version in versions(output):
        shutil.rmtree(output / version.id)
    with pytest.raises(LogFault, match=r"000000000001\.arrow is missing; .*if you deleted all versions of this log"):
        finished(first_step(str(output)))


def test_a_compaction_is_published_although_an_old_version_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_use(directory: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(directory))

    output = tmp_path / "index"
    first = publish(output)
    for seed in range(2):
        log_of(output).append(changes(seed))
        fold_all(output)
    log_of(output).append(changes(2))
    monkeypatch.setattr(shutil, "rmtree", in_use)
    last = compact(CompactSettings(index=str(output), keep_versions=2), Tasks()).path
    assert resolve(output) == last
    assert "old versions or changes stay until the next compaction: [Errno 39]" in capsys.readouterr().out
    assert first.name not in [version.id for version in versions(output)]  # a part of it may be gone
