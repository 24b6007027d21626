from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.retrieval import work as chunks
from infembed_ray.retrieval.passages import open_passages, schema
from infembed_ray.retrieval.pieces import Piece
from infembed_ray.retrieval.shard_files import PASSAGES_FILE, VECTORS_FILE
from infembed_ray.retrieval.spool import partition, sorted_passages
from infembed_ray.retrieval.work import Work, work_directory
from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.places import listing, open_binary
from infembed_ray.storage.steps import Step
from tests.support.files import write_jsonl


@pytest.fixture(params=["directory", "store"])
def work(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    if request.param == "directory":
        (tmp_path / "work").mkdir()
        return Work(tmp_path / "work")
    bucket = request.getfixturevalue("bucket")
    return Work(Folder.open(f"{bucket}/{tmp_path.name}/.work.encoded", "output"))


def fill(work: Work, corpus: Path, rows: int, shards: int) -> list[int]:
    """Partition and sort a corpus of `rows` passages with a nullable column, in two parts."""
    columns = [{"id": f"p{i}", "text": f"text {i} " * (i % 5 + 1), "year": None if i % 3 else i} for i in range(rows)]
    files = [write_jsonl(corpus / f"{n}.jsonl", columns[n::2]) for n in range(2)]
    sizes = np.zeros(shards, int)
    for part, file in enumerate(files):
        with work.spool(part) as spool:
            sizes += partition({part: Piece(file)}, {}, {"year": "integer"}, shards, spool)[0]
    work.set_sizes(sizes.tolist())
    for shard in range(shards):
        with work.spooled(shard) as spooled:
            tables = sorted_passages(spooled, {}, {"year": "integer"}, chunks.CHUNK_PASSAGES)
            work.write_sorted(shard, schema({"year": "integer"}), tables)
    work.drop_spool()
    return sizes.tolist()


def encode(work: Work, chunk: chunks.Chunk) -> None:
    passages = work.new_passages(chunk)
    assert len(passages) == chunk.new
    work.write_encoded(chunk, np.array([[int(id[1:]), 1] for id in passages.column("id").to_pylist()], np.float32))


def test_chunks_cover_the_shards_and_grow_with_the_corpus(tmp_path: Path) -> None:
    work = Work(tmp_path / "work")
    sizes = fill(work, tmp_path / "corpus", 1300, 1)
    found = [(chunk.shard, chunk.number, chunk.start, chunk.count, chunk.new) for chunk in work.chunks(sizes)]
    assert found == [(0, 0, 0, 512, 512), (0, 1, 512, 512, 512), (0, 2, 1024, 276, 276)]
    assert len({chunk.name for chunk in work.chunks(sizes)}) == 3
    assert [chunks.chunk_rows(total) for total in (0, 10**6, 16_384 * 10_000)] == [512, 512, 8192]


def test_passages_and_vectors_survive_for_the_shards(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_PASSAGES", 4)
    assert work.sizes() is None
    assert not work.is_sorted(0)
    sizes = fill(work, tmp_path / "corpus", 25, 2)
    assert work.sizes() == sizes
    assert all(map(work.is_sorted, range(2)))
    every = work.chunks(sizes)
    assert work.missing(every) == every
    for chunk in every[1:]:
        encode(work, chunk)
    assert work.missing(every) == every[:1]
    encode(work, every[0])
    assert work.missing(every) == []
    found = {}
    for shard in range(2):
        directory = tmp_path / f"shard-{shard}"
        directory.mkdir()
        work.gather(shard, [chunk for chunk in every if chunk.shard == shard], directory, 2, "float32")
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
    work = Work(Folder.open(f"{bucket}/interrupted-deletion", "output"))
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
    monkeypatch.setattr(chunks, "CHUNK_PASSAGES", 4)
    (tmp_path / "work").mkdir()
    written = []
    for number, root in enumerate((tmp_path / "work", Folder.open(f"{bucket}/same-files", "output"))):
        work = Work(root)
        every = work.chunks(fill(work, tmp_path / "corpus", 25, 1))
        for chunk in every:
            encode(work, chunk)
        directory = tmp_path / f"gathered-{number}"
        directory.mkdir()
        work.gather(0, every, directory, 2, "float32")
        written.append([(directory / name).read_bytes() for name in (PASSAGES_FILE, VECTORS_FILE)])
    assert written[0] == written[1]


def test_an_actor_reads_only_the_bytes_of_its_chunk_from_a_store(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, rows_at_once = 2000, 100
    work = Work(Folder.open(f"{bucket}/chunk", "output"))
    table = pa.table({"id": [f"{i:05d}" for i in range(rows)], "text": ["x" * 1000] * rows}, schema=schema({}))
    work.write_sorted(0, table.schema, (table.slice(start, rows_at_once) for start in range(0, rows, rows_at_once)))
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

    monkeypatch.setattr(chunks, "open_binary", lambda place: pa.PythonFile(Counted(open_binary(place)), "r"))
    found = work.new_passages(chunks.Chunk(0, 7, 7 * rows_at_once, rows_at_once, rows_at_once))
    assert found.column("id").to_pylist() == [f"{i:05d}" for i in range(700, 800)]
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

    with work_directory(*opened()) as work:
        with pytest.raises(InputError, match=r"has been writing this output since .*; wait for it"):
            work_directory(*opened(factory="HNSW32")).__enter__()
        with work_directory(*opened(shards=5)) as other:
            assert other != work
    with work_directory(*opened(factory="HNSW32")) as again:
        assert again == work
    assert work.choose_base("older") == "older"
    with work_directory(
        *opened(reuse=False)
    ) as fresh:  # an interrupted build with reuse has an older version's vectors
        assert fresh.choose_base(None) is None
