"""The limits of whole runs."""

from collections import Counter
from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis import distributed
from infembed_ray.synthesis.distributed import run
from infembed_ray.synthesis.tasks import partition_of
from tests.support.stand_in_llm import StandIn, stand_in
from tests.synthesis.runs import answered_most, settings


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


def test_the_texts_of_a_seed_decide_its_partition_and_partitions_have_about_equal_sizes() -> None:
    sizes = Counter(partition_of(Seed(str(n), f"query {n}", f"passage {n}"), 8) for n in range(8000))
    assert sizes.keys() == {f"{number}of8" for number in range(1, 9)}
    assert 900 < min(sizes.values()) <= max(sizes.values()) < 1100
    assert partition_of(Seed("a", "query 1", "passage 1"), 8) == partition_of(Seed("b", "query 1", "passage 1"), 8)
