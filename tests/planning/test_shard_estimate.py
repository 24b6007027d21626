"""Estimates of a shard against FAISS's own memory, and seconds against sums by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.planning.cost import assumed
from infembed_ray.planning.shard_estimate import BUILD_THREADS, estimate
from infembed_ray.retrieval import factory as factories

SCAN = 1e9 * assumed("scan_gb_s")


def graph_seconds(vectors, vector, reads="graph_reads"):
    read = 1e-9 * (assumed("random_read_ns") + vector / assumed("graph_gb_s"))
    return assumed(reads) * math.log2(vectors) * read


@pytest.mark.integration
@settings(max_examples=20)
@given(st.integers(1, 10**9), st.sampled_from([256, 384, 768, 3584]))
def test_memory_is_what_the_build_chooses_by(vectors, dimension):
    for factory in factories.candidates(vectors, dimension):
        planned = estimate(factory, dimension, vectors, 400)
        assert planned.memory == pytest.approx(factories.memory(factory, dimension, vectors), rel=1e-6)


def test_sizes_of_a_seven_b_model_by_hand():
    graph = estimate("HNSW32", 3584, 10**7, 400)
    assert graph.memory == pytest.approx(10**7 * (4 * 3584 + 8 * 32 + 16), rel=0.002)
    assert graph.disk == pytest.approx(graph.memory + 10**7 * 456, rel=0.002)
    codes = estimate("OPQ448_1792,IVF65536_HNSW32,PQ448", 3584, 10**9, 400)
    assert codes.memory == pytest.approx(10**9 * 456, rel=0.01)
    assert codes.disk == pytest.approx(codes.memory + 10**9 * (456 + 2 * 3584))  # the vectors, for reranking
    half = estimate("HNSW32_SQfp16", 3584, 10**7, 400)
    assert half.memory == pytest.approx(graph.memory - 10**7 * 2 * 3584)
    assert half.disk == pytest.approx(half.memory + 10**7 * 456, rel=0.002)
    assert half.search_seconds < graph.search_seconds
    sample = factories.TRAINING_POINTS * 65536
    assert codes.peak == pytest.approx(codes.memory + 4 * (3584 + 1792) * sample)


def test_search_reads_bytes_at_the_rate_of_its_type():
    def seconds(factory, vectors=10**6):
        return estimate(factory, 768, vectors, 400).search_seconds

    vector, lists = 4 * 768, 4096
    assert seconds("Flat") == pytest.approx(10**6 * vector / SCAN)
    assert seconds("IVF4096,Flat") == pytest.approx((10**6 * (vector + 8) * 64 / lists + lists * vector) / SCAN)
    assert seconds("HNSW32", 10**8) == pytest.approx(graph_seconds(10**8, vector))
    assert seconds("HNSW32", 200) == pytest.approx(
        200 * graph_seconds(2, vector) / assumed("graph_reads")
    )  # no more than there are
    codes = 10**6 * (96 + 8 + 8) * 64 / lists / (1e9 * assumed("code_scan_gb_s"))
    assert seconds("IVF4096,RaBitQ") == pytest.approx(codes + lists * vector / SCAN)
    assert estimate("OPQ96_384,IVF4096,PQ96", 768, 10**6, 400).reranked == 100
    assert estimate("HNSW32", 768, 10**6, 400).reranked == 0


def test_build_seconds_by_hand():
    vectors, lists, d = 10**6, 4096, 768
    sample = factories.TRAINING_POINTS * lists
    flops = 2 * d * lists * (10 * sample + vectors)
    hours = flops / (1e9 * assumed("gemm_gflop_s")) / BUILD_THREADS / 3600
    assert estimate("IVF4096,Flat", d, vectors, 400).build_hours == pytest.approx(hours)
    graph = vectors * graph_seconds(vectors, 4 * d, "graph_build_reads") / BUILD_THREADS / 3600
    assert estimate("HNSW32", d, vectors, 400).build_hours == pytest.approx(graph)
    assert estimate("Flat", d, vectors, 400).build_hours == 0


def test_measurements_of_a_build_replace_the_assumptions():
    factory = "OPQ8_16,IVF64,PQ8"
    assumption = estimate(factory, 32, 10**6, 400)
    built = estimate(factory, 32, 10**6, 400, {"nprobe": 4, "rerank": 4, "recall": 0.971})
    assert (built.recall, built.reranked, built.memory) == (0.971, 40, assumption.memory)
    assert built.search_seconds == pytest.approx(assumption.search_seconds / 2, rel=0.05)


@pytest.mark.parametrize(("factory", "vectors"), [("IVF4096,Flat", 1000), ("OPQ8_16,IVF4,PQ8", 200)])
def test_too_few_vectors_for_the_centroids_are_an_obstacle(factory, vectors):
    (obstacle,) = estimate(factory, 32, vectors, 400).obstacles(recall_floor=0.5)
    assert obstacle.startswith(f"{vectors:,} vectors are too few")
    assert estimate(factory, 32, 10**6, 400).obstacles(recall_floor=0.5) == []


def test_a_type_that_faiss_does_not_make_is_refused():
    with pytest.raises(InputError, match="factory=HNWS32"):
        estimate("HNWS32", 32, 100, 400)
