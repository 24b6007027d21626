"""`infembed plan index`: what it chooses, that the build agrees, what it prints, what it refuses."""

import json
import math

import pytest

from infembed_ray.cli.main import main
from infembed_ray.config.planning import PlanIndexSettings
from infembed_ray.errors import InputError
from infembed_ray.planning.capacity import GIB
from infembed_ray.planning.index import plan
from infembed_ray.retrieval import factory as factories

BILLION = {"model": "Qwen/Qwen2.5-7B", "passages": 10**9}
MILLION = {"model": "intfloat/e5-base-v2", "passages": 10**6}


@pytest.fixture(scope="module")
def billion():
    return plan(PlanIndexSettings.from_mapping(BILLION))


def test_the_cheapest_that_fits_is_chosen(billion):
    best = billion.options[billion.chosen]
    assert best.usd_month == min(o.usd_month for o in billion.options if not o.obstacles)
    assert best.shard.dimension == 3584
    assert best.shard.recall >= 0.95
    assert best.shards * best.shard.vectors >= 10**9
    whole = [o for o in billion.options if o.shard.factory == "HNSW32_SQfp16"]
    assert min(o.shard.memory * o.shards for o in whole) == pytest.approx(7.44e12, rel=0.01)


def test_encoding_is_tokens_over_rate(billion):
    encoding = billion.encoding
    assert encoding["tokens"] == 75 * 10**9
    assert encoding["tokens_per_s"] == pytest.approx(0.4 * 312e12 / (2 * 6.53e9), rel=0.02)  # forward, no embeddings
    assert encoding["hours"] == pytest.approx(encoding["tokens"] / encoding["tokens_per_s"] / 8 / 3600)
    assert encoding["usd"] == pytest.approx(encoding["hours"] * 8 * 3.4)
    measured = plan(PlanIndexSettings.from_mapping(MILLION | {"tokens_per_s": 1e5})).encoding
    assert (measured["speed"], measured["tokens_per_s"]) == ("measured", 1e5)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("memory_gib", [None, 2.0, 0.3])
def test_the_build_agrees(shards, memory_gib):
    made = plan(PlanIndexSettings.from_mapping(MILLION | {"shards": shards, "memory_gib": memory_gib}))
    asked = made.options[made.asked]
    vectors = math.ceil(10**6 / shards)
    assert asked.shard.factory == factories.choose(vectors, 768, memory_gib, shards)
    assert memory_gib is None or asked.shard.memory <= memory_gib * GIB
    assert {o.shard.factory for o in made.options} == {"Flat", *factories.candidates(vectors, 768)}


@pytest.mark.integration
def test_fewer_dimensions_are_chosen_only_of_a_model_trained_for_them(billion):
    assert {o.shard.dimension for o in billion.options} == {3584}
    made = plan(PlanIndexSettings.from_mapping(BILLION | {"matryoshka": [512]}))
    best = made.options[made.chosen]
    assert best.shard.dimension == 512
    assert best.usd_month < billion.options[billion.chosen].usd_month


@pytest.mark.integration
def test_a_plan_that_fits_nowhere_prints_a_remedy(capsys):
    arguments = ["passages=1000000000", "dimensions=3584", "factory=HNSW32", "shards=2", "node=r6i.4xlarge"]
    assert main(["plan", "index", "model=Qwen/Qwen2.5-7B", *arguments]) == 0
    text = capsys.readouterr().out
    assert "Nothing fits. Nearest: shards=2 dimensions=3584 factory=HNSW32: a shard" in text
    assert "GiB of 115.2 on r6i.4xlarge. Set more shards" in text
    assert main(["plan", "index", "model=intfloat/e5-base-v2", "shards=1", "memory_gib=0.01"]) == 0
    assert "`infembed index` would refuse: memory_gib=0.01" in capsys.readouterr().out


def test_text_and_json_agree(capsys):
    arguments = ["plan", "index", "model=intfloat/e5-base-v2", "passages=1000000"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    best = values["options"][values["chosen"]]
    assert f"Cheapest that fits: shards={best['shards']} dimensions=768 factory={best['shard']['factory']}:" in text
    assert f"{best['nodes']} x {best['node']}, {best['usd_month']:,.0f} USD a month" in text
    assert "(assumed)" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimensions": 1000}, "dimensions=1000: the model has 768"),
        ({"matryoshka": [256, 1000]}, "matryoshka=1000: the model has 768"),
        ({"node": "r6i.4xlareg"}, "node=r6i.4xlareg: not in planning/hardware.yaml: did you mean r6i.4xlarge"),
        ({"factory": "HNWS32"}, "factory=HNWS32"),
        ({"model": "/no/model"}, "/no/model"),
        ({"pasages": 10}, "pasages: unknown key; did you mean passages"),
    ],
)
def test_bad_input_is_one_line(change, message):
    with pytest.raises(InputError, match=message) as found:
        plan(PlanIndexSettings.from_mapping(MILLION | change))
    assert "\n" not in str(found.value)
