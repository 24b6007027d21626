from __future__ import annotations

import re
from pathlib import Path

import faiss
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.retrieval.factory import EXACT_BELOW, GIB, build, candidates, choose, memory, new
from tests.retrieval.vectors import unit_vectors


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
@settings(max_examples=40)
@given(n=st.integers(1, 10**9), d=st.integers(1, 5000))
def test_faiss_makes_every_candidate_and_memory_decreases(n: int, d: int) -> None:
    names = candidates(n)
    if n < 1_000_000:  # FAISS is slow to allocate the lists of larger ones
        sizes = [memory(name, d, n) for name in names]
        if d >= 48 and n >= 100_000:  # so that centroids and RaBitQ's 8 to 20 bytes beside a code are negligible
            assert sizes == sorted(sizes, reverse=True)
    assert len(set(names)) == len(names)


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
    assert memory(chosen, d, n) <= gib * GIB
    assert all(memory(name, d, n) > gib * GIB for name in names[: names.index(chosen)])


def test_a_given_type_must_fit_the_memory() -> None:
    assert choose(100_000, 384, 0.2, given="HNSW32") == "HNSW32"
    assert choose(100_000, 384, None, given="Flat") == "Flat"
    with pytest.raises(InputError) as refused:
        choose(100_000, 384, 0.1, given="HNSW32")
    assert [(fault.setting, fault.value) for fault in refused.value.faults] == [("memory_gib", 0.1)]


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [
        "Flat",
        "HNSW32",
        "HNSW8_SQ8",
        "IVF64,Flat",
        "IVF64_HNSW16,Flat",
        "IVF16,SQ8",
        "HNSW8_SQfp16",
        "IVF8,SQfp16",
        "IVF16,RaBitQ",
        "IVF16_HNSW8,RaBitQ4",
    ],
)
def test_memory_is_the_size_of_the_file_that_faiss_writes(name: str, tmp_path: Path) -> None:
    n, d = 4000, 32
    index = build(name, unit_vectors(n, d))
    faiss.write_index(index, str(tmp_path / "index"))
    assert memory(name, d, n) == pytest.approx((tmp_path / "index").stat().st_size, rel=0.05)


@pytest.mark.parametrize(
    "name",
    [
        "nonsense",
        "IVF,Flat",
        "LSH",
        "HNSW16_PQ8",
        "IDMap,Flat",
        "PQ8",
        "IVF4,PQ4",
        "PCA8,Flat",
        "IVF4,Flat,RFlat",
        "RaBitQ",
        "",
    ],
)
def test_impossible_and_unsuitable_types_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"^factory={re.escape(name)}: ") as refusal:
        new(name, 32)
    assert "\n" not in str(refusal.value)


def test_a_type_made_for_more_vectors_is_refused() -> None:
    with pytest.raises(InputError, match="factory=IVF64,Flat: training takes 64 vectors and a shard has 63"):
        build("IVF64,Flat", unit_vectors(63, 8))
