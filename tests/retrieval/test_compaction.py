import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.errors import InputError
from infembed_ray.retrieval import admin, shards, versions
from infembed_ray.retrieval.answers import ShardAnswer, ShardQuery
from infembed_ray.retrieval.build import Tasks
from infembed_ray.retrieval.compaction import Compaction
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.shard_files import verify
from infembed_ray.retrieval.shards import Shard
from infembed_ray.retrieval.updates.write_ahead_log import Delete, LogFault, Put
from infembed_ray.retrieval.versions import finished
from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.steps import LATEST, output_files, resolve
from tests.retrieval.lineage import BASE, QUERIES, changes, check, first_step, fold, log_of, publish
from tests.retrieval.oracle import Oracle, document, open_live, write_shards

SHARD_OPEN = Shard.open


class InterruptedAfter(Tasks):
    """Tasks of which some are done when the run is interrupted."""

    def __init__(self, done: int) -> None:
        super().__init__()
        self._done = done

    def run(self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], cpus: float = 1) -> Iterator[Any]:
        yield from super().run(function, list(calls)[: self._done])
        raise KeyboardInterrupt


@pytest.mark.integration
def test_the_next_version_equals_a_fresh_build(tmp_path: Path) -> None:
    output = tmp_path / "index"
    first = publish(output)
    oracle = Oracle(BASE)
    for seed in range(8):
        oracle.apply(changes(seed))
        log_of(output).append(changes(seed))
    check(Index.open(first), oracle, 8)
    second = fold(Compaction.open(str(output)))
    index = Index.open(output)
    assert index.path == second != first
    assert (index.facts.folded, index.facts.passages) == (8, len(oracle.states[8]))
    assert index.facts.lineage == Index.open(first).facts.lineage == first.name
    assert [live.changed for live in index._live] == [0, 0]
    check(index, oracle, 8)
    fresh = write_shards(tmp_path / "fresh", list(oracle.states[8].values()), 2)
    assert [shard.checksums for shard in index.facts.shards] == [shard.checksums for shard in fresh]
    assert sorted(path.name for path in second.iterdir()) == ["manifest.json", "shard-00000", "shard-00001"]


def test_the_next_version_has_words_if_the_base_has(tmp_path: Path) -> None:
    output = tmp_path / "index"
    first = publish(output, lexical=True)
    assert Index.describe(first).facts.lexical
    log_of(output).append([Put("new", "an aardvark", BASE[0].vector), Delete("d3")])
    second = fold(Compaction.open(str(output)))
    facts = Index.describe(second).facts
    live = open_live(second, facts.shards, Index.open(output).changes, facts.folded)
    query = ShardQuery(QUERIES[:1], 2, texts=["aardvark d3"], depth=2)
    by_words = []
    for shard in live:
        (answer,) = shard.search_many([query])
        assert isinstance(answer, ShardAnswer)
        assert answer.lexical is not None
        by_words += [hit.id for hit, score in zip(answer.hits[0], answer.lexical[0], strict=True) if score > 0]
    assert by_words == ["new"]
    for name in ("terms.arrow", "postings.npy"):
        file = second / "shard-00001" / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InputError, match=f"{name} is corrupted"):
            verify(second, facts.shards[1])
        file.write_bytes(content)


@pytest.mark.parametrize("precision", ["float16", "float32"])
@pytest.mark.parametrize("factory", ["Flat", "IVF2,SQ8"])
def test_compaction_keeps_the_precision_and_the_answers(tmp_path: Path, precision: str, factory: str) -> None:
    output = tmp_path / "index"
    publish(output, precision=precision, factory=factory, vectors=precision)
    log_of(output).append(changes(1, 30))
    live = Index.open(output)
    before = [{hit.id: hit.score for hit in hits} for hits in live.search(QUERIES, 100)]
    fold(Compaction.open(str(output)))
    index = Index.open(output)
    assert index.path != live.path
    assert index.facts.vectors == live.facts.vectors == precision
    for hits, expected in zip(index.search(QUERIES, 100), before, strict=True):
        assert {hit.id: hit.score for hit in hits} == pytest.approx(expected, abs=1e-6)


@pytest.mark.integration
def test_changes_during_compaction_and_roll_back_are_not_lost(
    tmp_path: Path,
) -> None:
    output = tmp_path / "index"
    first = publish(output)
    oracle, log = Oracle(BASE), log_of(output)
    applied = threading.Event()

    def write() -> None:
        for seed in range(60):
            oracle.apply(changes(seed, 3))
            log.append(changes(seed, 3))
            if seed == 10:
                applied.set()

    writer = threading.Thread(target=write)
    writer.start()
    applied.wait(60)
    work = Compaction.open(str(output))
    second = fold(work)
    writer.join()
    assert work.until > 10
    assert Index.open(output).facts.folded == work.until
    for version in (second, first):
        versions.use(output, version.name)
        check(Index.open(output), oracle, 60)
    oracle.apply(changes(99))  # made while the older version serves
    log.append(changes(99))
    third = fold(Compaction.open(str(second)))
    for version in (first, second, third):
        check(Index.open(version), oracle, 61)
    assert resolve(output) == third


