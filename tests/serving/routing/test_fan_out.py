"""Searches over many shards against brute force."""

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.retrieval.answers import ShardQuery
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.updates.write_ahead_log import ChangeLog
from infembed_ray.serving.encoder.batching import QueueFull
from infembed_ray.serving.routing import fan_out
from infembed_ray.serving.routing.fan_out import FanOut, Ranked
from infembed_ray.serving.service import NotApplied
from tests.retrieval.oracle import DIMENSION, METADATA, Oracle, document, open_live, write_shards
from tests.retrieval.vectors import unit_vectors

SHARDS = 4
BASE = [document(f"d{n}", n, 2018 + n % 5) for n in range(80)]
QUERIES = unit_vectors(3, DIMENSION, seed=1)


class Deployment:
    """Replicas of one shard; raises `failing` at the methods that it names, and answers others after `seconds`."""

    def __init__(self, live: LiveShard) -> None:
        self.live = live
        self.calls: Counter[str] = Counter()
        self.failing: dict[str, Exception] = {}
        self.before: Callable[[str], None] = lambda method: None
        self.seconds = 0.0

    async def __call__(self, method: str, items: Any) -> Any:
        self.calls[method] += 1
        self.before(method)
        if method in self.failing:
            raise self.failing[method]
        await asyncio.sleep(self.seconds)
        return pickle.loads(pickle.dumps(self.live.search_many(items)))


class World:
    def __init__(self, root: Path) -> None:
        self.oracle = Oracle(BASE)
        self.log = ChangeLog(root / "changes", METADATA, DIMENSION, SHARDS)
        shards = open_live(root / "v1", write_shards(root / "v1", BASE, SHARDS), root / "changes")
        self.shards = [Deployment(shard) for shard in shards]

    def change(self, *changes: Any) -> None:
        self.oracle.apply(changes)
        self.log.append(changes)

    def refresh(self) -> None:
        for shard in self.shards:
            shard.live.refresh()

    def calls(self, method: str) -> int:
        return sum(shard.calls[method] for shard in self.shards)

    async def search(self, k: int = 10, timeout_s: float = 5, **options: Any) -> Ranked:
        fan = FanOut({f"s{n}": shard for n, shard in enumerate(self.shards)}, replicas=1)
        return await fan.search(ShardQuery(QUERIES, k, **options), fan_out.now() + timeout_s)

    def check(self, ranked: Ranked, k: int, sequence: int | None = None) -> None:
        for hits, query in zip(ranked.results, QUERIES, strict=True):
            self.oracle.check(hits, query, k, ranked.sequence if sequence is None else sequence)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_search_waits_until_every_shard_has_applied_its_sequence(world: World) -> None:
    waiting = asyncio.ensure_future(world.search(10, min_sequence=2))
    await asyncio.sleep(0.1)
    world.change(document("d1", 600))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    world.change(document("new", 601))
    ranked = await asyncio.wait_for(waiting, 5)
    assert ranked.sequence >= 2
    world.check(ranked, 10)
    with pytest.raises(NotApplied) as refusal:
        await world.search(10, min_sequence=9, timeout_s=0.3)
    assert (refusal.value.args[0], refusal.value.args[2]) == (9, 2)


async def test_no_shard_is_asked_again_for_a_search_that_has_failed(world: World) -> None:
    world.shards[2].failing = {"search_many": QueueFull(1.0)}
    with pytest.raises(QueueFull):
        await world.search(10, min_sequence=1)  # the others are behind
    await asyncio.sleep(fan_out.BEHIND_PAUSE_S / 2)
    asked = world.calls("search_many")
    await asyncio.sleep(3 * fan_out.BEHIND_PAUSE_S)
    assert world.calls("search_many") == asked
