"""Types of FAISS index, and searches against brute force in float64."""

import os
import re
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.retrieval import faiss_index
from infembed_ray.retrieval.faiss_index import (
    EXACT_BELOW,
    GIB,
    Neighbours,
    Searcher,
    build,
    calibrate,
    candidates,
    choose,
    memory,
    new,
)
from tests.retrieval.vectors import clustered_vectors, unit_vectors

KINDS = ["Flat", "HNSW16", "HNSW16_SQ8", "IVF16,Flat", "IVF16_HNSW8,SQ8", "IVF16,RaBitQ", "IVF16_HNSW8,RaBitQ4"]
LOSSLESS = ("Flat", "HNSW16", "IVF16,Flat")


@cache
def searcher_of(kind: str, n: int, d: int) -> Searcher:
    vectors = clustered_vectors(n, d, 40)
    made = Searcher(build(kind, vectors), vectors)
    parameters, _ = calibrate(made)
    made.use({name: min(value, 16) for name, value in parameters.items()})  # or so few would be searched exactly
    return made


def brute_force(searcher: Searcher, queries: np.ndarray, keep: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Exact products in float64, and the k-th best of those kept (or the least there is)."""
    products = queries.astype(np.float64) @ searcher.originals.astype(np.float64).T
    kept = np.sort(np.where(keep, products, -np.inf), axis=1)[:, ::-1][:, : min(k, int(keep.sum()))]
    return products, kept


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(data=st.data(), share=st.sampled_from([0.0, 0.001, 0.05, 0.5, 0.97, 1.0]), k=st.sampled_from([1, 7, 40]))
def test_filtered_search_is_complete_with_exact_scores(kind: str, data: st.DataObject, share: float, k: int) -> None:
    searcher = searcher_of(kind, 1500, 16)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    keep = rng.random(len(searcher)) < share
    queries = np.concatenate([unit_vectors(2, 16, int(rng.integers(2**32))), searcher.originals[:2]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faiss_index, "EXACT_BELOW", data.draw(st.sampled_from([0, 10_000])))
        scores, rows = searcher.search(queries, k, keep)
    products, best = brute_force(searcher, queries, keep, k)
    assert scores.shape == rows.shape == (4, k)
    filled = rows >= 0
    assert (filled.sum(axis=1) == best.shape[1]).all()
    assert keep[rows[filled]].all()
    expected = np.take_along_axis(products, np.maximum(rows, 0), axis=1)
    np.testing.assert_allclose(scores[filled], expected[filled], atol=1e-5)
    for row, score in zip(rows, scores, strict=True):
        assert len(set(row[row >= 0])) == best.shape[1]
        ranking = list(zip(score.tolist(), row.tolist(), strict=True))
        assert ranking == sorted(ranking, reverse=True)
    if searcher.exact or share < 0.05:
        np.testing.assert_allclose(scores[:, : best.shape[1]], best, atol=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["HNSW32", "IVF128,Flat"])
@pytest.mark.parametrize("least", [-1.0, -0.2, 0.2, 0.6, 0.9])
def test_a_filter_may_drop_everything_near_the_query(kind: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters correlate with topics: the filter drops every vector nearer than `least`."""
    monkeypatch.setattr(faiss_index, "EXACT_BELOW", 100)
    searcher = searcher_of(kind, 12_000, 32)
    shares = []
    for query in searcher.originals[::1200]:
        products = searcher.originals.astype(np.float64) @ query
        keep = products < least
        scores, rows = searcher.search(query[None], 10, keep)
        assert keep[rows[rows >= 0]].all()
        best = np.sort(products[keep])[::-1][:10]
        shares += (scores[0, : len(best)] >= best[-1:] - 1e-6).tolist()
    assert not shares or np.mean(shares) >= 0.97


def test_candidates_of_a_mapped_file_are_read_without_their_surroundings(tmp_path: Path) -> None:
    """A page fault reads what lies around a row too: 128 KiB, or as much as the device is set to."""
    file, rng = tmp_path / "vectors.npy", np.random.default_rng(0)
    vectors = rng.integers(0, 0x3C00, (8192, 1536), np.uint16).view(np.float16)  # 25 MB of numbers below 1
    np.save(file, vectors)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    searcher = Searcher(build("IVF1,SQ8", unit_vectors(40, 1536)), np.load(file, mmap_mode="r"))
    rows = np.append(rng.choice(8191, 40, replace=False), 8191)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    np.testing.assert_array_equal(searcher.vectors(rows), vectors[rows].astype(np.float32))
    assert 512 * (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before) < 1 << 20


def test_a_lossy_index_needs_its_vectors() -> None:
    with pytest.raises(ValueError, match="does not store its vectors"):
        Searcher(build("IVF4,SQ8", unit_vectors(100, 8)))


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_calibration_reaches_its_aim_and_agrees_with_an_oracle(kind: str) -> None:
    searcher = searcher_of(kind, 1500, 16)
    parameters, recall = calibrate(searcher)
    wanted = set() if kind.endswith("Flat") and "IVF" not in kind else {"efSearch" if "HNSW16" in kind else "nprobe"}
    assert set(parameters) == wanted | (set() if kind in LOSSLESS else {"rerank"})
    assert recall >= 0.98
    rows = np.arange(0, 1500, 5)
    passages = searcher.originals[rows].astype(np.float64)
    beside = np.random.default_rng(1).standard_normal(passages.shape)
    beside -= (beside * passages).sum(axis=1, keepdims=True) * passages
    made = passages / 2 + np.sqrt(0.75) * beside / np.linalg.norm(beside, axis=1, keepdims=True)
    figures = []
    for queries, themselves in ((passages, rows), (made, np.full(len(rows), -1))):
        shares = []
        for query, row in zip(queries, themselves, strict=True):
            products = searcher.originals.astype(np.float64) @ query
            others = [r for r in np.argsort(-products).tolist() if r != row][:10]
            _, rows_of = searcher.search(query[None].astype(np.float32), 11)
            shares.append(len(set(others) & set([r for r in rows_of[0].tolist() if r != row][:10])) / 10)
        figures.append(np.mean(shares))
    assert min(figures) == pytest.approx(recall, abs=0.02)


def test_calibration_takes_the_cheapest_parameters() -> None:
    searcher = searcher_of("IVF16,Flat", 1500, 16)
    (nprobe,) = calibrate(searcher)[0].values()
    assert 1 <= nprobe < 16
    assert calibrate(searcher, aim=0.0)[0] == {"nprobe": 4}
    assert calibrate(searcher, aim=1.1)[0] == {"nprobe": 16}
    calibrate(searcher)


def test_duplicate_passages_count_as_each_other() -> None:
    """Which copies are the ten nearest is arbitrary, and indexes differ in it."""
    vectors = np.repeat(unit_vectors(40, 16), 50, axis=0)
    assert calibrate(Searcher(build("IVF8,Flat", vectors), vectors))[1] >= 0.98


@pytest.mark.parametrize("n", [1, 2, 3, 9, 30])
def test_all_of_few_vectors_are_found(n: int) -> None:
    made = Searcher(build("HNSW8", unit_vectors(n, 4)))
    assert calibrate(made)[1] == 1.0


@pytest.mark.parametrize("k", [1, 3, 6, 7, 9])
@pytest.mark.parametrize("queries", [1, 30])
def test_ties_at_the_last_place_go_to_the_highest_rows(k: int, queries: int) -> None:
    others = unit_vectors(50, 8)
    same = np.concatenate([np.repeat(unit_vectors(1, 8, seed=5), 7, axis=0), others])
    searcher = Searcher(build("Flat", same))
    keep = np.ones(len(same), bool)
    for _ in range(2):
        _, rows = searcher.search(np.repeat(same[:1], queries, axis=0), k, keep)
        expected = np.flatnonzero(keep[:7])[::-1]
        for of_query in rows:
            assert of_query[: len(expected)].tolist() == expected[:k].tolist()
        keep[[2, 6]] = False


def test_short_lists_do_not_shorten_the_result() -> None:
    vectors = clustered_vectors(3000, 16, 300)
    searcher = Searcher(build("IVF300,Flat", vectors), vectors, {faiss_index.NPROBE: 1})
    scores, rows = searcher.search(unit_vectors(50, 16), 40)
    assert (rows >= 0).all()
    assert (np.diff(scores, axis=1) <= 0).all()
    assert all(len(set(row)) == 40 for row in rows.tolist())


@pytest.mark.integration
def test_recall_includes_queries_that_are_not_passages() -> None:
    """A graph finds less for queries beside its vectors than for its own vectors."""
    vectors = clustered_vectors(3000, 128, 30)
    searcher = Searcher(build("HNSW8", vectors), parameters={faiss_index.EF_SEARCH: 16})
    passages = vectors[::10]
    scores, _ = searcher.search(passages, 10)
    _, best = brute_force(searcher, passages, np.ones(len(vectors), bool), 10)
    assert (scores >= best[:, -1:] - 1e-6).mean() > 0.97
    assert Neighbours(vectors, np.arange(0, 3000, 10)).recall(searcher) < 0.94


# --------------------------------------------------------------------------------------------------- the types


def test_without_a_memory_limit_small_shards_are_exact_and_large_ones_graphs() -> None:
    assert [choose(n, 384, None) for n in (0, EXACT_BELOW - 1, EXACT_BELOW, 10**9)] == [
        "Flat",
        "Flat",
        "HNSW32_SQfp16",
        "HNSW32_SQfp16",
    ]
    assert choose(EXACT_BELOW, 384, None, precision="float32") == "HNSW32"


def test_less_memory_drops_the_graph_then_the_vectors_then_precision() -> None:
    """Ten million passages of a 7B model's dimension, in ever less memory."""
    chosen = [choose(10_000_000, 3584, gib) for gib in (200, 69, 50, 20, 15, 8)]
    assert chosen == [
        "HNSW32_SQfp16",
        "IVF65536_HNSW32,SQfp16",
        "IVF65536_HNSW32,SQ8",
        "IVF65536_HNSW32,RaBitQ4",
        "IVF65536_HNSW32,RaBitQ2",
        "IVF65536_HNSW32,RaBitQ",
    ]
    assert [choose(10_000_000, 3584, gib, precision="float32") for gib in (200, 136)] == [
        "HNSW32",
        "IVF65536_HNSW32,Flat",
    ]


@pytest.mark.integration
@settings(max_examples=20)
@given(n=st.integers(EXACT_BELOW, 900_000), d=st.sampled_from([64, 384, 1024]), share=st.floats(0.001, 1.5))
def test_the_choice_is_the_best_that_fits(n: int, d: int, share: float) -> None:
    gib = memory("HNSW32", d, n) * share / GIB
    try:
        chosen = choose(n, d, gib)
    except InputError:
        assert all(memory(name, d, n) > gib * GIB for name in candidates(n))
        return
    names = candidates(n)
    sizes = [memory(name, d, n) for name in names]
    assert sizes == sorted(sizes, reverse=True) or n < 100_000  # centroids and RaBitQ's bytes beside a code count
    assert memory(chosen, d, n) <= gib * GIB
    assert all(memory(name, d, n) > gib * GIB for name in names[: names.index(chosen)])


def test_a_given_type_must_fit_the_memory() -> None:
    assert choose(100_000, 384, 0.2, given="HNSW32") == "HNSW32"
    assert choose(100_000, 384, None, given="Flat") == "Flat"
    with pytest.raises(InputError) as refused:
        choose(100_000, 384, 0.1, given="HNSW32")
    assert [(fault.setting, fault.value) for fault in refused.value.faults] == [("memory_gib", 0.1)]


@pytest.mark.integration
@pytest.mark.parametrize("name", [*KINDS, "HNSW8_SQfp16", "IVF8,SQfp16"])
def test_memory_is_the_size_of_the_file_that_faiss_writes(name: str, tmp_path: Path) -> None:
    n, d = 4000, 32
    index = build(name, unit_vectors(n, d))
    faiss.write_index(index, str(tmp_path / "index"))
    assert memory(name, d, n) == pytest.approx((tmp_path / "index").stat().st_size, rel=0.05)


@pytest.mark.parametrize(
    "name",
    ["", "nonsense", "IVF,Flat", "LSH", "HNSW16_PQ8", "IDMap,Flat", "PQ8", "PCA8,Flat", "IVF4,Flat,RFlat", "RaBitQ"],
)
def test_impossible_and_unsuitable_types_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"^factory={re.escape(name)}: ") as refusal:
        new(name, 32)
    assert "\n" not in str(refusal.value)


