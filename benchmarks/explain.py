"""Latency of an explained search over HTTP: what `explain` adds to a search under an instruction.

    python benchmarks/explain.py [--searches N] [--passages N] [--setting NAME=VALUE ...]

One client sends one request at a time to `infembed serve` with MiniLM and two shards. Queries and instructions are those of
records. Three loads take turns, search by search: `search` without explanation, `explained`, and `explained again`, which repeats the
explained search, so its vectors are in the query cache. No other search repeats one of before. Hits of both explained searches
must be equal. In the warm-up, effects must agree with searches under the leave-one-out instructions, to 1e-3.

The last line is one JSON object:
    p50_ms, p95_ms   of each load
    added_p50_ms     median of explained minus search, of the same query
    phrases          mean number of phrases
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import material
import numpy as np
import ray
from serving_http import free_port

from infembed_ray.client import Client, SearchResponse
from infembed_ray.config.serving import ServeSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.retrieval.index import Index
from infembed_ray.serving.distributed import serving
from infembed_ray.serving.explaining import variants

WARM_UP = 10
TOLERANCE = 1e-3
"""Of scores: the encoder may compute in bfloat16, where batches of other shapes round differently."""


def timed(client: Client, *args: Any, **options: Any) -> tuple[float, SearchResponse]:
    """Milliseconds of a search, and its answer."""
    began = time.perf_counter()
    found = client.search(*args, **options)
    return 1e3 * (time.perf_counter() - began), found


def check(client: Client, query: str, instruction: str, found: SearchResponse) -> None:
    """Compare the effects of the first hit with searches under the leave-one-out instructions."""
    explanation = found.explanation
    assert explanation is not None
    first = explanation.passages[0]
    for effect, left_out in zip(first.effects, variants(instruction, explanation.phrases)[2:], strict=True):
        hits = {hit.id: hit.score for hit in client.search(query, left_out, top_k=1000).hits}
        if first.id in hits and abs(first.score - hits[first.id] - effect) > TOLERANCE:
            raise SystemExit(f"an effect is {effect:.4f}, and {first.score - hits[first.id]:.4f} by a search")


def measure(url: str, asked: list[tuple[str, str]]) -> tuple[dict[str, list[float]], list[int]]:
    """Latencies in ms by load, and the numbers of phrases."""
    latencies: dict[str, list[float]] = defaultdict(list)
    phrases = []
    with Client(url) as client:
        for number, (query, instruction) in enumerate(asked):
            plain, found = timed(client, f"{query} {number}", instruction)
            first, explained = timed(client, f"{query} {number}?", instruction, explain=True)
            again, repeated = timed(client, f"{query} {number}?", instruction, explain=True)
            assert [hit.id for hit in repeated.hits] == [hit.id for hit in explained.hits]
            assert explained.explanation is not None
            assert len(found.hits) == len(explained.hits)
            if number < WARM_UP:
                check(client, f"{query} {number}?", instruction, explained)
                continue
            phrases.append(len(explained.explanation.phrases))
            for load, ms in (("search", plain), ("explained", first), ("explained again", again)):
                latencies[load].append(ms)
    return latencies, phrases


def main() -> None:
    """Measure, and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=200)
    parser.add_argument("--passages", type=int, default=2000)
    parser.add_argument("--setting", action="append", default=[], help="of `infembed serve`, NAME=VALUE")
    arguments = parser.parse_args()
    records, source = material.records(200)
    texts = [text for r in records for text in (r.document_positive, r.hard_negative_document_1)]
    corpus = [f"{texts[number % len(texts)]} {number // len(texts) or ''}" for number in range(arguments.passages)]
    asked = [
        (record.query_positive, record.instruction_positive)
        for _, record in zip(range(arguments.searches + WARM_UP), records * 1000, strict=False)
    ]
    print(
        f"# explain, {date.today()}, {os.cpu_count()} CPUs, {platform.system()}, Python {platform.python_version()}\n"
        f"{arguments.searches} searches, top 10 of {arguments.passages} passages, {source}\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        encoder = InstructionEncoder.from_pretrained(material.minilm())
        index = Index.build(corpus, encoder, Path(directory) / "index", shards=2)
        given = dict(setting.split("=", 1) for setting in arguments.setting)
        settings = ServeSettings.from_mapping(
            {"index": str(index.path), "port": free_port(), "wait": False, "writable": False} | given
        )
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
        with serving(settings) as url:
            latencies, phrases = measure(url, asked)
    added = statistics.median(np.subtract(latencies["explained"], latencies["search"]))
    figures: dict[str, Any] = {
        f"p{q}_ms": {load: round(float(np.percentile(ms, q)), 1) for load, ms in latencies.items()} for q in (50, 95)
    }
    figures |= {"added_p50_ms": round(added, 1), "phrases": round(statistics.fmean(phrases), 1)}
    print("| load | p50 (ms) | p95 (ms) |\n|---|---:|---:|")
    for load in latencies:
        print(f"| {load} | {figures['p50_ms'][load]} | {figures['p95_ms'][load]} |")
    print(f"\n{json.dumps(figures)}")


if __name__ == "__main__":
    main()
