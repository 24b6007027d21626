"""Fan-out of a search over simulated shards: CPU of the merge, bytes shipped and latency, one phase against two.

    python benchmarks/fan_out.py [--shards N,N] [--rounds N] [--characters N]

Every shard holds 2,000 passages with random scores and has its answers ready, so figures are of the ingress and of what
travels to it: unpickling, merging, and fetching the texts of the winners (their pickling by the shards included). Answers are
pickled as Ray does it. In one phase, as in all earlier versions of this package, every shard ships k hits as Python objects
with texts, and a heap merges them. In two phases the shards ship ids and scores in arrays, then the winners' texts. `cached`
repeats queries, so the texts are there. All rankings are compared. The way in bold is the one that the ingress takes.

A call to a shard costs CPU in both processes besides; `fan_out.CONTENTS_PER_CALL` stands for it.

The last line is one JSON object:
    cpu_ms          CPU per search in ms, median, by shards, k and way
    p50_ms, p99_ms  time per search
    kib             KiB that the ingress receives per search
    vs_one_phase    CPU of one phase / CPU of the way that the ingress takes, the least and the largest
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import pickle
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa

from infembed_ray.retrieval.answers import ShardAnswer, ShardQuery, ShardRanking
from infembed_ray.retrieval.passages import TEXT
from infembed_ray.retrieval.shards import Hit
from infembed_ray.serving.routing import fan_out
from infembed_ray.serving.routing.fan_out import FanOut
from infembed_ray.serving.schema import SearchHit

PASSAGES = 2000
DRAWS = 2
"""Different queries; a search draws one of them."""
KS = (10, 100, 1000)


class SimulatedShard:
    """A shard whose answers are ready; counts the bytes that leave it."""

    def __init__(self, number: int, characters: int) -> None:
        rng = np.random.default_rng(number)
        self.ids = [f"document-{number}-{row:06d}" for row in range(PASSAGES)]
        self.texts = [f"{id} ".ljust(characters, "x") for id in self.ids]
        self.scores = rng.random((DRAWS, PASSAGES)).astype(np.float32).round(4)  # with equal scores
        self.bytes = 0
        self._ready: dict[tuple[int, int, bool], bytes] = {}

    def _best(self, draw: int, k: int) -> np.ndarray:
        order = np.lexsort((np.arange(PASSAGES), self.scores[draw]))[::-1]  # the ids ascend
        return order[:k]

    def prepare(self, draw: int, k: int) -> None:
        """Compute the answers to one query; those to queries of another k are dropped."""
        self._ready = {key: ready for key, ready in self._ready.items() if key[1] == k}
        rows = self._best(draw, k)
        ids = pa.array([self.ids[row] for row in rows], TEXT)
        scores = self.scores[draw, rows]
        hits = [Hit(self.ids[row], float(self.scores[draw, row]), *self._content(int(row))) for row in rows]
        self._ready[draw, k, False] = pickle.dumps([ShardAnswer([hits], 0)], 5)
        self._ready[draw, k, True] = pickle.dumps([ShardRanking([len(rows)], ids, scores, rows, 0)], 5)

    async def __call__(self, method: str, items: Any) -> Any:
        """As a deployment of the ingress."""
        if method == "search_many":
            (query,) = items
            answer = self._ready[int(query.vectors[0, 0]), query.k, query.ranking]
        else:
            answer = pickle.dumps([[self._content(row) for row, _ in keys] for keys in items], 5)
        self.bytes += len(answer)
        return pickle.loads(answer)

    def _content(self, row: int) -> tuple[str, dict[str, int]]:
        return self.texts[row], {"year": row}


async def measure(shards: Sequence[SimulatedShard], k: int, rounds: int) -> dict[str, Any]:
    """CPU, time and bytes of each way."""
    deployments = {f"shard-{number}": shard for number, shard in enumerate(shards)}

    def searches(contents_per_call: float, cached: bool) -> Callable[[int], Awaitable[list[SearchHit]]]:
        kept = FanOut(deployments, replicas=1)

        async def search(draw: int) -> list[SearchHit]:
            fan_out.CONTENTS_PER_CALL = contents_per_call  # type: ignore[assignment]
            fan = kept if cached else FanOut(deployments, replicas=1)
            query = ShardQuery(np.full((1, 1), draw, np.float32), k)
            return (await fan.search(query, fan_out.now() + 60)).results[0]

        return search

    ways = {
        "one phase": searches(float("inf"), cached=False),
        "two phases": searches(0, cached=False),
        "two phases, cached": searches(0, cached=True),
    }
    found: dict[str, Any] = {}
    expected: dict[int, list[SearchHit]] = {}
    for way, search in ways.items():
        cpu, wall = [], []
        for draw in range(DRAWS):
            assert await search(draw) == expected.setdefault(draw, await ways["one phase"](draw)), (way, draw)
        for shard in shards:
            shard.bytes = 0
        for number in range(rounds):
            began, used = time.perf_counter(), time.process_time()
            await search(number % DRAWS)
            cpu.append(1e3 * (time.process_time() - used))
            wall.append(1e3 * (time.perf_counter() - began))
        found[way] = {
            "cpu_ms": round(statistics.median(cpu), 3),
            "p50_ms": round(float(np.percentile(wall, 50)), 3),
            "p99_ms": round(float(np.percentile(wall, 99)), 3),
            "kib": round(sum(shard.bytes for shard in shards) / rounds / 1024, 1),
        }
    return found


def main() -> None:
    """Measure, and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", default="2,8,64,256")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--characters", type=int, default=500, help="length of a text")
    arguments = parser.parse_args()
    print(
        f"# fan_out, {date.today()}, {os.cpu_count()} CPUs, {platform.system()}, Python {platform.python_version()}\n"
    )
    print("| shards | k | way | CPU ms | p50 ms | p99 ms | KiB shipped |")
    print("|---:|---:|---|---:|---:|---:|---:|")
    chosen = fan_out.CONTENTS_PER_CALL
    figures: dict[str, Any] = {}
    ratios = []
    for count in map(int, arguments.shards.split(",")):
        shards = [SimulatedShard(number, arguments.characters) for number in range(count)]
        for k in KS:
            for shard in shards:
                for draw in range(DRAWS):
                    shard.prepare(draw, k)
            gc.collect()
            gc.freeze()  # the simulated shards are no part of an ingress
            found = asyncio.run(measure(shards, k, arguments.rounds))
            figures[f"{count} shards, k={k}"] = found
            two = k * (count - 1) > chosen * min(count, k)
            ratios.append(found["one phase"]["cpu_ms"] / found["two phases" if two else "one phase"]["cpu_ms"])
            for way, of_way in found.items():
                taken = "**" if way == ("two phases" if two else "one phase") else ""
                print(
                    f"| {count} | {k} | {taken}{way}{taken} | " + " | ".join(f"{v:g}" for v in of_way.values()) + " |"
                )
    print(json.dumps({"figures": figures, "vs_one_phase": [round(min(ratios), 2), round(max(ratios), 2)]}))


if __name__ == "__main__":
    main()
