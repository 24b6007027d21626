"""Sizes of a shard by hand, and against the memory by which the build chooses."""

import pytest

from infembed_ray.planning.index import shard_size
from infembed_ray.retrieval import faiss_index as factories


def test_sizes_of_a_seven_b_model_by_hand():
    memory, disk = shard_size("HNSW32", 3584, 10**7, 400)
    assert memory == pytest.approx(10**7 * (4 * 3584 + 8 * 32 + 16), rel=0.002)
    assert disk == pytest.approx(memory + 10**7 * 456, rel=0.002)
    codes, with_vectors = shard_size("IVF65536_HNSW32,RaBitQ", 3584, 10**9, 400)
    assert codes == pytest.approx(10**9 * 464, rel=0.01)
    assert with_vectors == pytest.approx(codes + 10**9 * (456 + 2 * 3584))  # the vectors, for reranking
    half, on_disk = shard_size("HNSW32_SQfp16", 3584, 10**7, 400)
    assert half == pytest.approx(memory - 10**7 * 2 * 3584)
    assert on_disk == pytest.approx(half + 10**7 * 456, rel=0.002)


@pytest.mark.parametrize("vectors", [100, 10**6, 10**9])
def test_memory_is_what_the_build_chooses_by(vectors):
    for factory in factories.candidates(vectors):
        assert shard_size(factory, 384, vectors, 400)[0] == factories.memory(factory, 384, vectors)
