from __future__ import annotations

import dataclasses
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.retrieval import shards
from infembed_ray.retrieval.shards import HNSW_FROM, Hit, Shard, ShardFacts, factory_string, merge, recall_at_10
from tests.retrieval.vectors import clustered_vectors, unit_vectors


def write(root: Path, n: int, d: int = 8) -> tuple[ShardFacts, np.ndarray]:
    vectors = unit_vectors(n, d)
    return Shard.write(
        root / "shard-00000", [f"p{i}" for i in range(n)], [f"text {i}" for i in range(n)], vectors
    ), vectors


def test_a_written_shard_gives_back_ids_scores_and_texts(tmp_path: Path) -> None:
    facts, vectors = write(tmp_path, 50)
    shard = Shard.open(tmp_path, facts)
    assert (len(shard), facts.passages, facts.factory, facts.recall_at_10) == (50, 50, "Flat", 1.0)
    queries = unit_vectors(3, 8, seed=1)
    exact = queries.astype(np.float64) @ vectors.astype(np.float64).T
    for row, hits in enumerate(shard.search(queries, 7)):
        best = np.argsort(-exact[row])[:7]
        assert [hit.id for hit in hits] == [f"p{i}" for i in best]
        assert [hit.text for hit in hits] == [f"text {i}" for i in best]
        np.testing.assert_allclose([hit.score for hit in hits], exact[row, best], atol=1e-6)


def test_more_hits_asked_than_passages_gives_all_passages(tmp_path: Path) -> None:
    facts, vectors = write(tmp_path, 3)
    assert len(Shard.open(tmp_path, facts).search(vectors[:1], 10)[0]) == 3


def test_a_shard_may_be_empty(tmp_path: Path) -> None:
    facts = Shard.write(tmp_path / "shard-00000", [], [], np.empty((0, 8), dtype=np.float32))
    assert Shard.open(tmp_path, facts).search(unit_vectors(2, 8), 5) == [[], []]


def test_equal_scores_come_in_descending_order_of_ids(tmp_path: Path) -> None:
    same = np.tile(unit_vectors(1, 8), (4, 1))
    facts = Shard.write(tmp_path / "shard-00000", ["b", "d", "a", "c"], list("....")[:4], same)
    assert [hit.id for hit in Shard.open(tmp_path, facts).search(same[:1], 4)[0]] == ["d", "c", "b", "a"]


def test_texts_survive_whatever_characters_they_hold(tmp_path: Path) -> None:
    texts = ["", "naïve café", "日本語\n\t\u2028", "x" * 100_000]
    facts = Shard.write(tmp_path / "shard-00000", list("abcd"), texts, unit_vectors(4, 8))
    hits = Shard.open(tmp_path, facts).search(unit_vectors(1, 8), 4)[0]
    assert {hit.id: hit.text for hit in hits} == dict(zip("abcd", texts, strict=True))


def test_rows_of_several_arrow_batches_stay_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ARROW_BATCH_ROWS", 7)
    facts, vectors = write(tmp_path, 50)
    with pa.ipc.open_file(tmp_path / "shard-00000" / shards.PASSAGES_FILE) as file:
        assert file.num_record_batches == 8
    hits = Shard.open(tmp_path, facts).search(vectors, 1)
    assert [(hit[0].id, hit[0].text) for hit in hits] == [(f"p{i}", f"text {i}") for i in range(50)]


@pytest.mark.parametrize("name", [shards.INDEX_FILE, shards.PASSAGES_FILE])
def test_a_missing_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    facts, _ = write(tmp_path, 5)
    (tmp_path / "shard-00000" / name).unlink()
    with pytest.raises(InputError, match=f"shard-00000/{name} is missing"):
        Shard.open(tmp_path, facts)


@pytest.mark.parametrize("name", [shards.INDEX_FILE, shards.PASSAGES_FILE])
@pytest.mark.parametrize("damage", ["one bit", "truncated"])
def test_a_corrupted_file_is_refused_by_name(tmp_path: Path, name: str, damage: str) -> None:
    facts, _ = write(tmp_path, 5)
    file = tmp_path / "shard-00000" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if damage == "one bit" else content[:-1])
    with pytest.raises(InputError, match=f"shard-00000/{name} is corrupted"):
        Shard.open(tmp_path, facts)


def test_rows_that_do_not_align_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 ids, 1 texts, 2 vectors"):
        Shard.write(tmp_path / "shard-00000", ["a", "b"], ["x"], unit_vectors(2, 8))


def test_the_graph_takes_over_at_ten_thousand_passages() -> None:
    assert [factory_string(n) for n in (0, HNSW_FROM - 1, HNSW_FROM, 10**9)] == ["Flat", "Flat", "HNSW32", "HNSW32"]


def test_a_large_shard_is_a_graph_with_its_recall_measured(tmp_path: Path) -> None:
    vectors = clustered_vectors(HNSW_FROM, 16)
    ids = [f"p{i}" for i in range(len(vectors))]
    facts = Shard.write(tmp_path / "shard-00000", ids, ids, vectors)
    assert facts.factory == "HNSW32"
    assert 0.95 <= facts.recall_at_10 <= 1
    hits = Shard.open(tmp_path, facts).search(vectors[:100], 10)
    exact = np.argsort(-(vectors[:100] @ vectors.T), axis=1)[:, :10]
    shares = [len({hit.id for hit in h} & {ids[r] for r in e}) / 10 for h, e in zip(hits, exact, strict=True)]
    assert np.mean(shares) >= 0.95  # what the opened shard really does


def test_recall_tells_a_poor_index_from_an_exact_one() -> None:
    vectors = unit_vectors(1000, 32)
    exact = faiss.index_factory(32, "Flat", faiss.METRIC_INNER_PRODUCT)
    exact.add(vectors)
    poor = faiss.index_factory(32, "PQ4x4", faiss.METRIC_INNER_PRODUCT)
    poor.train(vectors)
    poor.add(vectors)
    assert recall_at_10(exact, vectors) == 1.0
    assert recall_at_10(poor, vectors) < 0.5


HITS = st.lists(st.builds(Hit, st.uuids().map(str), st.sampled_from([-1.0, 0.0, 0.5, 0.75, 1.0]), st.just("text")))


@settings(deadline=None)
@given(st.lists(HITS, max_size=4), st.integers(1, 20))
def test_merging_is_sorting_everything_by_score_and_id(results: list[list[Hit]], k: int) -> None:
    everything = [hit for hits in results for hit in hits]
    expected = sorted(everything, key=lambda hit: (hit.score, hit.id), reverse=True)[:k]
    assert merge(results, k) == expected


def test_facts_survive_the_manifest(tmp_path: Path) -> None:
    facts, _ = write(tmp_path, 5)
    assert ShardFacts(**dataclasses.asdict(facts)) == facts
