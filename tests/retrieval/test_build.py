from __future__ import annotations

from pathlib import Path

import pytest
from obstore.exceptions import GenericError

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.retrieval import pieces
from infembed_ray.retrieval.build import output_errors, partition_here, partition_part, sort_shard
from infembed_ray.retrieval.corpus import BadRow
from infembed_ray.retrieval.pieces import Piece, parts_of
from infembed_ray.retrieval.preflight import prepare_engine
from infembed_ray.retrieval.work import Work
from infembed_ray.storage.object_store import Folder
from tests.support.files import write_jsonl


def test_only_file_system_errors_name_the_output() -> None:
    for error in (
        TimeoutError("a task took long"),
        ConnectionError("no cluster"),
        ConnectionRefusedError(111, "refused"),
    ):
        with pytest.raises(type(error)), output_errors("out"):
            raise error
    with pytest.raises(InputError, match=r"output=out: cannot be written \(No space"), output_errors("out"):
        raise OSError(28, "full")
    with (
        pytest.raises(InputError, match=r"work=out: cannot be written \(Permission.*; correct that and run"),
        output_errors("out", "work"),
    ):
        raise PermissionError(13, "Permission denied")
    uri = "s3://bucket/index"
    for error in (OSError("AWS Error NO_SUCH_KEY"), FileNotFoundError("Path does not exist"), GenericError("refused")):
        with pytest.raises(InputError, match=rf"output={uri}: the object store failed \({error}\)"), output_errors(uri):
            raise error
    with pytest.raises(InputError, match=r"INFEMBED_SCRATCH=/.*: cannot be written \(No space"), output_errors(uri):
        raise OSError(28, "full")
    with pytest.raises(TimeoutError), output_errors(uri):
        raise TimeoutError("a task took long")


def test_rows_that_another_node_keeps_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PART_BYTES", 1)
    for number in range(2):
        write_jsonl(tmp_path / "corpus" / f"{number}.jsonl", [{"id": f"p{number}", "text": "x"}])
    settings, work = IndexSettings(corpus="c", model="m", output="out", shards=1), Work(tmp_path / "work")
    parts = parts_of(tmp_path / "corpus")
    partition_part(settings, work, 0, parts[0])  # the other part's rows lie on another node
    with (
        pytest.raises(
            InputError, match=r"output=out: node .* does not see .*spool, .*give a directory that all nodes share"
        ),
        output_errors("out"),
    ):
        sort_shard(0, parts, settings, work, 10)
    assert not work.is_sorted(0)


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
    monkeypatch.setattr(pieces, "PART_BYTES", 1 << 20)  # the least that a file counts
    parts = parts_of(corpus)
    assert parts == [{number: Piece(corpus / f"deep/{number}.jsonl", 0, None)} for number in range(5)]
    (tmp_path / "work").mkdir()
    work = Work(tmp_path / "work")
    sizes = partition_here(corpus, settings, work)
    for shard in range(2):
        sort_shard(shard, parts, settings, work, 512)
    found = [work.new_passages(chunk).to_pylist() for chunk in work.chunks(sizes)]
    assert sorted((row for rows in found for row in rows), key=lambda row: row["year"]) == rows


def test_a_bad_row_of_a_corpus_in_an_object_store_is_named_by_its_uri(bucket: str, tmp_path: Path) -> None:
    corpus = Folder.open(f"{bucket}/bad-rows", "corpus")
    corpus.write("a.jsonl", '{"id": "a", "text": "x"}\n{"id": "b", "text": " "}\n')
    settings = IndexSettings(corpus=corpus.uri, model="m", output="o", shards=2)
    work = Work(tmp_path)
    file = corpus / "a.jsonl"
    with pytest.raises(BadRow, match=rf"^corpus={file}: row 2: column text is empty"):
        partition_part(settings, work, 0, {0: Piece(file)})
    corpus.write("a.jsonl", '{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}\n')
    with pytest.raises(BadRow, match=rf"^corpus={corpus}/a.jsonl: row 2: id a is a duplicate"):
        partition_part(settings, work, 0, {0: Piece(file)})
        for shard in range(2):
            sort_shard(shard, [{0: Piece(file)}], settings, work, 512)


def test_an_external_engine_takes_no_lexical_index() -> None:
    given = {"corpus": "c", "model": "m", "output": "milvus+http://127.0.0.1:1/docs", "lexical": True}
    with pytest.raises(InputError, match="lexical=true: an external engine"):
        prepare_engine(IndexSettings.from_mapping(given))


def test_an_index_without_words_has_the_identity_that_it_had_before_there_was_the_setting() -> None:
    given = {"corpus": "c", "model": "m", "output": "o"}
    assert "lexical" not in IndexSettings.from_mapping(given).identity()
    assert IndexSettings.from_mapping(given | {"lexical": True}).identity()["lexical"] is True
