"""The steps of a build: errors, partitions, sorted passages, and reused vectors against a dictionary of the older version."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.exceptions import GenericError

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.retrieval import build as module
from infembed_ray.retrieval import corpus as corpora
from infembed_ray.retrieval.build import (
    Base,
    Block,
    DuplicateId,
    Tasks,
    Work,
    block_rows,
    blocks_of,
    output_errors,
    partition_corpus,
    prepare_engine,
    sort_shards,
    work_directory,
)
from infembed_ray.retrieval.passages import schema
from infembed_ray.retrieval.shards import Build, shard_of
from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.places import Place, clear, listing, open_binary, read_json, write_json
from infembed_ray.storage.steps import Step
from tests.retrieval.vectors import unit_vectors
from tests.support.files import write_jsonl
from tests.support.shards import write_shard


def work_in(root: Place, shards: int = 1, **given: object) -> Work:
    """Work with vectors of two dimensions."""
    if isinstance(root, Path):
        root.mkdir()
    place = {"corpus": "c", "model": "m", "output": "out", "vectors": "float32", "metadata": {"year": "integer"}}
    return Work(root, 2, IndexSettings.from_mapping({**place, "shards": shards, **given}))


@pytest.mark.parametrize(
    "error", [TimeoutError("a task"), ConnectionError("no cluster"), ConnectionRefusedError(111, "x")]
)
@pytest.mark.parametrize("output", ["out", "s3://bucket/index"])
def test_errors_of_ray_are_not_of_the_output(error: Exception, output: str) -> None:
    with pytest.raises(type(error)), output_errors(output):
        raise error


@pytest.mark.parametrize(
    ("output", "error", "setting"),
    [
        ("out", OSError(28, "full"), "output"),
        ("out", PermissionError(13, "Permission denied"), "output"),
        ("out", FileNotFoundError(2, "missing", "out/spool"), "output"),
        ("SCRATCH/stores/docs", OSError(28, "full"), SCRATCH),
        ("s3://bucket/index", OSError("AWS Error NO_SUCH_KEY"), "output"),
        ("s3://bucket/index", GenericError("refused"), "output"),
        ("s3://bucket/index", OSError(28, "full"), SCRATCH),
    ],
)
def test_an_error_of_a_file_or_store_names_the_setting(
    output: str, error: Exception, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    with pytest.raises(InputError) as refused, output_errors(output.replace("SCRATCH", str(tmp_path))):
        raise error
    assert [fault.setting for fault in refused.value.faults] == [setting]


def test_rows_that_another_node_keeps_are_missed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "0.jsonl", [{"id": "p", "text": "x"}])
    work = work_in(tmp_path / "work")
    work.partition(0, [tmp_path / "0.jsonl"])  # the other part's rows lie on another node
    with pytest.raises(InputError, match=r"output=out: node .* does not see .*spool"):
        work.sort(0, 2, 10, None)
    assert work.counts(0) is None
    with pytest.raises(InputError, match=r"corpus=c: node .* does not see"):
        work.partition(1, [tmp_path / "1.jsonl"])


def test_a_corpus_in_an_object_store_is_partitioned_in_parts(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Folder.open(f"{bucket}/partitioned", "corpus")
    rows = [{"id": f"p{n}", "text": f"text {n}", "year": n} for n in range(100)]
    for number in range(5):
        corpus.upload(write_jsonl(tmp_path / "part.jsonl", rows[number::5]), f"deep/{number}.jsonl")
    corpus.write("README.md", "not data")
    corpus.write(".hidden.jsonl", "not data")
    monkeypatch.setattr(corpora, "PART_BYTES", 1)
    work = work_in(tmp_path / "work", 2)
    sizes, _ = partition_corpus(corpus, work, Tasks())
    assert read_json(work.root / module.SIZES_FILE)["sizes"] == sizes
    sort_shards(corpus, sizes, work, Tasks(), None)
    passages = [row for block in blocks_of(sizes) for row in work.passages(block).to_pylist()]
    assert sorted(passages, key=lambda row: row["year"]) == rows


def test_a_bad_row_is_named_by_its_uri_and_a_duplicate_id_is_refused_also_between_parts(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "PART_BYTES", 1)
    corpus = Folder.open(f"{bucket}/bad-rows", "corpus")
    corpus.write("a.jsonl", '{"id": "a", "text": "x"}\n{"id": "b", "text": " "}\n')
    work = work_in(tmp_path / "work", 2, metadata={})
    with pytest.raises(InputError, match=rf"^corpus={corpus}/a.jsonl: row 2: column text"):
        partition_corpus(corpus, work, Tasks())
    for name in ("a.jsonl", "b.jsonl"):
        corpus.write(name, '{"id": "a", "text": "x"}\n')
    sizes, _ = partition_corpus(corpus, work, Tasks())
    with pytest.raises(DuplicateId, match="several rows have the id a"):
        sort_shards(corpus, sizes, work, Tasks(), None)
    assert read_json(work.root / module.SIZES_FILE) is None


@pytest.mark.parametrize("given", [{"lexical": True}, {"memory_gib": 1}])
def test_an_external_engine_refuses_settings_of_shards(given: dict[str, object]) -> None:
    place = {"corpus": "c", "model": "m", "output": "milvus+http://127.0.0.1:1/docs"}
    with pytest.raises(InputError) as refused:
        prepare_engine(IndexSettings.from_mapping(place | given))
    assert {fault.setting for fault in refused.value.faults} == set(given)


@pytest.mark.parametrize("at_once", [1, 100])
def test_rows_in_any_order_are_sorted_by_id_in_their_shard(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", at_once)
    monkeypatch.setattr(module, "BLOCK_PASSAGES", 37)
    rows = [{"id": f"p{i}", "text": f"text {i} x" + "x" * (i % 300), "year": i} for i in range(300)]
    random.Random(0).shuffle(rows)
    files = [write_jsonl(tmp_path / f"{n}.jsonl", rows[n::3]) for n in range(3)]
    work, sizes = work_in(tmp_path / "work", 4), np.zeros(4, int)
    for part, own in enumerate((files[:2], files[2:])):
        counts, seen, _ = work.partition(part, own)
        assert seen == {"id", "text", "year"}
        sizes += counts
    for shard in range(4):
        work.sort(shard, 2, 37, None)
        own_blocks = [block for block in blocks_of(sizes.tolist()) if block.shard == shard]
        expected = sorted((r for r in rows if shard_of(r["id"], 4) == shard), key=lambda r: r["id"])
        assert [row for block in own_blocks for row in work.passages(block).to_pylist()] == expected


def fill(work: Work, corpus: Path, rows: int, base: Base | None = None) -> list[int]:
    """Partition and sort a corpus of two files, each read as a part; returns the passages of each shard."""
    corpus.mkdir(exist_ok=True)
    made = [{"id": f"p{i}", "text": f"text {i} " * (i % 5 + 1), "year": None if i % 3 else i} for i in range(rows)]
    sizes = np.zeros(work.settings.shards, int)
    for part in range(2):
        sizes += work.partition(part, [write_jsonl(corpus / f"{part}.jsonl", made[part::2])])[0]
    write_json(work.root / module.SIZES_FILE, {"sizes": sizes.tolist()})
    for shard in range(len(sizes)):
        work.sort(shard, 2, module.BLOCK_PASSAGES, base)
    clear(work.root / module.SPOOL)
    return sizes.tolist()


def test_blocks_cover_the_shards_and_grow_with_the_corpus() -> None:
    blocks = blocks_of([1300, 0, 2])
    assert blocks == [Block(0, 0, 0, 512), Block(0, 1, 512, 512), Block(0, 2, 1024, 276), Block(2, 0, 0, 2)]
    assert len({block.name for block in blocks}) == 4
    assert [block_rows([total]) for total in (0, 10**6, 16_384 * 10_000)] == [512, 512, 8192]


def test_a_deletion_that_is_interrupted_lets_the_next_build_begin_again(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    work = work_in(Folder.open(f"{bucket}/interrupted-deletion", "output"), 2)
    sizes = fill(work, tmp_path / "corpus", 25)
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
    assert read_json(work.root / module.SIZES_FILE) is None
    assert fill(work, tmp_path / "corpus", 25) == sizes
    work.delete()
    work.delete()  # as after a corpus without passages
    assert listing(work.root) == {}


def test_an_actor_reads_only_the_bytes_of_its_block_from_a_store(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_PASSAGES", 100)
    work = work_in(Folder.open(f"{bucket}/block", "output"), metadata={})
    rows = [{"id": f"{i:05d}", "text": "x" * 1000} for i in range(2000)]
    work.partition(0, [write_jsonl(tmp_path / "rows.jsonl", rows)])
    work.sort(0, 1, 100, None)
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

    monkeypatch.setattr(module.places, "open_binary", lambda place: pa.PythonFile(Counted(open_binary(place)), "r"))
    passages = work.passages(Block(0, 7, 700, 100))
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
            assert other.root != work.root
    with work_directory(*opened(factory="HNSW32"), 2) as again:
        assert again.root == work.root


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
