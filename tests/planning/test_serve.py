"""`infembed plan serve`: its queues against a simulation, what it chooses, what it prints, what it refuses."""

import heapq
import json
import math

import numpy as np
import pytest

from infembed_ray.cli.main import main
from infembed_ray.config.planning import PlanServeSettings
from infembed_ray.errors import InputError
from infembed_ray.planning.serve import plan, wait

MILLION = {"model": "intfloat/e5-base-v2", "passages": 10**6, "qps": 50}


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (3, 0.8), (12, 0.9)])
def test_waits_are_those_of_a_simulated_queue(servers, load):
    service, calls = 0.02, 200_000
    rate = load * servers / service
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / rate, calls))
    free = [0.0] * servers
    waits = []
    for arrival, needed in zip(arrivals, rng.exponential(service, calls), strict=True):
        start = max(arrival, heapq.heappop(free))
        heapq.heappush(free, start + needed)
        waits.append(start - arrival)
    assert wait(servers, service, rate, 0.01) == pytest.approx(np.quantile(waits, 0.99), rel=0.1)


def test_waits_of_one_server_by_hand_and_of_one_that_cannot_cope():
    assert wait(1, 0.01, 60, 0.01) == pytest.approx(math.log(0.6 / 0.01) / (100 - 60))
    assert wait(1, 0.01, 0.001, 0.01) == 0.0
    assert wait(2, 0.01, 200, 0.01) == math.inf


@pytest.fixture(scope="module")
def report():
    return plan(PlanServeSettings.from_mapping(MILLION))


def test_the_cheapest_that_fits_is_chosen_and_answers_in_time(report):
    best = report.options[report.chosen]
    assert best.usd_month == min(o.usd_month for o in report.options if not o.obstacles)
    assert best.p99 == pytest.approx(sum(tier.p99 for tier in best.tiers))
    assert best.p99 <= 0.25
    assert all(tier.replicas >= 2 for tier in best.tiers)
    assert best.nodes >= 2
    assert best.shard.recall >= 0.95
    for option in report.options:
        late, poor = option.p99 > 0.25, option.shard.recall < 0.95
        assert not (late or poor) or option.obstacles


@pytest.mark.integration
def test_more_searches_or_less_time_or_more_passages_cost_more(report):
    def usd(**change):
        made = plan(
            PlanServeSettings.from_mapping(MILLION | {"dimensions": 768, "factory": "HNSW32", "shards": 4} | change)
        )
        return made.options[made.chosen].usd_month

    usual = usd()
    assert usual >= report.options[report.chosen].usd_month
    assert usd(qps=500) > usual
    assert usd(p99_ms=15) > usual
    assert usd(passages=10**8) > usual
    assert usd(least_replicas=1, qps=1) < usual


def test_a_model_too_slow_for_cpus_is_encoded_on_gpus():
    made = plan(PlanServeSettings.from_mapping({"model": "Qwen/Qwen2.5-7B", "dtype": "bfloat16", "passages": 10**6}))
    best = made.options[made.chosen]
    assert [tier.gpus for tier in best.tiers] == [0, 1, 0]
    assert best.gpus == best.tiers[1].replicas >= 2
    assert "gpus_per_encoder=1" in best.overrides


def test_text_and_json_agree(capsys):
    arguments = ["plan", "serve", *(f"{k}={v}" for k, v in MILLION.items()), "shards=2", "dimensions=768"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    best = values["options"][values["chosen"]]
    assert "collections" not in text
    assert main([*arguments, "collections.news=runs/news"]) == 0
    assert "Not planned: the collections news." in capsys.readouterr().out
    assert f"Cheapest that fits: shards=2 dimensions=768 factory={best['shard']['factory']}; ingress_replicas=" in text
    assert f"{best['usd_month']:,.0f} USD a month; p99 {1e3 * best['p99']:.0f} ms" in text
    for tier in best["tiers"]:
        assert f"{tier['name']}: {tier['deployments'] * tier['replicas']} replicas of " in text
        assert f"{tier['busy']:.0%} busy, p99 {1e3 * tier['p99']:.1f} ms" in text


def test_a_plan_that_fits_nowhere_prints_a_remedy(capsys):
    assert main(["plan", "serve", *(f"{k}={v}" for k, v in MILLION.items()), "p99_ms=1", "shards=1"]) == 0
    text = capsys.readouterr().out
    assert "Nothing fits. Nearest: shards=1 " in text
    assert "p99 of" in text.splitlines()[-1]
    assert "Set a higher p99_ms" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "model is missing"),
        ({"device": "l40s"}, "^device=l40s: not in planning/hardware.yaml: did you mean l40s-48g"),
        ({"dimensions": 1000}, "dimensions=1000: the model has 768"),
        ({"index": "/no/index"}, "index=/no/index: no such file or directory"),
        ({"qps": 0}, "qps=0"),
    ],
)
def test_bad_input_is_one_line(change, message):
    with pytest.raises(InputError, match=message) as found:
        plan(PlanServeSettings.from_mapping(MILLION | change))
    assert "\n" not in str(found.value)
