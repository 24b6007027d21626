"""`infembed plan index`: what it chooses, that the build agrees, what it prints, what it refuses."""

import json
import math

import pytest

from infembed_ray.cli import main
from infembed_ray.config import PlanIndexSettings
from infembed_ray.errors import InputError
from infembed_ray.planning.capacity import GIB
from infembed_ray.planning.index import plan
from infembed_ray.retrieval import factory as types

BILLION = {"model": "Qwen/Qwen2.5-7B", "passages": 10**9}
MILLION = {"model": "intfloat/e5-base-v2", "passages": 10**6}


@pytest.fixture(scope="module")
def billion():
    return plan(PlanIndexSettings.of(BILLION))


def test_the_cheapest_that_fits_is_chosen(billion):
    best = billion.options[billion.chosen]
    assert best.usd_month == min(o.usd_month for o in billion.options if not o.obstacles)
    assert best.dimension == 3584
    assert best.recall >= 0.95
    assert best.shards * best.vectors >= 10**9
    whole = [o for o in billion.options if o.factory == "HNSW32" and o.dimension == 3584]
    assert min(o.memory[-1].value * o.shards for o in whole) == pytest.approx(14.6e12, rel=0.01)


def test_encoding_is_tokens_over_rate(billion):
    tokens, rate, hours, usd = (line.value for line in billion.encoding)
    assert tokens == 75 * 10**9
    assert rate == pytest.approx(0.4 * 312e12 / (2 * 6.53e9), rel=0.02)  # forward only, the embeddings looked up
    assert hours == pytest.approx(tokens / rate / 8 / 3600)
    assert usd == pytest.approx(hours * 8 * 3.4)
    measured = plan(PlanIndexSettings.of(MILLION | {"tokens_per_s": 1e5}))
    assert measured.speed == "measured"
    assert measured.encoding[1].value == 1e5


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("memory_gib", [None, 2.0, 0.3])
def test_the_build_agrees(shards, memory_gib):
    made = plan(PlanIndexSettings.of(MILLION | {"shards": shards, "memory_gib": memory_gib}))
    asked = made.options[made.asked]
    assert asked.factory == types.choose(math.ceil(10**6 / shards), 768, memory_gib, shards)
    assert memory_gib is None or asked.memory[-1].value <= memory_gib * GIB
    others = {o.factory for o in made.options if o.dimension == 768} - {asked.factory}
    assert others - {"Flat"} <= set(types.candidates(math.ceil(10**6 / shards), 768))


def test_fewer_dimensions_are_chosen_only_of_a_model_trained_for_them(billion):
    assert {o.dimension for o in billion.options} == {3584, 1024, 512, 256}
    assert all("matryoshka=[512]" in o.obstacles[0] for o in billion.options if o.dimension == 512)
    made = plan(PlanIndexSettings.of(BILLION | {"matryoshka": [512]}))
    best = made.options[made.chosen]
    assert best.dimension == 512
    assert best.usd_month < billion.options[billion.chosen].usd_month


def test_what_fits_nowhere_is_told_with_a_remedy(capsys):
    arguments = ["passages=1000000000", "dimensions=3584", "factory=HNSW32", "shards=2", "node=r6i.4xlarge"]
    assert main(["plan", "index", "model=Qwen/Qwen2.5-7B", *arguments]) == 0
    text = capsys.readouterr().out
    assert "Nothing fits. Nearest: shards=2 dimensions=3584 factory=HNSW32: a shard" in text
    assert "GiB of 115 on r6i.4xlarge. Set more shards" in text
    assert main(["plan", "index", "model=intfloat/e5-base-v2", "shards=1", "memory_gib=0.01"]) == 0
    assert "`infembed index` would refuse: memory_gib=0.01" in capsys.readouterr().out


def test_text_and_json_say_the_same(capsys):
    arguments = ["plan", "index", "model=intfloat/e5-base-v2", "passages=1000000"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    best = values["options"][values["chosen"]]
    assert f"Cheapest that fits: shards={best['shards']} dimensions=768 factory={best['factory']}:" in text
    assert f"{best['nodes']} x {best['node']}, {best['usd_month']:,.0f} USD a month" in text
    for line in best["memory"]:
        assert line[0] in text  # what each line of the arithmetic gives
    assert "(assumed)" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimensions": 1000}, "dimensions=1000: the model has 768"),
        ({"matryoshka": [256, 1000]}, "matryoshka=1000: the model has 768"),
        ({"node": "r6i.4xlareg"}, "node=r6i.4xlareg: not in planning/hardware.yaml: did you mean r6i.4xlarge"),
        ({"factory": "HNWS32"}, "factory=HNWS32"),
        ({"model": "/no/model"}, "/no/model"),
        ({"pasages": 10}, "unknown key pasages: did you mean passages"),
    ],
)
def test_bad_input_is_one_line(change, message):
    with pytest.raises(InputError, match=message) as found:
        plan(PlanIndexSettings.of(MILLION | change))
    assert "\n" not in str(found.value)
