import dataclasses
import datetime
import errno
import json
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.retrieval import faiss_index, shards
from infembed_ray.retrieval.faiss_index import EXACT_BELOW
from infembed_ray.retrieval.passages import row_of, schema, write_passages
from infembed_ray.retrieval.shard_files import ShardFacts
from infembed_ray.retrieval.shards import Build, Hit, Shard, build_shard, shard_of, shards_of, write_vectors
from infembed_ray.storage import durable
from tests.retrieval.vectors import clustered_vectors, unit_vectors
from tests.support.shards import write_shard

TYPES: dict[str, FieldType] = {"year": "integer", "day": "date", "lang": "string"}


def write(root: Path, n: int, d: int = 8, precision: str = "float32", **options: Any) -> tuple[ShardFacts, np.ndarray]:
    """A shard of passages p0, p1, ..., unsorted."""
    vectors = unit_vectors(n, d).astype(precision)
    ids, texts = [f"p{i}" for i in range(n)], [f"text {i}" for i in range(n)]
    return write_shard(root / "shard-00000", ids, texts, vectors, **options), vectors


def hits_of(shard: Shard, vectors: np.ndarray, k: int, keep: np.ndarray | None = None) -> list[list[Hit]]:
    scores, rows = shard.search_rows(vectors, k, keep)
    return shard.hits(rows, scores)


def test_hits_carry_typed_metadata(tmp_path: Path) -> None:
    day = datetime.date(2024, 2, 29)
    metadata = {"year": [2020, None, -5], "day": [None, day, day], "lang": ["en", "", None]}
    facts = write_shard(tmp_path / "shard-00000", list("cab"), list("xyz"), unit_vectors(3, 8), metadata, TYPES)
    shard = Shard.open(tmp_path, facts)
    assert {hit.id: hit.metadata for hit in hits_of(shard, unit_vectors(1, 8), 3)[0]} == {
        "c": {"year": 2020, "day": None, "lang": "en"},
        "a": {"year": None, "day": "2024-02-29", "lang": ""},
        "b": {"year": -5, "day": "2024-02-29", "lang": None},
    }


@pytest.mark.parametrize("factory", [None, "IVF4,Flat"])
def test_a_shard_may_be_empty(tmp_path: Path, factory: str | None) -> None:
    facts = write_shard(tmp_path / "s", [], [], np.empty((0, 8), dtype=np.float32), build=Build(factory))
    shard = Shard.open(tmp_path, facts)
    assert hits_of(shard, unit_vectors(2, 8), 5) == [[], []]
    assert hits_of(shard, unit_vectors(2, 8), 5, np.empty(0, bool)) == [[], []]
    assert shard.vectors(slice(None)).shape == (0, 8)
    assert row_of(shard.passages, "a") is None


KINDS = ["Flat", "HNSW8", "IVF4,Flat", "IVF4,SQ8", "IVF4,RaBitQ", "HNSW8_SQ8", "HNSW8_SQfp16", "IVF4,SQfp16"]
KINDS += ["IVF4,RaBitQfs2"]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [(kind, "float16") for kind in KINDS]
    + [(kind, "float32") for kind in KINDS if "SQ8" not in kind and "R" not in kind],
)
def test_every_index_type_is_written_opened_and_searched(tmp_path: Path, kind: str, precision: str) -> None:
    facts, vectors = write(tmp_path, 300, precision=precision, build=Build(kind))
    assert facts.factory == kind
    assert set(facts.checksums) - {"vectors.npy"} == {"index.faiss", "passages.arrow"}
    whole = ("Flat", "HNSW8", "HNSW8_SQfp16") if precision == "float16" else ("Flat", "HNSW8")
    assert ("vectors.npy" in facts.checksums) == (kind not in whole)
    files = {path.name: path.stat().st_size for path in (tmp_path / facts.name).iterdir()}
    assert set(files) == set(facts.checksums)
    assert facts.bytes == sum(files.values())
    if kind not in whole:
        assert files["vectors.npy"] == 128 + vectors.nbytes
    shard = Shard.open(tmp_path, ShardFacts.from_json(json.loads(json.dumps(dataclasses.asdict(facts)))))
    queries = unit_vectors(30, 8, seed=1)
    keep = np.arange(300) % 3 != 0
    ids = shard.passages.column("id").to_pylist()
    assert ids == sorted(f"p{i}" for i in range(300))
    assert [row_of(shard.passages, id) for id in (*ids[:3], "p", "q")] == [0, 1, 2, None, None]
    stored = shard.vectors(slice(None))
    np.testing.assert_array_equal(stored, vectors[[int(id[1:]) for id in ids]])  # as they were rounded
    exact = queries.astype(np.float64) @ stored.T.astype(np.float64)
    for mask in (None, keep):
        kept = exact if mask is None else np.where(mask, exact, -2)
        shares = []
        for hits, scores in zip(hits_of(shard, queries, 10, mask), kept, strict=True):
            assert [hit.text for hit in hits] == [f"text {hit.id[1:]}" for hit in hits]
            products = [scores[ids.index(hit.id)] for hit in hits]
            np.testing.assert_allclose([hit.score for hit in hits], products, atol=1e-6)  # no score is approximate
            shares.append(len({hit.id for hit in hits} & {ids[row] for row in np.argsort(-scores)[:10]}) / 10)
        assert np.mean(shares) >= 0.95


