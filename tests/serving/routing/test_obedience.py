"""Figures of obedience by hand and against brute force, and what keeps the samples from answers that wait."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from infembed_ray.serving import schema
from infembed_ray.serving.encoder.batching import QueueFull
from infembed_ray.serving.routing.blue_green import Release
from infembed_ray.serving.routing.obedience import DEPTH, ObedienceLog, mean_move, replaced_share
from infembed_ray.serving.service import Document, Found, Query, ReplicaLost, Search
from tests.serving.routing.test_blue_green import PASSAGES, World, best, vector

INSTRUCTED = Search([Query("plain"), Query("secret query", "Secret instruction.")], 3)


def test_figures_by_hand() -> None:
    assert (replaced_share(["a", "b"], ["a", "b"]), mean_move(["a", "b"], ["a", "b"])) == (0, 0)
    assert (replaced_share(["a", "b"], ["b", "a", "c"]), mean_move(["a", "b"], ["b", "a", "c"])) == (0, 1)
    plain = [f"p{number}" for number in range(20)]
    instructed = ["p15", *plain[:8], "new", "p14"]
    assert replaced_share(instructed, plain) == pytest.approx(2 / 10)  # p15 and new; p14 is the eleventh
    # p15 from 16 to 1, eight by one place, and new from beyond the depth to 10.
    assert mean_move(instructed, plain) == pytest.approx((15 + 8 + (DEPTH + 1 - 10)) / 10)


@given(st.integers(1, 120), st.integers(0, 2**32 - 1))
def test_figures_lie_in_their_ranges_and_are_zero_for_equal_rankings(passages: int, seed: int) -> None:
    plain = [str(number) for number in range(passages)]
    instructed = np.random.default_rng(seed).permutation(plain).tolist()
    assert 0 <= replaced_share(instructed, plain[:DEPTH]) <= 1
    assert 0 <= mean_move(instructed, plain[:DEPTH]) <= DEPTH
    assert replaced_share(plain, plain[:DEPTH]) == mean_move(plain[:DEPTH], plain[:DEPTH]) == 0


class Asked:
    """A release that holds its answers back until it is told."""

    def __init__(self, *outcomes: Any) -> None:
        self.searches: list[Search] = []
        self.outcomes = list(outcomes)
        self.released = asyncio.Event()

    async def __call__(self, search: Search) -> Found:
        self.searches.append(search)
        await self.released.wait()
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        hits = [[schema.SearchHit(id=id, score=0, text="", metadata={}) for id in ids] for ids in outcome]
        return Found(hits, "m", "v1", 0, schema.Timings(encode_ms=1, search_ms=1))


def samples(registry: CollectorRegistry, release: str = "r") -> dict[str, float]:
    outcomes = ("measured", "empty", "dropped", "failed")
    found = {
        o: registry.get_sample_value("infembed_obedience_samples_total", {"release": release, "outcome": o})
        for o in outcomes
    }
    return {outcome: value for outcome, value in found.items() if value}  # fmt: skip


def test_a_sample_asks_the_instructed_query_with_and_without_its_instruction() -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        log, ask = ObedienceLog(registry, 1.0), Asked([["a", "b"], ["b", "c", "a"]])
        log.sample("r", Search([Query("plain"), Query("q", "I")], 3, {"year": 1}, True, 5), ask)
        assert ask.searches == []  # nothing runs before the answer is sent
        ask.released.set()
        await asyncio.sleep(0.01)
        assert ask.searches == [Search([Query("q", "I"), Query("q")], DEPTH, {"year": 1}, background=True)]

    asyncio.run(scenario())
    assert samples(registry) == {"measured": 1}
    of = {"release": "r"}
    assert registry.get_sample_value("infembed_obedience_replaced_sum", of) == 0
    assert registry.get_sample_value("infembed_obedience_moves_sum", of) == 1.5  # a from 3 to 1, b from 1 to 2
    assert registry.get_sample_value("infembed_obedience_replaced_count", of) == 1


def test_one_search_is_measured_at_a_time_and_load_drops_it() -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        log = ObedienceLog(registry, 1.0)
        ask = Asked([["a"], ["a"]], QueueFull(1.0), ReplicaLost(), [[], []])
        for _ in range(4):
            log.sample("r", INSTRUCTED, ask)
        await asyncio.sleep(0.01)
        assert len(ask.searches) == 1
        ask.released.set()
        for _ in range(3):
            await asyncio.sleep(0.01)
            log.sample("r", INSTRUCTED, ask)
        await asyncio.sleep(0.01)
        assert len(ask.searches) == 4

    asyncio.run(scenario())
    assert samples(registry) == {"measured": 1, "dropped": 4, "failed": 1, "empty": 1}


def test_plain_and_background_searches_and_those_beyond_the_share_are_not_sampled() -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        ask = Asked()
        log = ObedienceLog(registry, 1.0)
        log.sample("r", Search([Query("q"), Query("r", "")], 3), ask)
        log.sample("r", Search([Query("q", "I")], 3, background=True), ask)
        ObedienceLog(CollectorRegistry(), 0.0).sample("r", INSTRUCTED, ask)
        await asyncio.sleep(0.01)
        assert ask.searches == []
        ask.released.set()
        ask.outcomes = [[["a"], ["a"]]] * 1000
        sampled = ObedienceLog(CollectorRegistry(), 0.2)
        for _ in range(1000):
            sampled.sample("r", INSTRUCTED, ask)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert 120 < len(ask.searches) < 280  # 200 on average; a standard deviation is 13

    asyncio.run(scenario())
    assert samples(registry) == {}


def test_a_release_measures_its_searches_after_it_has_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Against brute force over all passages; no text of the query is logged or counted."""
    caplog.set_level(logging.DEBUG)
    registry = CollectorRegistry()
    world = World(tmp_path)
    log = ObedienceLog(registry, 1.0)

    async def scenario(release: Release) -> None:
        await release.put([Document("new", "Secret instruction. secret query")])
        found = await release.search(INSTRUCTED)
        assert samples(registry, "f") == {}
        world.encoder.held = asyncio.Event()  # the measurement waits, and further answers do not
        assert (await release.search(INSTRUCTED)).results == found.results
        world.encoder.held.set()
        await asyncio.sleep(0.3)
        assert samples(registry, "f") == {"measured": 1, "dropped": 1}

    world.play(scenario, obedience=log, query_cache_bytes=2**20)
    passages = {**PASSAGES, "new": "Secret instruction. secret query"}
    instructed, plain = (best(f"{i} secret query", 100) for i in ("Secret instruction.", None))
    instructed = ["new", *instructed]
    plain = sorted([*plain, "new"], key=lambda id: -float(vector(passages[id]) @ vector("None secret query")))
    first = instructed[:10]
    replaced = len({*first} - {*plain[:10]}) / 10
    moved = sum(abs(plain.index(id) - rank) for rank, id in enumerate(first)) / 10
    assert replaced > 0
    of = {"release": "f"}
    assert registry.get_sample_value("infembed_obedience_replaced_sum", of) == pytest.approx(replaced)
    assert registry.get_sample_value("infembed_obedience_moves_sum", of) == pytest.approx(moved)
    assert "ecret" not in caplog.text + generate_latest(registry).decode()
    log.clear()
    assert samples(registry, "f") == {}
