from __future__ import annotations

from pathlib import Path

import pytest
from obstore.exceptions import GenericError

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.retrieval import corpus as corpora
from infembed_ray.retrieval.build import (
    Tasks,
    output_errors,
    partition_corpus,
    partition_part,
    prepare_engine,
    sort_shard,
    sort_shards,
)
from infembed_ray.retrieval.work import DuplicateId, Work, chunks_of
from infembed_ray.storage.object_store import SCRATCH, Folder
from tests.support.files import write_jsonl


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
    settings = IndexSettings(corpus="c", model="m", output="out", shards=1)
    work = Work(tmp_path / "work", 2, "float32")
    partition_part(settings, work, 0, [tmp_path / "0.jsonl"])  # the other part's rows lie on another node
    with pytest.raises(InputError, match=r"output=out: node .* does not see .*spool"):
        sort_shard(0, 2, settings, work, 10, None)
    assert not work.is_sorted(0)
    with pytest.raises(InputError, match=r"corpus=c: node .* does not see"):
        partition_part(settings, work, 1, [tmp_path / "1.jsonl"])


def test_a_corpus_in_an_object_store_is_partitioned_in_parts(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Folder.open(f"{bucket}/partitioned", "corpus")
    rows = [{"id": f"p{n}", "text": f"text {n}", "year": n} for n in range(100)]
    for number in range(5):
        corpus.upload(write_jsonl(tmp_path / "part.jsonl", rows[number::5]), f"deep/{number}.jsonl")
    corpus.write("README.md", "not data")
    corpus.write(".hidden.jsonl", "not data")
    settings = IndexSettings(corpus=corpus.uri, model="m", output="o", shards=2, metadata={"year": "integer"})
    monkeypatch.setattr(corpora, "PART_BYTES", 1)
    (tmp_path / "work").mkdir()
    work = Work(tmp_path / "work", 2, "float32")
    sizes = partition_corpus(corpus, settings, work, Tasks())
    assert work.sizes() == sizes
    sort_shards(corpus, sizes, settings, work, Tasks(), None)
    passages = [row for chunk in chunks_of(sizes) for row in work.passages(chunk).to_pylist()]
    assert sorted(passages, key=lambda row: row["year"]) == rows


def test_a_bad_row_of_a_corpus_in_an_object_store_is_named_by_its_uri(bucket: str, tmp_path: Path) -> None:
    corpus = Folder.open(f"{bucket}/bad-rows", "corpus")
    corpus.write("a.jsonl", '{"id": "a", "text": "x"}\n{"id": "b", "text": " "}\n')
    settings = IndexSettings(corpus=corpus.uri, model="m", output="o", shards=2)
    work = Work(tmp_path / "work", 2, "float32")
    with pytest.raises(InputError, match=rf"^corpus={corpus}/a.jsonl: row 2: column text"):
        partition_corpus(corpus, settings, work, Tasks())
    corpus.write("a.jsonl", '{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}\n')
    sizes = partition_corpus(corpus, settings, work, Tasks())
    with pytest.raises(DuplicateId, match="id a is a duplicate"):
        sort_shards(corpus, sizes, settings, work, Tasks(), None)
    assert work.sizes() is None


@pytest.mark.parametrize("given", [{"lexical": True}, {"memory_gib": 1}])
def test_an_external_engine_refuses_settings_of_shards(given: dict[str, object]) -> None:
    place = {"corpus": "c", "model": "m", "output": "milvus+http://127.0.0.1:1/docs"}
    with pytest.raises(InputError) as refused:
        prepare_engine(IndexSettings.from_mapping(place | given))
    assert {fault.setting for fault in refused.value.faults} == set(given)
