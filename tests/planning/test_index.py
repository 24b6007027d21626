"""`infembed plan index`: shards against FAISS's own memory and sums by hand, what it chooses, that the build agrees."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.cli.main import main
from infembed_ray.config.planning import PlanIndexSettings
from infembed_ray.errors import InputError
from infembed_ray.planning import index
from infembed_ray.planning.index import BUILD_THREADS, GEMM_FLOPS, estimate, plan
from infembed_ray.planning.memory import GIB
from infembed_ray.retrieval import factory as factories

BILLION = {"model": "Qwen/Qwen2.5-7B", "passages": 10**9}
MILLION = {"model": "intfloat/e5-base-v2", "passages": 10**6}


@pytest.fixture(scope="module")
def billion():
    return plan(PlanIndexSettings.from_mapping(BILLION))


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
    sample = factories.TRAINING_POINTS * 65536
    assert codes.peak == pytest.approx(codes.memory + 4 * (3584 + 1792) * sample)


def test_build_seconds_by_hand():
    vectors, lists, d = 10**6, 4096, 768
    sample = factories.TRAINING_POINTS * lists
    flops = 2 * d * lists * (10 * sample + vectors)
    hours = flops / GEMM_FLOPS / BUILD_THREADS / 3600
    assert estimate("IVF4096,Flat", d, vectors, 400).build_hours == pytest.approx(hours)
    read = index.RANDOM_READ_S + 4 * d / index.GRAPH_BYTES_PER_S
    graph = vectors * index.GRAPH_BUILD_READS * math.log2(vectors) * read / BUILD_THREADS / 3600
    assert estimate("HNSW32", d, vectors, 400).build_hours == pytest.approx(graph)
    assert estimate("Flat", d, vectors, 400).build_hours == 0


@pytest.mark.parametrize(("factory", "vectors"), [("IVF4096,Flat", 1000), ("OPQ8_16,IVF4,PQ8", 200)])
def test_too_few_vectors_for_the_centroids_are_an_obstacle(factory, vectors):
    (obstacle,) = estimate(factory, 32, vectors, 400).obstacles(recall_floor=0.5)
    assert obstacle.startswith(f"{vectors:,} vectors are too few")
    assert estimate(factory, 32, 10**6, 400).obstacles(recall_floor=0.5) == []


@pytest.mark.integration
def test_encoding_is_tokens_over_rate(billion):
    encoding = billion.encoding
    assert encoding.tokens == 75 * 10**9
    assert encoding.tokens_per_s == pytest.approx(0.4 * 312e12 / (2 * 6.53e9), rel=0.02)  # forward, no embeddings
    assert encoding.gpu_hours == pytest.approx(encoding.tokens / encoding.tokens_per_s / 3600)
    assert encoding.usd == pytest.approx(encoding.gpu_hours * 3.4)
    measured = plan(PlanIndexSettings.from_mapping(MILLION | {"tokens_per_s": 1e5})).encoding
    assert (measured.assumed, measured.tokens_per_s) == (False, 1e5)


@pytest.mark.integration
def test_a_layout_has_the_fewest_shards_that_fit(billion):
    best = billion.layouts[billion.chosen]
    assert best.shard.factory == "HNSW32_SQfp16"
    assert best.shards * best.shard.vectors >= 10**9
    fewer = estimate("HNSW32_SQfp16", 3584, math.ceil(2 * 10**9 / best.shards), 400)
    assert fewer.build_hours > index.LONGEST_BUILD_H >= best.shard.build_hours


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("memory_gib", [None, 2.0, 0.3])
def test_the_build_agrees(shards, memory_gib):
    made = plan(PlanIndexSettings.from_mapping(MILLION | {"shards": shards, "memory_gib": memory_gib}))
    vectors = math.ceil(10**6 / shards)
    assert [layout.shard.dimension for layout in made.layouts] == [768] * len(made.layouts)
    as_set = [layout for layout in made.layouts if layout.shards == shards and not layout.obstacles]
    assert as_set[0].shard.factory == factories.choose(vectors, 768, memory_gib, shards)
    assert memory_gib is None or as_set[0].shard.memory <= memory_gib * GIB


def test_a_plan_that_fits_nowhere_prints_a_remedy(capsys):
    arguments = ["passages=1000000000", "dimensions=3584", "factory=HNSW32", "shards=1024", "memory_gib=10"]
    assert main(["plan", "index", "model=Qwen/Qwen2.5-7B", *arguments]) == 0
    text = capsys.readouterr().out
    assert "Nothing fits. Nearest: shards=1024 dimensions=3584 factory=HNSW32: a shard takes" in text
    assert "GiB of 10. Set more shards" in text


def test_text_and_json_agree(capsys):
    arguments = ["plan", "index", "model=intfloat/e5-base-v2", "passages=1000000"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    best = values["layouts"][values["chosen"]]
    assert f"First that fits: shards={best['shards']} dimensions=768 factory={best['shard']['factory']}:" in text
    assert "(assumed)" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimensions": 1000}, "dimensions=1000: the model has 768"),
        ({"gpu": "a100"}, "gpu=a100: unknown GPU; did you mean a100-80g"),
        ({"factory": "HNWS32"}, "factory=HNWS32"),
        ({"model": "/no/model"}, "/no/model"),
        ({"pasages": 10}, "pasages: unknown key; did you mean passages"),
    ],
)
def test_bad_input_is_one_line(change, message):
    with pytest.raises(InputError, match=message) as raised:
        plan(PlanIndexSettings.from_mapping(MILLION | change))
    assert "\n" not in str(raised.value)
