"""Limits at full size, by the server's own count: eight actors in processes, over HTTP."""

import math
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.config.synthesis import SynthesizeSettings
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
