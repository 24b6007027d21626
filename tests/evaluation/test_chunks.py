import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation import chunks
from infembed_ray.evaluation.chunks import of_pairs, of_passages, of_queries, share, shared
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.evaluation.tasks.task import CORPUS, Query
from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.places import read_binary


def corpus(count, batch):
    ids, texts = [f"d{n}" for n in range(count)], [f"text {n}" for n in range(count)]
    table = pa.table({"id": ids, "text": texts}, schema=CORPUS)
    return pa.concat_tables([table.slice(start, batch) for start in range(0, count, batch)])


class Lengths:
    """An encoder and reranker whose numbers reveal its inputs."""

    def encode_passages(self, texts):
        return np.array([[len(text), 0] for text in texts], dtype=np.float32)

    def encode_queries(self, queries):
        return np.array([[len(q.query), len(q.instruction or "")] for q in queries], dtype=np.float32)

    def score(self, pairs):
        return np.array([len(q.query) * len(text) for q, text in pairs], dtype=np.float32)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(chunks, "TEXTS", 4)
    monkeypatch.setattr(chunks, "PAIRS", 3)


def test_a_shared_corpus_is_one_file_for_any_chunks_of_the_table(tmp_path):
    file = share(corpus(10, 3), tmp_path)
    assert share(corpus(10, 10), tmp_path) == file
    assert share(corpus(9, 3), tmp_path) != file
    assert shared(file).equals(corpus(10, 1))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_corpus_that_the_node_does_not_see_is_reported(tmp_path):
    with pytest.raises(InputError) as error:
        shared(tmp_path / "corpora" / "elsewhere.arrow")
    assert error.value.faults[0].setting == "embeddings"


def test_a_converted_corpus_is_linked_and_not_written_again(tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    source = tmp_path / "source"
    source.touch()
    rows = corpus(10, 3).to_pylist()
    converted = mapped("task", [source], lambda: ((row["id"], row["text"]) for row in rows))
    file = share(converted, tmp_path / "store")
    assert file.name == share(corpus(10, 3), tmp_path / "other").name
    assert file.samefile(tmp_path / "scratch" / "corpora" / file.name)
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("another file system")))
    copied = share(converted, tmp_path / "elsewhere")
    assert not copied.samefile(file)
    assert shared(copied).equals(converted)


def test_chunks_cover_all_passages_and_queries_in_order(small, tmp_path):
    file = share(corpus(10, 3), tmp_path)
    parts = of_passages(file)
    assert [part.size for part in parts] == [4, 4, 2]
    assert [text for part in parts for _, text in part.texts()] == corpus(10, 10)["text"].to_pylist()
    queries = [Query(str(n), "q" * n, "i" if n else None) for n in range(5)]
    asked = of_queries(queries)
    assert [q for part in asked for q in part.queries] == queries
    assert [row.tolist() for part in asked for row in part.compute(Lengths())] == [[n, min(n, 1)] for n in range(5)]
    assert [len(part.compute(Lengths())) for part in parts] == [4, 4, 2]


def test_pairs_do_not_depend_on_the_order_of_a_ranking(small, tmp_path):
    file = share(corpus(12, 5), tmp_path)
    parts = of_pairs(Query("1", "ab"), file, [9, 10, 0, 3])
    assert parts == of_pairs(Query("1", "ab"), file, [3, 0, 10, 9])
    assert [part.rows for part in parts] == [(0, 3, 9), (10,)]
    assert parts[1].texts() == [("pair", "ab", None, "text 10")]
    assert np.concatenate([part.compute(Lengths()) for part in parts]).tolist() == [12, 12, 12, 14]


def test_pairs_are_read_from_a_corpus_larger_than_one_array(monkeypatch):
    part = pa.array([f"{n:04}" * 1024 for n in range(1024)])
    large = pa.table({"text": pa.chunked_array([part] * 600)})  # 2.5 GB, of which 4 MB are there
    monkeypatch.setattr(chunks, "shared", lambda file: large)
    held = pa.total_allocated_bytes()
    (pairs,) = of_pairs(Query("1", "ab"), Path("corpus"), [5, 1024 * 599 + 7])
    assert [text[:4] for *_, text in pairs.texts()] == ["0005", "0007"]
    assert pa.total_allocated_bytes() - held < 1 << 20


def test_a_text_as_query_and_as_passage_has_two_embeddings(small, tmp_path):
    table = pa.table({"id": ["a"], "text": ["same"]}, schema=CORPUS)
    (passage,), (query,) = of_passages(share(table, tmp_path)), of_queries([Query("q", "same")])
    assert passage.texts() != query.texts()
    assert of_queries([Query("q", "same", "under one")])[0].texts() != query.texts()


def test_a_corpus_in_an_object_store_is_copied_once_to_each_node(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path / "driver"))
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "embeddings")
    file = share(corpus(10, 3), folder / "corpora")
    assert share(corpus(10, 10), folder / "corpora") == file
    assert read_binary(file) == share(corpus(10, 3), tmp_path).read_bytes()
    monkeypatch.setenv(SCRATCH, str(tmp_path / "node"))
    downloads = []
    monkeypatch.setattr(Folder, "download", lambda *named, of=Folder.download: downloads.append(named) or of(*named))
    for _ in range(2):  # two processes of a node
        shared.cache_clear()
        assert shared(file).equals(corpus(10, 1))
    assert len(downloads) == 1
    file.parent.delete(file.name)
    monkeypatch.setenv(SCRATCH, str(tmp_path / "another node"))
    shared.cache_clear()
    with pytest.raises(InputError, match=r"embeddings=s3://.*\.arrow: the object store failed"):
        shared(file)
