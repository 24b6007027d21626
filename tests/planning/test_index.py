"""`infembed plan index`: shards against FAISS's own memory and sums by hand, what it chooses, that the build agrees."""

import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.cli.main import main
from infembed_ray.config.planning import PlanIndexSettings
from infembed_ray.errors import InputError
from infembed_ray.planning.index import estimate, plan
from infembed_ray.planning.memory import GIB
from infembed_ray.retrieval import factory as factories

MILLION = {"model": "intfloat/e5-base-v2", "passages": 10**6}


@pytest.mark.integration
@settings(max_examples=20)
@given(st.integers(1, 10**9), st.sampled_from([256, 384, 768, 3584]))
def test_memory_is_what_the_build_chooses_by(vectors, dimension):
    for factory in factories.candidates(vectors):
        planned = estimate(factory, dimension, vectors, 400)
        assert planned.memory == pytest.approx(factories.memory(factory, dimension, vectors), rel=1e-6)


def test_sizes_of_a_seven_b_model_by_hand():
    graph = estimate("HNSW32", 3584, 10**7, 400)
    assert graph.memory == pytest.approx(10**7 * (4 * 3584 + 8 * 32 + 16), rel=0.002)
    assert graph.disk == pytest.approx(graph.memory + 10**7 * 456, rel=0.002)
    codes = estimate("IVF65536_HNSW32,RaBitQ", 3584, 10**9, 400)
    assert codes.memory == pytest.approx(10**9 * 464, rel=0.01)
    assert codes.disk == pytest.approx(codes.memory + 10**9 * (456 + 2 * 3584))  # the vectors, for reranking
    half = estimate("HNSW32_SQfp16", 3584, 10**7, 400)
    assert half.memory == pytest.approx(graph.memory - 10**7 * 2 * 3584)
    assert half.disk == pytest.approx(half.memory + 10**7 * 456, rel=0.002)
    sample = factories.TRAINING_POINTS * 65536
    assert codes.peak == pytest.approx(codes.memory + 4 * 3584 * sample)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("memory_gib", [None, 2.0, 0.5])
def test_the_build_agrees(shards, memory_gib):
    made = plan(PlanIndexSettings.from_mapping(MILLION | {"shards": shards, "memory_gib": memory_gib}))
    vectors = math.ceil(10**6 / shards)
    assert made.chosen == factories.choose(vectors, 768, memory_gib, shards)
    (chosen,) = (shard for shard in made.types if shard.factory == made.chosen)
    assert memory_gib is None or chosen.memory <= memory_gib * GIB


def test_text_and_json_agree(capsys):
    arguments = ["plan", "index", "model=intfloat/e5-base-v2", "passages=1000000"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert re.search(rf"^>  {re.escape(values['chosen'])} ", text, re.MULTILINE)
    assert [shard["factory"] for shard in values["types"]][-1] == "Flat"


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"dimensions": 1000}, "dimensions"),
        ({"factory": "HNWS32"}, "factory"),
        ({"factory": "HNSW32", "memory_gib": 0.1}, "memory_gib"),
        ({"model": "/no/model"}, "/no/model"),
        ({"pasages": 10}, "pasages"),
    ],
)
def test_bad_input_names_the_setting(change, setting):
    with pytest.raises(InputError) as error:
        plan(PlanIndexSettings.from_mapping(MILLION | change))
    assert setting in str(error.value)
