"""The limits of whole runs."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.llm import budget, prices
from infembed_ray.synthesis import distributed
from infembed_ray.synthesis.coordinator import Coordinator
from infembed_ray.synthesis.distributed import run
from tests.support.stand_in_llm import StandIn, stand_in
from tests.support.waiting import wait_until
from tests.synthesis.runs import REPOSITORY, Held, alive, answered_most, settings


@pytest.fixture(autouse=True)
def no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let actors use Ray's idle workers; an actor that drains costs a new process (see test_driver_watch)."""
    monkeypatch.setattr(distributed, "this_process", lambda: None)


PRICES = "as_of: 2026-01-01\nmodels: {gpt-4o-mini: [1.0, 2.0], o4-mini: [10.0, 40.0]}\n"
BOUNDED = {"generator": {"model": "gpt-4o-mini", "max_tokens": 150}, "judge": {"model": "o4-mini", "max_tokens": 50}}


def spent_usd(server: StandIn) -> float:
    """Return the server's own count, including answers that never arrived."""
    price = {"gpt-4o-mini": (1e-6, 2e-6), "o4-mini": (10e-6, 40e-6)}
    return sum(
        price[entry["model"]][0] * entry["prompt_tokens"] + price[entry["model"]][1] * entry["completion_tokens"]
        for entry in server.log()
        if "prompt_tokens" in entry
    )


def test_nothing_is_asked_about_parameters_that_may_exceed_the_budget(seeds: Path, tmp_path: Path) -> None:
    model = {"model": "gpt-4o-mini", "max_tokens": 64}
    with stand_in() as server:
        given = settings(seeds, tmp_path, server, generator=model, judge=model, limits={"budget_usd": 0.01})
        refused = Coordinator(given, 0.00999, tmp_path / "journal", tmp_path / "tasks").dialects()
        assert str(refused).startswith("limits.budget_usd=0.01: used up (0.0100 USD spent; to find out")
        assert not server.log()
        assert Coordinator(given, 0.0, tmp_path / "journal", tmp_path / "tasks").dialects() == ({"gpt-4o-mini": {}},)


@pytest.mark.ray
def test_all_actors_keep_the_budget_and_a_higher_budget_resumes(ray_cluster: None, seeds: Path, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    out, shared = tmp_path / "out", {**BOUNDED, "prices": str(tmp_path / "prices.yaml"), "actors": 4, "in_flight": 8}
    with stand_in(latency_s=0.1, rate_limited=0.3, retry_after_s=0.05, truncated=0.02) as server:
        with pytest.raises(InputError) as stopped:
            run(settings(seeds, out, server, **shared, limits={"budget_usd": 0.2}))
        message, spent = str(stopped.value), spent_usd(server)
        assert "\n" not in message
        assert message.startswith("limits.budget_usd=0.2: used up (0.1")
        assert "of 64 seeds are left undone and nothing is published" in message
        assert not (out / "latest").exists()
        assert 0.12 < spent <= 0.2

        with pytest.raises(InputError, match=r"budget_usd=0\.2: used up"):
            run(settings(seeds, out, server, **shared, limits={"budget_usd": 0.2}))
        assert spent_usd(server) <= 0.2

        whole = run(settings(seeds, out, server, **shared, limits={"budget_usd": 20}))
        assert answered_most(server) == 1
        assert whole.manifest["usd"] + whole.manifest["usd_replayed"] <= spent_usd(server)
    counts = whole.manifest["counts"]
    assert counts["kept"] + counts["rejected"] + counts["dead_letter"] == 64


@pytest.mark.ray
@pytest.mark.slow  # tests/llm/test_budget.py tests the records quickly, without a cluster
def test_the_budget_of_a_killed_run_is_what_the_server_counts(seeds: Path, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    out = tmp_path / "out"
    with stand_in(latency_s=0.05, jitter_s=0.05) as server:
        arguments = [
            "synthesize",
            f"seeds={seeds}",
            f"output={out}",
            "in_flight=16",
            "actors=2",
            "limits.budget_usd=50",
        ]
        arguments += [f"endpoint.base_url={server.url}", "endpoint.api_key_env=null", f"prices={tmp_path}/prices.yaml"]
        arguments += ["generator.max_tokens=150", "judge.max_tokens=50"]
        command = [sys.executable, "-m", "infembed_ray.cli", *arguments]
        driver = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with driver, Held(server, out / "journal", answers=150) as actors:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        wait_until(lambda: not any(alive(pid) for pid in actors))
        spent = budget.spent_usd(out / "journal", prices.load(str(tmp_path / "prices.yaml")))
        assert spent == pytest.approx(spent_usd(server))
    granted = json.loads((out / "journal" / budget.UNJOURNALED).read_text())["at_most_usd"]
    assert granted > 5 * spent


@pytest.mark.ray
@pytest.mark.slow  # the rate it must reach needs an idle machine
def test_all_actors_together_keep_the_rate_limit_and_the_requests_in_flight(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    with stand_in(latency_s=0.02) as server:
        limits = {"requests_per_minute": 3000, "window_s": 3, "in_flight": 20}
        published = run(settings(seeds, tmp_path / "out", server, limits=limits))
        log = server.log()
    assert max(entry["in_flight"] for entry in log) <= 20
    arrivals = sorted(entry["arrived"] for entry in log)
    most = max(sum(0 <= other - first < 3 for other in arrivals) for first in arrivals)
    assert 0.8 * 150 <= most <= 150
    traffic = published.manifest["traffic"]
    assert traffic["answered"] == sum(entry["ended"] == "answered" for entry in log)
    assert traffic["latency_s"]["p50"] >= 0.02