def test_inconsistent_input_is_refused(tmp_path: Path) -> None:
    table = pa.table({"id": ["a", "b"], "text": ["x", "y"]}, schema=schema({}))
    write_passages(tmp_path / "passages.arrow", table.schema, [table])
    write_vectors(tmp_path / "vectors.npy", [unit_vectors(1, 8)], 1, 8)
    with pytest.raises(ValueError, match="2 passages, 1 vectors: must have the same length"):
        build_shard(tmp_path, Build())
    with pytest.raises(ValueError, match="ids must be unique and ascend"):
        write_shard(tmp_path / "s", ["a", "a"], ["x", "y"], unit_vectors(2, 8))
    with pytest.raises(ValueError, match="must be finite"):
        write_shard(tmp_path / "s", ["a"], ["x"], np.full((1, 8), np.nan, np.float32))


def test_a_full_disk_is_an_error_that_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, sync = tmp_path / "shard-00000", durable.sync
    for name in ("passages.arrow", "vectors.npy", "index.faiss"):

        def full(stream: IO[Any], name: str = name) -> None:
            if Path(stream.name).name.startswith(name):
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(stream)

        monkeypatch.setattr(durable, "sync", full)
        with pytest.raises(OSError, match="No space left on device"):
            write(tmp_path, 50)
        assert not list(directory.glob(f"{name}*"))
    monkeypatch.undo()
    facts, _ = write(tmp_path, 50)
    assert len(Shard.open(tmp_path, facts)) == 50


@pytest.mark.integration
def test_a_shard_below_the_recall_floor_is_refused_with_its_recall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faiss_index, "LEAST_RERANK", 1)
    monkeypatch.setattr(faiss_index, "MAX_RERANK", 1)  # codes of one bit alone find few neighbours
    n, build = 3000, Build("IVF8,RaBitQ", recall_floor=0.9)
    with pytest.raises(InputError, match="recall_floor") as refusal:
        write(tmp_path, n, 64, build=build)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "shard-00000" / "index.faiss").exists()
    facts, _ = write(tmp_path, n, 64, build=dataclasses.replace(build, recall_floor=0.1))
    assert 0.1 <= facts.recall_at_10 < 0.9


@pytest.mark.integration
def test_a_large_shard_is_a_graph_with_its_recall_measured(tmp_path: Path) -> None:
    vectors = clustered_vectors(EXACT_BELOW, 16)
    ids = [f"p{i:05d}" for i in range(len(vectors))]
    facts = write_shard(tmp_path / "shard-00000", ids, ids, vectors.astype(np.float16))
    assert facts.factory == "HNSW32_SQfp16"
    assert set(facts.search) == {"efSearch"}
    hits = hits_of(Shard.open(tmp_path, facts), vectors[:200], 10)
    exact = np.argsort(-(vectors[:200] @ vectors.T), axis=1)[:, :10]
    shares = [len({hit.id for hit in h} & {ids[r] for r in e}) / 10 for h, e in zip(hits, exact, strict=True)]
    assert np.mean(shares) == pytest.approx(facts.recall_at_10, abs=0.02)  # the recall of the opened shard
    assert facts.recall_at_10 >= 0.98


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=20), st.integers(1, 300))
def test_shards_of_many_passages_are_those_of_each(ids: list[str], shards: int) -> None:
    assert shards_of(pa.chunked_array([pa.array(ids, pa.large_string())]), shards).tolist() == [
        shard_of(id, shards) for id in ids
    ]


def test_vectors_are_written_in_blocks_as_a_numpy_file(tmp_path: Path) -> None:
    vectors = unit_vectors(100, 8)
    for precision in ("float16", "float32"):
        blocks = (vectors[i : i + 7] for i in range(0, 100, 7))
        shards.write_vectors(tmp_path / "v.npy", blocks, 100, 8, precision)
        np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), vectors.astype(precision), strict=True)
    with pytest.raises(ValueError, match="100 vectors instead of 101"):
        shards.write_vectors(tmp_path / "w.npy", [vectors], 101, 8)
    assert not (tmp_path / "w.npy").exists()
