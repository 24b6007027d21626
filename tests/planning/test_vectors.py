"""Bytes of FAISS types against FAISS itself, and seconds against sums by hand."""

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.planning.vectors import IndexType
from infembed_ray.retrieval import factory as types
from infembed_ray.retrieval.shards import ShardFacts


@pytest.mark.parametrize(
    "factory", ["Flat", "HNSW32", "HNSW16", "IVF16,Flat", "IVF64_HNSW32,Flat", "RR16,IVF16,PQ2", "IVF16,SQ8"]
)
def test_memory_is_what_faiss_writes(factory):
    vectors = np.random.default_rng(0).standard_normal((2000, 32)).astype(np.float32)
    index = faiss.index_factory(32, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors[:500])
    index.add(vectors)
    written = len(faiss.serialize_index(index))
    assert IndexType.of(factory, 32).memory(len(vectors))[-1].value == pytest.approx(written, rel=0.02)


@given(st.integers(1, 10**9), st.sampled_from([256, 384, 768, 3584]))
def test_memory_is_what_the_build_chooses_by(vectors, dimension):
    for factory in types.candidates(vectors, dimension):
        planned = IndexType.of(factory, dimension).memory(vectors)
        assert planned[-1].value == pytest.approx(types.memory(factory, dimension, vectors), rel=1e-6)
        assert planned[-1].value == pytest.approx(sum(line.value for line in planned[1:-1]))


def test_seven_b_by_hand():
    graph = IndexType.of("HNSW32", 3584)
    assert graph.memory(10**7)[0].value == pytest.approx(4 * 3584 + 8 * 32, rel=0.002)
    assert graph.memory(10**7)[-1].value == pytest.approx(146e9, rel=0.002)
    assert graph.disk(10**7, 400)[-1].value == pytest.approx(146e9 + 10**7 * 456, rel=0.002)
    codes = IndexType.of("OPQ448_1792,IVF65536_HNSW32,PQ448", 3584)
    assert codes.memory(10**9)[0].value == 448 + 8
    assert codes.disk(10**9, 400)[-1].value > 4 * 3584 * 10**9  # the vectors themselves, to rank candidates again
    assert codes.training(10**9) == types.TRAINING_POINTS * 65536


def test_searches_read_what_their_type_reads():
    rates = {"exact": 3e9, "codes": 1e9}
    assert IndexType.of("Flat", 768).search(10**6, "cpu")[-1].value == pytest.approx(4 * 768 * 10**6 / rates["exact"])
    lists = IndexType.of("IVF4096,Flat", 768).search(10**6, "cpu")
    assert lists[0].value == pytest.approx(4096 * 4 * 768 / rates["exact"])
    assert lists[1].value == pytest.approx(10**6 * 4 * 768 * 64 / 4096 / rates["exact"])
    assert IndexType.of("Flat", 768).search(10**6, "gpu", 1e12)[-1].value == pytest.approx(4 * 768 * 10**6 / 0.6e12)
    seconds = [IndexType.of("HNSW32", 768).search(n, "cpu")[-1].value for n in (10**5, 10**6, 10**8)]
    assert seconds[0] < seconds[1] < seconds[2] < 2 * seconds[0]  # by the logarithm


def test_what_a_build_found_takes_the_place_of_assumptions():
    found = {"nprobe": 32, "rerank": 4}
    facts = ShardFacts("shard-00000", 10**6, "OPQ8_16,IVF64,PQ8", found, 0.971, 0, {})
    of = IndexType.of(facts.factory, 32)
    built = of.as_built(facts)
    assert (built.recall, built.probes, built.reranked) == (0.971, 32, 40)
    assert built.search(10**6, "cpu")[1].value == pytest.approx(of.search(10**6, "cpu")[1].value / 2)
    assert built.memory(10**6) == of.memory(10**6)


@pytest.mark.parametrize(("factory", "vectors"), [("IVF4096,Flat", 1000), ("OPQ8_16,IVF4,PQ8", 200), ("HNSW32", 2**31)])
def test_too_few_or_too_many_vectors_are_an_obstacle(factory, vectors):
    of = IndexType.of(factory, 32)
    assert of.obstacle(vectors)
    assert of.obstacle(10**6) is None


def test_a_type_that_faiss_does_not_make_is_refused():
    with pytest.raises(InputError, match="factory=HNWS32"):
        IndexType.of("HNWS32", 32)
