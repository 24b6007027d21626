"""Sixty-four shards of 3,584 dimensions on one machine: start of their replicas, searches over all, and what the planner says.

    python benchmarks/many_shards.py [--shards N] [--sizes N,N] [--rounds N] [--searches N] [--directory DIR]

Every shard holds a graph over float16 vectors (`HNSW32_SQfp16`, what `infembed index` chooses for large shards) and texts of
passages' length. The vectors and the queries are those of `search.py`, which an isometry maps to 3,584 dimensions, so neighbours are
those of real texts. FAISS builds the graph of the first shard; the others have that graph over its vectors with noise, so all files,
ids and answers differ. A round is a new process: it drops the page cache, constructs `ShardSearch` for each shard in turn and asks it
for one document, as `replica_start.py` does. Then it searches for ten hits through `FanOut`; the first search is the cold one.
Calls stay in the process: `fan_out.py` measures their cost over Ray Serve. Each replica searches with one thread.

The last line is one JSON object, by size of a shard:
    ready_ms    until a replica answered, median and largest over shards and rounds; `ready_kib` is what it read from the disk
    cold_ms     first search after the start, median and largest over the rounds; `cold_mib` is what it read
    warm_ms     further searches, p50 and p99
    per_core    searches of one shard per second of CPU; a search compares `reads` vectors
    bytes       of a passage: in memory (the FAISS file) and on disk, measured and by `planning.index`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import faiss
import material  # noqa: F401  (adds the checkout to the path)
import numpy as np
import psutil
from replica_start import drop_pages
from search import between, embeddings

from infembed_ray.config.serving import ServeSettings
from infembed_ray.planning.index import shard_size
from infembed_ray.retrieval import faiss_index
from infembed_ray.retrieval.answers import ShardQuery
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.shard_files import INDEX_FILE, PASSAGES_FILE, FileChecksums, ShardFacts
from infembed_ray.retrieval.shards import Build
from infembed_ray.retrieval.versions import IndexFacts
from infembed_ray.serving import replicas
from infembed_ray.serving.release import IndexArguments
from infembed_ray.serving.routing.fan_out import FanOut, now
from tests.support.shards import write_shard

DIMENSION = 3584
FACTORY = "HNSW32_SQfp16"
NOISE = 0.1
"""Length of the noise by which shards differ."""
QUERIES_FILE = "queries.npy"
CHARACTERS = 300
K = 10


def unit(vectors: np.ndarray) -> np.ndarray:
    """Scale (n, d) vectors to length 1."""
    scaled: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled


def texts(shard: int, passages: int) -> tuple[list[str], list[str]]:
    """Ids and texts of a shard."""
    ids = [f"p{shard:02d}-{row:06d}" for row in range(passages)]
    return ids, [f"{id} ".ljust(CHARACTERS, "x") for id in ids]


def make(root: Path, shards: int, passages: int) -> None:
    """Write a published index, and beside it the queries."""
    rng = np.random.default_rng(0)
    real = embeddings(root.parents[1])
    axes, _ = np.linalg.qr(rng.standard_normal((DIMENSION, real["passages"].shape[1]), dtype=np.float32))
    np.save(root.parent / QUERIES_FILE, real["queries"] @ axes.T)
    vectors = between(np.concatenate([real["passages"], real["sentences"]]), passages) @ axes.T
    vectors = vectors.astype(np.float16)
    facts = [write_shard(root / "shard-00000", *texts(0, passages), vectors, build=Build(FACTORY))]
    index = faiss.read_index(str(root / "shard-00000" / INDEX_FILE))
    stored = faiss_index.storage(index)
    codes = faiss.rev_swig_ptr(stored.codes.data(), stored.ntotal * stored.code_size).view("<f2").reshape(vectors.shape)
    for number in range(1, shards):
        directory = root / f"shard-{number:05d}"
        write_shard(directory, *texts(number, passages), vectors[:, :1], build=Build("Flat"))  # for its passages
        codes[:] = unit(vectors + NOISE / DIMENSION**0.5 * rng.standard_normal(vectors.shape, dtype=np.float32))
        faiss.write_index(index, str(directory / INDEX_FILE))
        files = [directory / INDEX_FILE, directory / PASSAGES_FILE]
        checksums = {file.name: FileChecksums.measure(file) for file in files}
        size = sum(file.stat().st_size for file in files)
        facts.append(replace(facts[0], name=directory.name, checksums=checksums, bytes=size))
    described = IndexFacts(
        encoder="none",
        model="none",
        template="none",
        dimension=DIMENSION,
        passages=shards * passages,
        shards=facts,
        lineage="v1",
    )
    manifest = {"stage": "index", "identity": "v1", "created": "", "index": described.as_json()}
    (root / "manifest.json").write_text(json.dumps(manifest))


class Deployment:
    """A replica as a deployment of the ingress; what passes is pickled, as Ray does it."""

    def __init__(self, replica: replicas.ShardSearch) -> None:
        self._replica = replica

    async def __call__(self, method: str, items: Any) -> Any:
        """Call a method of the replica."""
        answer = await getattr(self._replica, method)(pickle.loads(pickle.dumps(items, 5)))
        return pickle.loads(pickle.dumps(answer, 5))


def read_bytes() -> int:
    """Bytes that this process has read from the disk."""
    return int(psutil.Process().io_counters().read_bytes)


def round_of(root: Path, searches: int) -> dict[str, Any]:
    """Start all replicas from the disk and search; run in a process of its own."""
    faiss.omp_set_num_threads(1)
    replicas.MetricsReporter.start = lambda self: None  # type: ignore[method-assign]  # there is no Serve
    drop_pages(root)
    facts = Index.describe(root).facts
    arguments = IndexArguments(index=str(root), version="v1", settings=ServeSettings(index=""))
    opened, ready, ready_bytes = [], [], []
    for number in range(len(facts.shards)):
        began, before = time.perf_counter(), read_bytes()
        opened.append(replicas.ShardSearch(arguments, number))
        assert asyncio.run(opened[-1].document(f"p{number:02d}-000000")) is not None
        ready.append(1e3 * (time.perf_counter() - began))
        ready_bytes.append(read_bytes() - before)
    queries = np.load(root.parent / QUERIES_FILE)[: searches + 1]
    return {"ready": ready, "ready_bytes": ready_bytes, **asyncio.run(search(opened, queries))}


async def search(opened: Sequence[replicas.ShardSearch], queries: np.ndarray) -> dict[str, Any]:
    """Search through the fan-out, one query after the other; then one shard alone."""
    fan = FanOut({f"shard-{n}": Deployment(r) for n, r in enumerate(opened)}, replicas=1)
    taken, before, cold_bytes = [], read_bytes(), 0
    for query in queries:
        began = time.perf_counter()
        found = await fan.search(ShardQuery(query[None], K), now() + 60)
        taken.append(1e3 * (time.perf_counter() - began))
        cold_bytes = cold_bytes or read_bytes() - before
        assert len(found.results[0]) == K
    statistics, shard = faiss.cvar.hnsw_stats, opened[-1]._shard
    statistics.reset()
    used = time.process_time()
    for query in queries:
        shard.search_many([ShardQuery(query[None], K)])
    per_core = len(queries) / (time.process_time() - used)
    reads = statistics.ndis / len(queries)
    return {"cold": taken[0], "cold_bytes": cold_bytes, "warm": taken[1:], "per_core": per_core, "reads": reads}


def summary(rounds: Sequence[dict[str, Any]], facts: ShardFacts, index_bytes: int) -> dict[str, Any]:
    """The figures of one size, beside the planner's."""

    def every(name: str) -> np.ndarray:
        return np.concatenate([np.atleast_1d(of[name]) for of in rounds])

    def spread(name: str, *percentiles: int) -> list[float]:
        return [round(float(value), 2) for value in np.percentile(every(name), percentiles)]

    memory, disk = shard_size(FACTORY, DIMENSION, facts.passages, CHARACTERS)
    return {
        "ready_ms": spread("ready", 50, 100),
        "ready_kib": round(float(np.median(every("ready_bytes"))) / 1024),
        "cold_ms": spread("cold", 50, 100),
        "cold_mib": round(float(np.median(every("cold_bytes"))) / 2**20, 1),
        "warm_ms": spread("warm", 50, 99),
        "per_core": round(float(np.median(every("per_core")))),
        "reads": round(float(np.median(every("reads")))),
        "bytes": {
            "memory": [round(index_bytes / facts.passages), round(memory / facts.passages)],
            "disk": [round(facts.bytes / facts.passages), round(disk / facts.passages)],
        },
        "search": facts.search,
    }


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--sizes", default="500,5000", help="passages of a shard")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--searches", type=int, default=100, help="warm searches per round")
    parser.add_argument("--directory", type=Path, help="directory for the indexes, kept for another run")
    options = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as temporary, get_context("fork").Pool(1, maxtasksperchild=1) as process:
        for size in map(int, options.sizes.split(",")):
            root = (options.directory or Path(temporary)) / f"{options.shards}-shards-of-{size}" / "v1"
            if not (root / "manifest.json").is_file():
                root.mkdir(parents=True)
                process.apply(make, (root, options.shards, size))
            rounds = [process.apply(round_of, (root, options.searches)) for _ in range(options.rounds)]
            facts = Index.describe(root).facts.shards[0]
            index_bytes = (root / facts.name / INDEX_FILE).stat().st_size
            figures[f"{size} passages"] = summary(rounds, facts, index_bytes)
            print(size, figures[f"{size} passages"], flush=True)
    machine = f"{os.cpu_count()} vCPU, {psutil.virtual_memory().total / 2**30:.0f} GiB, faiss {faiss.__version__}"
    print(json.dumps({"shards": options.shards, **figures, "machine": machine, "date": date.today().isoformat()}))


if __name__ == "__main__":
    main()
