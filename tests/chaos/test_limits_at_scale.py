"""Limits at full size, by the server's own count: eight actors in processes, over HTTP."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.llm import prices
from infembed_ray.storage.steps import Published
from infembed_ray.synthesis.distributed import run
from tests.chaos.seeds import write_seeds
from tests.support.stand_in_llm import StandIn
from tests.support.stand_in_llm import stand_in_process as stand_in

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

MODELS = {
    "generator": {"model": "gpt-4o-mini", "temperature": 1.0, "max_tokens": 300},
    "judge": {"model": "o4-mini", "max_tokens": 500},
}


def synthesize(seeds: Path, output: Path, server: StandIn, **values: Any) -> Published:
    endpoint = {"base_url": server.url, "api_key_env": None, "timeout_s": 10}
    given = {"seeds": str(seeds), "output": str(output), "endpoint": endpoint, "actors": 8, "in_flight": 16}
    return run(SynthesizeSettings.from_mapping({**given, **MODELS, **values}))


def spent_usd(log: list[dict[str, Any]]) -> float:
    """Return the price of everything that the server answered, including answers that never arrived."""
    table = prices.load()
    usd = 0.0
    for entry in log:
        for_prompt, for_answer, *_ = table.price(entry["model"]) or (math.nan, math.nan)
        usd += (for_prompt * entry.get("prompt_tokens", 0) + for_answer * entry.get("completion_tokens", 0)) / 1e6
    return usd


def ended(log: list[dict[str, Any]]) -> dict[str, int]:
    return dict(Counter(entry["ended"] for entry in log))


def test_a_budget_for_1000_calls_holds_in_a_storm_of_429s(ray_cluster: None, tmp_path: Path) -> None:
    seeds = write_seeds(tmp_path / "seeds.jsonl", 400)
    with stand_in(latency_s=0.2) as server:
        synthesize(seeds, tmp_path / "sample", server, limit=100)
        usd_per_call = spent_usd(server.log()) / len(server.log("answered"))
    budget = 1000 * usd_per_call
    out = tmp_path / "out"
    with stand_in(latency_s=0.2, jitter_s=0.1, rate_limited=0.5, retry_after_s=0.2, truncated=0.01) as server:
        with pytest.raises(
            InputError, match=r"used up .* of 400 seeds are left undone and nothing is published"
        ) as stopped:
            synthesize(seeds, out, server, limits={"budget_usd": budget})
        first = server.log()
        print(f"\nbudget {budget:.4f} USD (1,000 calls); the server counts {spent_usd(first):.4f}; {ended(first)}")
        print(stopped.value)
        assert 0.75 * budget < spent_usd(first) <= budget  # truncated answers count at their worst case
        with pytest.raises(InputError, match="used up"):
            synthesize(seeds, out, server, limits={"budget_usd": budget})
        first = server.log()
        assert spent_usd(first) <= budget
    with stand_in(latency_s=0.02) as calm:
        whole = synthesize(seeds, out, calm, limits={"budget_usd": 10 * budget})
        log = first + calm.log()
        print(f"raised and resumed: the servers count {spent_usd(log):.4f}; {ended(log)}; {whole.manifest['counts']}")
        assert spent_usd(log) <= 10 * budget
        assert max(Counter(entry["request"] for entry in log if entry["ended"] == "answered").values()) == 1
    counts = whole.manifest["counts"]
    assert counts["kept"] + counts["rejected"] + counts["dead_letter"] == 400


@pytest.mark.parametrize(
    ("limits", "seeds"),
    [
        ({"requests_per_minute": 6000, "window_s": 12}, 700),
        ({"tokens_per_minute": 1_500_000, "window_s": 12}, 700),
    ],
    ids=["requests", "tokens"],
)
def test_no_window_holds_more_than_its_part_and_nearly_all_is_used(
    ray_cluster: None, tmp_path: Path, limits: dict[str, int], seeds: int
) -> None:
    window_s = limits["window_s"]
    allowed = next(iter(limits.values())) * window_s / 60
    with stand_in(latency_s=0.1, jitter_s=0.05) as server:
        synthesize(write_seeds(tmp_path / "seeds.jsonl", seeds), tmp_path / "out", server, limits=limits)
        log = sorted(server.log(), key=lambda entry: entry["arrived"])
    requests = "requests_per_minute" in limits
    arrivals = [(e["arrived"], 1 if requests else e["prompt_tokens"] + e["completion_tokens"]) for e in log]
    most = within = first = 0
    for arrived, amount in arrivals:
        within += amount
        while arrivals[first][0] <= arrived - window_s:
            within -= arrivals[first][1]
            first += 1
        most = max(most, within)
    began, last = arrivals[0][0], arrivals[-1][0]
    windows = math.floor((last - began) / window_s)
    used = sum(amount for at, amount in arrivals if at < began + windows * window_s) / (windows * allowed)
    print(f"\n{limits}: {len(log)} requests in {last - began:.1f} s; most in any window {most} of {allowed:.0f}; ")
    print(f"used {used:.4f} over {windows} whole windows")
    assert windows >= 2
    assert most <= allowed
    assert used >= 0.95
