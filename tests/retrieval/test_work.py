"""Partitions, sorted passages, and reused vectors against a dictionary of the older version."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.retrieval import work as module
from infembed_ray.retrieval.passages import open_passages, schema
from infembed_ray.retrieval.shard_files import PASSAGES_FILE, VECTORS_FILE
from infembed_ray.retrieval.shards import Build, shard_of
from infembed_ray.retrieval.work import (
    Base,
    Chunk,
    DuplicateId,
    Work,
    chunk_rows,
    chunks_of,
    partition,
    sorted_passages,
    work_directory,
)
from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.places import listing, open_binary
from infembed_ray.storage.steps import Step
from tests.retrieval.vectors import unit_vectors
from tests.support.files import write_jsonl
from tests.support.shards import write_shard


@pytest.mark.parametrize("rows_at_once", [1, 100, 8192])
def test_rows_in_any_order_are_sorted_by_id_in_their_shard(
    tmp_path: Path, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", rows_at_once)
    rows: list[dict[str, Any]] = [
        {"id": f"p{i}", "text": f"text {i} " + "x" * (i % 300), "year": i} for i in range(300)
    ]
    random.Random(0).shuffle(rows)
    files = [write_jsonl(tmp_path / f"{n}.jsonl", rows[n::3]) for n in range(3)]
    parts = [tmp_path / "part-0", tmp_path / "part-1"]
    sizes = np.zeros(4, int)
    for part, own in zip(parts, (files[:2], files[2:]), strict=True):
        counts, seen = partition(own, {}, {"year": "integer"}, 4, part)
        assert seen == {"id", "text", "year"}
        sizes += counts
    for shard in range(4):
        tables = list(sorted_passages([part / f"{shard:05d}.arrow" for part in parts], 37))
        assert all(len(table) == 37 for table in tables[:-1])
        assert sum(map(len, tables)) == sizes[shard]
        expected = sorted((r for r in rows if shard_of(r["id"], 4) == shard), key=lambda r: r["id"])
        assert [row for table in tables for row in table.to_pylist()] == expected


def test_a_duplicate_id_is_refused_also_between_parts(tmp_path: Path) -> None:
    for part in range(2):
        file = write_jsonl(tmp_path / f"{part}.jsonl", [{"id": f"p{n}", "text": "x"} for n in range(part, 10)])
        partition([file], {}, {}, 1, tmp_path / f"part-{part}")
    with pytest.raises(DuplicateId, match="id p1 is a duplicate"):
        list(sorted_passages([tmp_path / f"part-{part}" / "00000.arrow" for part in range(2)], 3))


@pytest.fixture(params=["directory", "store"])
def work(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    if request.param == "directory":
        (tmp_path / "work").mkdir()
        return Work(tmp_path / "work", 2, "float32")
    bucket = request.getfixturevalue("bucket")
    return Work(Folder.open(f"{bucket}/{tmp_path.name}/.work.encoded", "output"), 2, "float32")


def fill(work: Work, corpus: Path, rows: int, shards: int, base: Base | None = None) -> list[int]:
    """Partition and sort a corpus of two files, each read as a part; returns the passages of each shard."""
    corpus.mkdir(exist_ok=True)
    made = [{"id": f"p{i}", "text": f"text {i} " * (i % 5 + 1), "year": None if i % 3 else i} for i in range(rows)]
    sizes = np.zeros(shards, int)
    for part in range(2):
        file = write_jsonl(corpus / f"{part}.jsonl", made[part::2])
        with work.spool(part) as spool:
            sizes += partition([file], {}, {"year": "integer"}, shards, spool)[0]
    work.set_sizes(sizes.tolist())
    for shard in range(shards):
        with work.spooled(shard) as spooled:
            tables = sorted_passages(spooled, module.CHUNK_PASSAGES)
            work.write_sorted(shard, schema({"year": "integer"}), tables, base)
    work.drop_spool()
    return sizes.tolist()


def encode(work: Work, chunk: Chunk) -> None:
    ids = work.passages(chunk).column("id").to_pylist()
    assert len(ids) == chunk.count
    vectors = work.reused(chunk)
    new = np.isnan(vectors[:, 0])
    vectors[new] = np.array([[int(id[1:]), 1] for id in ids], np.float32)[new]
    work.write_encoded(chunk, vectors, int(new.sum()))


def test_chunks_cover_the_shards_and_grow_with_the_corpus() -> None:
    chunks = chunks_of([1300, 0, 2])
    assert chunks == [Chunk(0, 0, 0, 512), Chunk(0, 1, 512, 512), Chunk(0, 2, 1024, 276), Chunk(2, 0, 0, 2)]
    assert len({chunk.name for chunk in chunks}) == 4
    assert [chunk_rows([total]) for total in (0, 10**6, 16_384 * 10_000)] == [512, 512, 8192]


def test_passages_and_vectors_survive_for_the_shards(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_PASSAGES", 4)
    assert work.sizes() is None
    assert not work.is_sorted(0)
    sizes = fill(work, tmp_path / "corpus", 25, 2)
    assert work.sizes() == sizes
    assert all(map(work.is_sorted, range(2)))
    every = chunks_of(sizes)
    for chunk in every[1:]:
        encode(work, chunk)
    assert work.encoded() == {chunk.name: chunk.count for chunk in every[1:]}
    encode(work, every[0])
    found = {}
    for shard in range(2):
        directory = tmp_path / f"shard-{shard}"
        directory.mkdir()
        work.gather(shard, {chunk: chunk.count for chunk in every if chunk.shard == shard}, directory)
        passages = open_passages(directory / PASSAGES_FILE)
        assert passages.column("id").to_pylist() == sorted(passages.column("id").to_pylist())
        vectors = np.load(directory / VECTORS_FILE)
        found |= dict(zip(passages.column("id").to_pylist(), vectors[:, 0].tolist(), strict=True))
    assert found == {f"p{i}": i for i in range(25)}
    work.delete()
    assert work.sizes() is None
    assert not list((tmp_path / "scratch").glob("*"))


def test_a_deletion_that_is_interrupted_lets_the_next_build_begin_again(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    work = Work(Folder.open(f"{bucket}/interrupted-deletion", "output"), 2, "float32")
    sizes = fill(work, tmp_path / "corpus", 25, 2)
    deleted, delete = [], Folder.delete

    def interrupted(self: Folder, name: str) -> None:
        if deleted:
            raise KeyboardInterrupt
        deleted.append(name)
        delete(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "delete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            work.delete()
    assert work.sizes() is None
    assert fill(work, tmp_path / "corpus", 25, 2) == sizes
    work.delete()
    work.delete()  # as after a corpus without passages
    assert listing(work.root) == {}


def test_a_store_and_a_directory_give_the_same_files(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_PASSAGES", 4)
    (tmp_path / "work").mkdir()
    written = []
    for number, root in enumerate((tmp_path / "work", Folder.open(f"{bucket}/same-files", "output"))):
        work = Work(root, 2, "float32")
        every = chunks_of(fill(work, tmp_path / "corpus", 25, 1))
        for chunk in every:
            encode(work, chunk)
        directory = tmp_path / f"gathered-{number}"
        directory.mkdir()
        work.gather(0, {chunk: chunk.count for chunk in every}, directory)
        written.append([(directory / name).read_bytes() for name in (PASSAGES_FILE, VECTORS_FILE)])
    assert written[0] == written[1]


def test_an_actor_reads_only_the_bytes_of_its_chunk_from_a_store(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, rows_at_once = 2000, 100
    work = Work(Folder.open(f"{bucket}/chunk", "output"), 2, "float32")
    table = pa.table({"id": [f"{i:05d}" for i in range(rows)], "text": ["x" * 1000] * rows}, schema=schema({}))
    work.write_sorted(
        0, table.schema, (table.slice(start, rows_at_once) for start in range(0, rows, rows_at_once)), None
    )
    read: list[int] = []

    class Counted:
        def __init__(self, file: pa.NativeFile) -> None:
            self._file = file
            self.closed = False
            self.seek, self.tell, self.close = file.seek, file.tell, file.close

        def read(self, count: int) -> bytes:
            content: bytes = self._file.read(count)
            read.append(len(content))
            return content

    monkeypatch.setattr(module, "open_binary", lambda place: pa.PythonFile(Counted(open_binary(place)), "r"))
    passages = work.passages(Chunk(0, 7, 7 * rows_at_once, rows_at_once))
    assert passages.column("id").to_pylist() == [f"{i:05d}" for i in range(700, 800)]
    assert 100_000 < sum(read) < 200_000


@pytest.mark.parametrize("store", [False, True])
def test_builds_of_the_same_vectors_share_it_one_at_a_time(
    tmp_path: Path, bucket: str, store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    monkeypatch.setattr("infembed_ray.storage.leases.SECONDS", 2.0)
    output = f"{bucket}/shared-work" if store else str(tmp_path / "index")

    def opened(**changes: object) -> tuple[Step, IndexSettings]:
        values = {"corpus": "c", "model": "m", "output": output, **changes}
        settings = IndexSettings.from_mapping(values)
        return Step("index", settings, settings.output, {}, {"corpus": "c"}), settings

    with work_directory(*opened(), 2) as work:
        with pytest.raises(InputError, match=r"has been writing this output since .*; wait for it"):
            work_directory(*opened(factory="HNSW32"), 2).__enter__()
        with work_directory(*opened(shards=5), 2) as other:
            assert other != work
    with work_directory(*opened(factory="HNSW32"), 2) as again:
        assert again == work


PASSAGES = st.dictionaries(st.text("ab\u00e9", max_size=3), st.sampled_from(["x", "y", "z" * 50]), max_size=30)


def write(
    root: Path, texts: dict[str, str], shards: int, factory: str | None = None
) -> tuple[Base, dict[str, np.ndarray]]:
    """A version with these passages; returns it and the vector of each id."""
    ids = list(texts)
    vectors = dict(zip(ids, unit_vectors(len(ids), 8).astype(np.float16), strict=True))
    facts = []
    for number in range(shards):
        own = [id for id in ids if shard_of(id, shards) == number]
        block = np.array([vectors[id] for id in own], np.float16).reshape(-1, 8)
        directory = root / f"shard-{number:05d}"
        facts.append(write_shard(directory, own, [texts[id] for id in own], block, build=Build(factory)))
    return Base(root, tuple(facts)), vectors


def table(texts: dict[str, str]) -> pa.Table:
    """Passages by id ascending."""
    ids = sorted(texts, key=str.encode)
    return pa.table({"id": ids, "text": [texts[id] for id in ids]}, schema({}))


@settings(max_examples=40, deadline=None)
@given(old=PASSAGES, new=PASSAGES.filter(bool), shards=st.integers(1, 4))
def test_passages_with_their_id_and_text_have_their_vector(
    tmp_path_factory: pytest.TempPathFactory, old: dict[str, str], new: dict[str, str], shards: int
) -> None:
    base, vectors = write(tmp_path_factory.mktemp("base"), old, shards)
    expected = [
        vectors[id].astype(np.float32) if old.get(id) == new[id] else np.full(8, np.nan)
        for id in sorted(new, key=str.encode)
    ]
    np.testing.assert_array_equal(base.vectors(table(new), 8), expected)


def test_vectors_of_a_lossy_type_are_the_originals(tmp_path: Path) -> None:
    texts = {f"p{n}": "x" for n in range(300)}
    base, vectors = write(tmp_path, texts, 2, "IVF2,SQ8")
    np.testing.assert_array_equal(base.vectors(table(texts), 8), [vectors[id] for id in sorted(texts)])


def test_nothing_of_a_damaged_shard_is_reused(tmp_path: Path) -> None:
    texts = {f"p{n}": "x" for n in range(20)}
    base, _ = write(tmp_path, texts, 2)
    file = tmp_path / "shard-00001" / "index.faiss"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    new = np.isnan(base.vectors(table(texts), 8)).all(axis=1)
    assert new.tolist() == [shard_of(id, 2) == 1 for id in sorted(texts)]


def test_only_new_passages_of_a_chunk_are_encoded(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_PASSAGES", 4)

    class Even(Base):
        def vectors(self, passages: pa.Table, dimension: int) -> np.ndarray:
            numbers = np.array([int(id[1:]) for id in passages.column("id").to_pylist()], np.float32)
            return np.where(numbers % 2, np.nan, -numbers)[:, None].repeat(dimension, 1)

    every = chunks_of(fill(work, tmp_path / "corpus", 25, 1, Even(tmp_path, ())))
    for chunk in every:
        encode(work, chunk)
    assert sum(work.encoded().values()) == 12
    first = np.concatenate([work.vectors(chunk, work.encoded()[chunk.name])[:, 0] for chunk in every]).tolist()
    numbers = [int(id[1:]) for chunk in every for id in work.passages(chunk).column("id").to_pylist()]
    assert first == [number if number % 2 else -number for number in numbers]