def test_a_type_made_for_more_vectors_is_refused() -> None:
    with pytest.raises(InputError, match="factory=IVF64,Flat: training takes 64 vectors and a shard has 63"):
        build("IVF64,Flat", unit_vectors(63, 8))


class OnOneGpu:
    """A CPU index that fails on concurrent searches."""

    def __init__(self, index: Any) -> None:
        self.calls = 0
        self._index = index
        self._free = threading.Lock()

    def search(self, vectors: np.ndarray, k: int, params: Any) -> tuple[np.ndarray, np.ndarray]:
        assert self._free.acquire(blocking=False), "FAISS allows one call at a time on a GPU"
        try:
            self.calls += 1
            return self._index.search(vectors, k, params=params)
        finally:
            self._free.release()


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["Flat", "IVF16,Flat", "IVF16,RaBitQ"])
def test_threads_take_turns_on_a_gpu_and_find_what_the_cpu_finds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = clustered_vectors(1500, 16, 40)
    index, queries = build(kind, vectors), unit_vectors(64, 16, 7)
    parameters = {} if kind == "Flat" else {"nprobe": 4, "rerank": 4}
    on_cpu = Searcher(index, vectors, parameters)
    monkeypatch.setattr(faiss_index, "on_gpus", OnOneGpu)
    searcher = Searcher(index, vectors, parameters, gpu=True)
    with ThreadPoolExecutor(8) as threads:
        rows = list(threads.map(lambda query: searcher.search(query[None], 30)[1][0], queries))
    assert np.array_equal(rows, on_cpu.search(queries, 30)[1])
    assert searcher._on_gpus.calls >= len(queries)
    keep = np.arange(len(vectors)) % 2 == 0
    assert np.array_equal(searcher.search(queries, 5, keep)[1], on_cpu.search(queries, 5, keep)[1])


@pytest.mark.gpu
@pytest.mark.skipif(not hasattr(faiss, "StandardGpuResources"), reason="this FAISS runs on CPUs only")
@pytest.mark.parametrize("kind", ["Flat", "IVF64,Flat"])
def test_a_gpu_finds_what_the_cpu_finds(kind: str) -> None:
    vectors = clustered_vectors(20_000, 32, 200)
    index, queries = build(kind, vectors), unit_vectors(100, 32, 7)
    parameters = {} if kind == "Flat" else {"nprobe": 8}
    on_gpu, on_cpu = (Searcher(index, vectors, parameters, gpu) for gpu in (True, False))
    assert np.mean(on_gpu.search(queries, 10)[1] == on_cpu.search(queries, 10)[1]) > 0.99
