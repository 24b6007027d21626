"""`infembed plan index`: sizes of a shard by hand and against the memory by which the build chooses, and what it chooses."""

import json
import math
import re

import pytest

from infembed_ray.cli.main import main
from infembed_ray.config.planning import PlanIndexSettings
from infembed_ray.errors import InputError
from infembed_ray.planning.index import plan, shard_size
from infembed_ray.retrieval import faiss_index as factories
from infembed_ray.storage.steps import GIB


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


MILLION = {"model": "intfloat/e5-base-v2", "passages": 10**6}


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("memory_gib", [None, 2.0, 0.5])
def test_the_build_agrees(shards, memory_gib):
    planned = plan(PlanIndexSettings.from_mapping(MILLION | {"shards": shards, "memory_gib": memory_gib}))
    assert planned.chosen == factories.choose(math.ceil(10**6 / shards), 768, memory_gib, shards)
    (chosen,) = (sizes for sizes in planned.types if sizes.factory == planned.chosen)
    assert memory_gib is None or chosen.memory <= memory_gib * GIB * shards


def test_text_and_json_agree(capsys):
    arguments = ["plan", "index", "model=intfloat/e5-base-v2", "passages=1000000"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert re.search(rf"^>  {re.escape(values['chosen'])} ", text, re.MULTILINE)
    assert values["types"][-1]["factory"] == "Flat"


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"dimensions": 1000}, "dimensions"),
        ({"factory": "HNWS32"}, "factory"),
        ({"factory": "HNSW32", "memory_gib": 0.1}, "memory_gib"),
        ({"model": "/no/model"}, "model"),
        ({"pasages": 10}, "pasages"),
    ],
)
def test_bad_input_names_the_setting(change, setting):
    with pytest.raises(InputError) as error:
        plan(PlanIndexSettings.from_mapping(MILLION | change))
    assert [fault.setting for fault in error.value.faults] == [setting]
