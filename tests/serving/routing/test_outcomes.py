from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from infembed_ray.retrieval.filters import FilterError
from infembed_ray.serving.encoder.batching import QueueFull
from infembed_ray.serving.metrics_aggregation import Snapshots, snapshot
from infembed_ray.serving.routing import outcomes as module
from infembed_ray.serving.routing.outcomes import Outcomes, Window


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def answer(outcomes: Outcomes, release: str, seconds: float, clock: Clock) -> None:
    with outcomes.counted(release):
        clock.now += seconds


def fail(outcomes: Outcomes, release: str, error: Exception) -> None:
    with pytest.raises(type(error)), outcomes.counted(release):
        raise error


def page_of(*registries: CollectorRegistry) -> str:
    snapshots = Snapshots()
    for number, registry in enumerate(registries):
        snapshots.update(f"replica {number}", snapshot(registry))
    return snapshots.page().decode()


def test_a_window_holds_the_queries_of_one_release_on_all_replicas(clock: Clock) -> None:
    registries = [CollectorRegistry(), CollectorRegistry()]
    drawn = np.random.default_rng(0).lognormal(-3, 1, 400)
    for number, seconds in enumerate(drawn):
        if number % 2 == 0 and number < 2:
            outcomes = [Outcomes(registry) for registry in registries]
        answer(outcomes[number % 2], "new", seconds, clock)
        answer(outcomes[0], "old", 0.5, clock)
    fail(outcomes[1], "new", QueueFull(1.0))
    fail(outcomes[1], "new", RuntimeError("broken"))
    fail(outcomes[1], "new", FilterError("filter.x: unknown field"))  # the client's fault
    window = Window.of_page(page_of(*registries), "new")
    assert (window.answered, window.failed) == (400, 2)
    assert window.failures == 2 / 402
    assert window.latency_s == pytest.approx(float(np.quantile(drawn, 0.95)), rel=0.1)
    assert Window.of_page(page_of(*registries), "other") == Window()


def test_a_window_can_begin_later(clock: Clock) -> None:
    registry = CollectorRegistry()
    outcomes = Outcomes(registry)
    for _ in range(100):
        answer(outcomes, "a", 5.0, clock)
    before = Window.of_page(page_of(registry), "a")
    for _ in range(10):
        answer(outcomes, "a", 0.0015, clock)
    since = Window.of_page(page_of(registry), "a").since(before)
    assert since.answered == 10
    assert since.latency_s < 0.002
    lost = Window.of_page(page_of(CollectorRegistry()), "a").since(before)  # the only replica restarted
    assert lost == Window()


@pytest.mark.parametrize("scale", [1.0, 1.07, 1.15, 1.22])
def test_a_latency_is_known_better_than_to_a_bucket(clock: Clock, scale: float) -> None:
    registry = CollectorRegistry()
    outcomes = Outcomes(registry)
    drawn = scale * np.random.default_rng(0).lognormal(-3, 0.5, 1000)
    for seconds in drawn:
        answer(outcomes, "a", seconds, clock)
    p95 = float(np.quantile(drawn, 0.95))
    assert Window.of_page(page_of(registry), "a").latency_s == pytest.approx(p95, rel=0.08)


def test_answers_slower_than_all_bounds_have_no_finite_quantile(clock: Clock) -> None:
    registry = CollectorRegistry()
    outcomes = Outcomes(registry)
    for _ in range(10):
        answer(outcomes, "a", 100.0, clock)
    assert Window.of_page(page_of(registry), "a").latency_s == float("inf")


def test_real_time_is_measured() -> None:
    registry = CollectorRegistry()
    with Outcomes(registry).counted("a"):
        time.sleep(0.02)
    assert Window.of_page(page_of(registry), "a").latency_s >= 0.02


def test_cleared_outcomes_leave_no_series(clock: Clock) -> None:
    registry = CollectorRegistry()
    outcomes = Outcomes(registry)
    answer(outcomes, "gone", 0.1, clock)
    outcomes.clear()
    answer(outcomes, "here", 0.1, clock)
    page = page_of(registry)
    assert "gone" not in page
    assert Window.of_page(page, "here").answered == 1
