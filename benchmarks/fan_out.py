"""Fan-out of a search over simulated shards: CPU of the merge, bytes shipped and latency.

    python benchmarks/fan_out.py [--shards N,N] [--rounds N] [--characters N]

Every shard holds 2,000 passages with random scores and has its answers ready, so figures are of the ingress and of what
travels to it: unpickling and merging. Answers are pickled as Ray does it; calls to real shards cost the ingress 1.45 ms of CPU each
besides.

The last line is one JSON object, by shards and k:
    cpu_ms          CPU per search in ms, median
    p50_ms, p99_ms  time per search
    kib             KiB that the ingress receives per search
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
from collections.abc import Sequence
from datetime import date
from typing import Any

import numpy as np

from infembed_ray.retrieval.answers import ShardAnswer, ShardQuery
from infembed_ray.retrieval.shards import Hit
from infembed_ray.serving.routing import fan_out
from infembed_ray.serving.routing.fan_out import FanOut

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
        self._ready: dict[tuple[int, int], bytes] = {}

    def prepare(self, draw: int, k: int) -> None:
        """Compute the answers to one query; those to queries of another k are dropped."""
        self._ready = {key: ready for key, ready in self._ready.items() if key[1] == k}
        rows = np.lexsort((np.arange(PASSAGES), self.scores[draw]))[::-1][:k].tolist()  # the ids ascend
        hits = [Hit(self.ids[row], float(self.scores[draw, row]), self.texts[row], {"year": row}) for row in rows]
        self._ready[draw, k] = pickle.dumps([ShardAnswer([hits], 0)], 5)

    async def __call__(self, method: str, items: Any) -> Any:
        """As a deployment of the ingress."""
        (query,) = items
        answer = self._ready[int(query.vectors[0, 0]), query.k]
        self.bytes += len(answer)
        return pickle.loads(answer)


async def measure(shards: Sequence[SimulatedShard], k: int, rounds: int) -> dict[str, float]:
    """CPU, time and bytes of a search."""
    fan = FanOut({f"shard-{number}": shard for number, shard in enumerate(shards)}, replicas=1)
    cpu, wall = [], []
    for shard in shards:
        shard.bytes = 0
    for number in range(rounds):
        query = ShardQuery(np.full((1, 1), number % DRAWS, np.float32), k)
        began, used = time.perf_counter(), time.process_time()
        await fan.search(query, fan_out.now() + 60)
        cpu.append(1e3 * (time.process_time() - used))
        wall.append(1e3 * (time.perf_counter() - began))
    return {
        "cpu_ms": round(statistics.median(cpu), 3),
        "p50_ms": round(float(np.percentile(wall, 50)), 3),
        "p99_ms": round(float(np.percentile(wall, 99)), 3),
        "kib": round(sum(shard.bytes for shard in shards) / rounds / 1024, 1),
    }


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
    print("| shards | k | CPU ms | p50 ms | p99 ms | KiB shipped |")
    print("|---:|---:|---:|---:|---:|---:|")
    figures: dict[str, Any] = {}
    for count in map(int, arguments.shards.split(",")):
        shards = [SimulatedShard(number, arguments.characters) for number in range(count)]
        for k in KS:
            for shard in shards:
                for draw in range(DRAWS):
                    shard.prepare(draw, k)
            gc.collect()
            gc.freeze()  # the simulated shards are no part of an ingress
            taken = asyncio.run(measure(shards, k, arguments.rounds))
            figures[f"{count} shards, k={k}"] = taken
            print(f"| {count} | {k} | " + " | ".join(f"{value:g}" for value in taken.values()) + " |")
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