def test_an_interrupted_compaction_resumes_with_the_missing_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "index"
    publish(output, shards=3)
    log_of(output).append(changes(1))
    work = Compaction.open(str(output))
    with pytest.raises(KeyboardInterrupt):
        work.run(work.step(), InterruptedAfter(2))
    assert (output / LATEST).read_text().strip() == work.version
    damaged = work.step().partial / "shard-00001" / shards.PASSAGES_FILE
    damaged.write_bytes(damaged.read_bytes()[:-1])  # the machine stopped before it was on the disk
    built: list[str] = []
    build_shard = shards.build_shard
    monkeypatch.setattr(
        "infembed_ray.retrieval.compaction.build_shard",
        lambda directory, build: (built.append(directory.name), build_shard(directory, build))[1],
    )
    fold(Compaction.open(str(output)))
    assert built == ["shard-00001", "shard-00002"]
    oracle = Oracle(BASE)
    oracle.apply(changes(1))
    check(Index.open(output), oracle, 1)


def test_the_same_changes_to_the_same_version_are_the_same_next_version(tmp_path: Path) -> None:
    identities = []
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        publish(tmp_path / name)
        log_of(tmp_path / name).append(changes(seed))
        identities.append(Compaction.open(str(tmp_path / name)).step().identity)
    assert identities[0] == identities[1] != identities[2]
    log_of(tmp_path / "one").append([Delete("d1")])
    assert Compaction.open(str(tmp_path / "one")).step().identity != identities[0]


def test_a_damaged_change_or_base_is_refused_and_the_last_good_version_stays(tmp_path: Path) -> None:
    output = tmp_path / "index"
    first = publish(output)
    log = log_of(output)
    for seed in range(3):
        log.append(changes(seed))
    segment = log.directory / f"{2:012d}.arrow"
    whole = segment.read_bytes()
    segment.write_bytes(whole[:100] + b"x" + whole[101:])
    with pytest.raises(LogFault, match=r"000000000002\.arrow is corrupted"):
        fold(Compaction.open(str(output)))
    segment.unlink()
    with pytest.raises(LogFault, match=r"000000000002\.arrow is missing"):
        Compaction.open(str(output))
    segment.write_bytes(whole)
    for name in (shards.INDEX_FILE, shards.PASSAGES_FILE):
        file = first / "shard-00001" / name
        content = file.read_bytes()
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(InputError, match=rf"shard-00001/{name} is corrupted"):
            fold(Compaction.open(str(output)))
        file.write_bytes(content)
    assert resolve(output) == first


def test_an_interrupted_compaction_begins_again_with_newer_changes(tmp_path: Path) -> None:
    output = tmp_path / "index"
    publish(output, [document(f"d{n}", n) for n in range(70)], shards=1, memory_gib=1e-6)
    log_of(output).append([Delete("d0")])
    with pytest.raises(InputError) as refused:
        fold(Compaction.open(str(output)))
    assert refused.value.faults[0].setting == "memory_gib"
    log_of(output).append([Delete("d1")])  # a smaller shard might fit
    assert Compaction.open(str(output)).until == 2


@pytest.mark.integration
def test_a_compaction_in_an_object_store_gives_the_same_bytes_and_rolls_back(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    local, uri = tmp_path / "index", f"{bucket}/{tmp_path.name}/index"
    first = publish(local)
    store = Folder.open(uri, "index")
    for file in output_files(first):
        store.upload(file, f"{first.name}/{file.relative_to(first).as_posix()}")
    store.write(LATEST, first.name)
    oracle = Oracle(BASE)
    for seed in range(3):
        oracle.apply(changes(seed))
        log_of(local).append(changes(seed))
        assert log_of(uri).append(changes(seed)) == seed + 1
    second = fold(Compaction.open(str(local)))

    work = Compaction.open(uri)
    assert work.changes == 3
    with pytest.raises(KeyboardInterrupt):
        work.run(work.step(), InterruptedAfter(1))
    work = Compaction.open(uri)
    opened: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Shard, "open", lambda root, facts: (opened.append(facts.name), SHARD_OPEN(root, facts))[1])
        work.run(work.step(), Tasks())
    assert opened == ["shard-00001"]
    index = Index.open(uri)
    assert index.version == second.name
    assert [shard.checksums for shard in index.facts.shards] == [
        shard.checksums for shard in Index.open(second).facts.shards
    ]
    assert {re.sub("-[0-9a-f]{8}/", "/", name) for name in index.path.entries()} == {
        "manifest.json",
        *(f.relative_to(second).as_posix() for f in second.glob("*/*")),
    }
    log_of(uri).append([Delete("d1")])
    oracle.apply([Delete("d1")])
    check(index, oracle, 4)

    for name in (first.name, second.name):
        versions.use(uri, name)
        assert [(v.id, v.current) for v in versions.versions(uri)] == [
            (first.name, name == first.name),
            (second.name, name == second.name),
        ]
        check(Index.open(uri), oracle, 4)
    assert versions.verify(uri) == Index.open(second).facts.bytes
    store.upload(tmp_path / "index" / LATEST, f"{first.name}/shard-00001/passages.arrow")
    with pytest.raises(InputError, match=r"shard-00001/passages.arrow is corrupted.*delete .*/manifest\.json\)"):
        versions.use(uri, first.name)
    assert admin.run("verify", uri) is None
    assert f"index verify: {store / second.name}: whole" in capsys.readouterr().out
    versions.prune(store / second.name, keep=1)
    assert [v.id for v in versions.versions(uri)] == [second.name]
    assert not any(name.startswith(f"{first.name}/") for name in store.entries())
    assert sorted((store / "changes" / first.name).entries()) == [f"{sequence:012d}.arrow" for sequence in (3, 4)]
    check(Index.open(uri), oracle, 4)
    done = finished(first_step(uri))  # a nightly build of the same corpus
    assert done is not None
    assert done.address == (store / second.name).uri
