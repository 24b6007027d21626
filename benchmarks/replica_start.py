"""Start of a shard replica: seconds and bytes read, with an index in a local directory and in an object store.

    python benchmarks/replica_start.py [--passages N] [--rounds N] [--threads N] [--directory DIR]

Makes an index of one `Flat` shard of N random unit vectors (384 dimensions) with texts of the length of passages; 560,000 make 1 GB.
Each start is the constructor of `ShardSearch` in a new process, from after the imports until the replica has answered one
request for a document. The object store is moto's S3 server, a Python process of its own on this machine. It is slow: it copies
the whole object for each ranged read. With the product's 8 reads at once it sends nothing for over 3 s, which the client takes
for a lost connection; so there are --threads reads at once. The seconds are moto's, not S3's; the bytes are ours.

    local           the index in a directory whose pages are dropped from the page cache first
    verify          `infembed index verify`: the same bytes, block by block
    store           the first start on a node: ranged reads in parallel, verified as they pass
    store again     the second start on that node

The last line is one JSON object with the seconds and bytes of each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import material  # noqa: F401  (adds the checkout to the path)
import numpy as np
import psutil
from pyarrow import fs

from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.shard_files import verify
from infembed_ray.retrieval.shards import Build
from infembed_ray.retrieval.versions import IndexFacts
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.steps import output_files
from tests.support.shards import write_shard

DIMENSION = 384
WORDS = 40
START = """
import asyncio, json, os, sys, time
import psutil
from infembed_ray.config.serving import ServeSettings
from infembed_ray.retrieval import shard_files
from infembed_ray.serving.release import IndexArguments
from infembed_ray.serving.replicas import ShardSearch

shard_files.THREADS = int(sys.argv[3])
os.environ["INFEMBED_SCRATCH"] = sys.argv[2]
arguments = IndexArguments(index=sys.argv[1], version="v1", settings=ServeSettings(index=""))
sent, read, began = psutil.net_io_counters().bytes_sent, psutil.Process().io_counters().read_bytes, time.perf_counter()
replica = ShardSearch(arguments, 0)
assert asyncio.run(replica.document("p0000000")) is not None
seconds = time.perf_counter() - began
network, disk = psutil.net_io_counters().bytes_sent - sent, psutil.Process().io_counters().read_bytes - read
print(json.dumps({"seconds": seconds, "network": network, "disk": disk}))
"""


def make(root: Path, passages: int) -> None:
    """Write a published index of one shard."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((passages, DIMENSION), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    words = [f"word{n}" for n in range(2000)]
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=WORDS)) for _ in range(passages)]
    facts = write_shard(
        root / "shard-00000", [f"p{n:07d}" for n in range(passages)], texts, vectors, build=Build("Flat")
    )
    described = IndexFacts(
        encoder="none",
        model="none",
        template="none",
        dimension=DIMENSION,
        passages=passages,
        shards=[facts],
        lineage="v1",
    )
    manifest = {"stage": "index", "identity": "v1", "created": "", "index": described.as_json()}
    (root / "manifest.json").write_text(json.dumps(manifest))


def drop_pages(root: Path) -> None:
    """Drop the files of a directory from the page cache."""
    for file in output_files(root):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def moto() -> Any:
    """Run moto's S3 server as a process, with one bucket; set the environment that leads to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    try:
        client = fs.S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True)
        for _ in range(100):
            try:
                client.create_dir("bucket")
                break
            except OSError:
                time.sleep(0.3)
        yield
    finally:
        server.terminate()
        server.wait()


def start(index: str, cache: Path, threads: int) -> dict[str, float]:
    """Start a replica in a new process; return its seconds and bytes."""
    command = [sys.executable, "-c", START, index, str(cache), str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def timed(function: Any) -> dict[str, float]:
    """Return the seconds of a call."""
    began = time.perf_counter()
    function()
    return {"seconds": time.perf_counter() - began, "network": 0, "disk": 0}


def main() -> None:
    """Measure, and print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--passages", type=int, default=560_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="ranged reads at once")
    parser.add_argument("--directory", help="keeps the index for another run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        room = Path(given.directory or temporary)
        root = room / "index" / "v1"
        if not (root / "manifest.json").is_file():
            make(root, given.passages)
        (facts,) = Index.describe(root).facts.shards
        rounds: dict[str, list[dict[str, float]]] = {}
        with moto():
            folder = Folder.open("s3://bucket/index/v1", "index")
            uploaded = timed(lambda: [folder.upload(f, f.relative_to(root).as_posix()) for f in output_files(root)])
            print(
                f"{facts.bytes} bytes, {facts.passages} passages; uploaded in {uploaded['seconds']:.1f} s", flush=True
            )
            for number in range(given.rounds):
                cache = room / f"cache-{number}"
                for name, measure in {
                    "verify": lambda: timed(lambda: verify(root, facts)),
                    "local": lambda cache=cache: start(str(root), cache, given.threads),
                    "store": lambda cache=cache: start(folder.uri, cache, given.threads),
                    "store again": lambda cache=cache: start(folder.uri, cache, given.threads),
                }.items():
                    drop_pages(root)
                    rounds.setdefault(name, []).append(measure())
                    print(name, rounds[name][-1], flush=True)
                shutil.rmtree(cache)
    medians = {
        name: {key: statistics.median(result[key] for result in found) for key in found[0]}
        for name, found in rounds.items()
    }
    cpus = f"{psutil.cpu_count()} CPUs, {psutil.virtual_memory().total / 2**30:.0f} GiB"
    print(json.dumps({"machine": cpus, "bytes": facts.bytes, "rounds": given.rounds, **medians}))


if __name__ == "__main__":
    main()
