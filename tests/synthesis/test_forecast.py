"""The sample of a canary and the forecast from it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from infembed_ray.config.llm import Limits
from infembed_ray.config.synthesis import Canary
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis.forecast import Forecast, forecast, sample, wilson
from infembed_ray.synthesis.outcome import Outcome, Spend


def test_a_sample_has_its_size_and_does_not_depend_on_the_order() -> None:
    every = [Seed(f"{n}", "q", "p", source=f"https://example.org/{n}") for n in range(1000)]  # as many sources as seeds
    drawn = sample(every, 50, seed=0)
    assert len({each.id for each in drawn}) == 50
    assert sample(random.Random(1).sample(every, len(every)), 50, seed=0) == drawn
    assert sample(every, 50, seed=1) != drawn
    assert abs(sum(int(each.id) for each in drawn) / 50 - 500) < 3 * 1000 / (12 * 50) ** 0.5


def test_a_sample_larger_than_the_seeds_is_all_of_them() -> None:
    every = [Seed(f"{n}", "q", "p") for n in range(7)]
    assert {each.id for each in sample(every, 100, seed=0)} == {each.id for each in every}


def test_wilsons_interval_is_that_of_the_published_example() -> None:
    # Newcombe (1998), Statistics in Medicine 17, table I: method 3.
    for successes, trials, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        share, *ends = wilson(successes, trials)
        assert share == successes / trials
        assert ends == pytest.approx([low, high], abs=5e-5)
    assert wilson(29, 29)[2] == pytest.approx(1.0)


def row(kind: Any, calls: int = 8, usd: float | None = 0.01) -> Outcome:
    return Outcome(kind, {}, Spend(calls, 900 * calls, 100 * calls, usd), Spend())


def made(rows: list[Outcome], price: float = 1.0, latency_s: float | None = 2.0, **limits: Any) -> Forecast:
    return forecast(rows, 10 * len(rows), latency_s, 10, Limits(**limits), price, seed=0)


def test_figures_are_those_of_the_sample_scaled_to_all_seeds() -> None:
    found = made([*[row("kept")] * 30, *[row("rejected", 6, 0.02)] * 10])
    assert (found.sampled, found.seeds) == (40, 400)
    assert found.share_kept[0] == 0.75
    assert found.usd is not None
    assert found.usd[0] == pytest.approx(5.0)
    assert found.usd_per_1000_kept is not None
    assert found.usd_per_1000_kept[0] == pytest.approx(1000 * 5.0 / 300)
    assert (found.calls[0], found.tokens[0]) == pytest.approx((3000, 3_000_000))
    assert found.hours is not None
    assert found.hours[0] == pytest.approx(3000 * 2.0 / 10 / 3600)
    assert all(low < value < high for value, low, high in (found.usd, found.usd_per_1000_kept, found.calls))


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(100):
        rows = [row("kept", usd=0.01) if rng.random() < 0.7 else row("rejected", usd=0.004) for _ in range(80)]
        found = made(rows)
        assert found.usd_per_1000_kept is not None
        covered += found.usd_per_1000_kept[1] <= 1000 * (0.7 * 0.01 + 0.3 * 0.004) / 0.7 <= found.usd_per_1000_kept[2]
    assert 88 <= covered <= 100  # 95 +- 3 standard deviations


def test_replayed_answers_cost_what_they_cost_and_batches_half() -> None:
    replayed = [Outcome("kept", {}, Spend(), Spend(8, 100, 10, 0.01))] * 5
    found = made(replayed, price=0.5, latency_s=None)
    assert found.usd is not None
    assert found.usd[0] == pytest.approx(50 * 0.005)
    assert found.hours is None


def test_a_sample_that_batches_answered_is_not_halved_again() -> None:
    batched = [Outcome("kept", {}, Spend(), Spend(8, 100, 10, 0.01, 0.004))] * 5
    for price, usd in ((0.5, 0.007), (1.0, 0.014)):  # 0.006 at the list price, and 0.008 at half of it
        found = made(batched, price=price)
        assert found.usd is not None
        assert found.usd[0] == pytest.approx(50 * usd)


def test_limits_per_minute_bound_the_hours() -> None:
    rows = [row("kept")] * 10
    for limits in ({"requests_per_minute": 10}, {"tokens_per_minute": 10_000}):
        found = made(rows, **limits)
        assert found.hours is not None
        assert found.hours[0] == pytest.approx(800 / 10 / 60)


def test_an_unknown_price_or_no_kept_record_leaves_figures_unknown() -> None:
    unpriced = made([row("kept"), row("kept", usd=None)])
    assert (unpriced.usd, unpriced.usd_per_1000_kept) == (None, None)
    lost = made([row("rejected")] * 3)
    assert lost.usd is not None
    assert lost.usd_per_1000_kept is None
    assert lost.refusal(Canary(), "seed 1, step s: e") == "no record of the canary is kept (seed 1, step s: e)"
    assert "USD per 1,000 kept" in str(lost)


@pytest.mark.parametrize(
    ("canary", "reason"),
    [
        ({}, None),
        ({"min_kept": 0.75, "max_usd_per_1000_kept": 14}, None),
        ({"min_kept": 0.76}, "canary.min_kept=0.76: 75% of the canary's records are kept"),
        ({"max_usd_per_1000_kept": 13}, "canary.max_usd_per_1000_kept=13: the forecast is 13.33"),
        ({"stop": True}, "canary.stop=true: the run ends after its forecast"),
    ],
)
def test_the_settings_end_the_run(canary: dict[str, Any], reason: str | None) -> None:
    found = made([*[row("kept")] * 3, row("rejected")])
    assert found.refusal(Canary(**canary), "") == reason
