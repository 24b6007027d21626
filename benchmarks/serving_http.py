"""Searches and embeddings over HTTP with 64 clients: ours against a plain Serve graph and infinity-emb's server.

    python benchmarks/serving_http.py [--infinity-python PATH] [--seconds N] [--rounds N]

All servers use MiniLM, the same number of threads and the same cores, which the client shares. Each server is started,
warmed up and measured alone, by a client in another process (closed loop of load.py). The peers compute in fp32. Ours
runs with `dtype=auto`, and once more with `dtype=float32`.

Searches run over MS MARCO passages in two exact shards, top 10: plain queries, and queries under an instruction (InF-IR),
which are five times as long. `straightforward.py` is FastAPI -> @serve.batch encoder -> 2 FAISS shards. Both run through
Serve's Python proxy and through HAProxy (`ha_proxy=true`). In float32 the hits must agree, or the run fails; in
other precisions 95 % of them.

No search is sent twice to a server, so its query cache never hits. A third load has `REPEATS`: that share of its searches
repeats an earlier one of the same load, drawn with equal chances.

Embeddings are of single texts, alternating queries and passages: ours against infinity-emb's server (0.0.78, torch and
optimum engines). Embeddings must agree to a cosine of 0.999.

The last line is one JSON object:
    vs_straightforward              searches per second, plain queries: ours through HAProxy / the plain graph through
                                    Serve's Python proxy, the defaults of both
    vs_straightforward_instructed   the same, queries under instructions
    vs_straightforward_repeated     the same, queries under instructions with `repeat_rate` repeats
    vs_straightforward_same_proxy, _instructed_same_proxy, _repeated_same_proxy    all through the Python proxy
    vs_straightforward_haproxy, _instructed_haproxy, _repeated_haproxy             all through HAProxy
    vs_straightforward_instructed_same_proxy_float32   the same, ours in float32
    vs_infinity                     embeddings per second: ours through HAProxy / the faster of infinity's engines
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import material
import numpy as np
from load import percentile, read
from serving_engine import real_rows, real_texts

from infembed_ray import ray_compat
from infembed_ray.retrieval.index import Index
from infembed_ray.serving.address import free_haproxy_ports
from infembed_ray.training.collate import flatten

HERE = Path(__file__).parent
CLIENTS = 64
START_S = 300.0
WARM_UP_S = 3.0
SEARCHES, WARM_UP_SEARCHES = 8000, 2000
"""Searches of a load, and those of its warm-up."""
REPEATS = 0.3
"""Share of repeated searches in the third load; logs of web search engines have 0.3 to 0.5."""
OURS = """
import ray, sys
ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
from infembed_ray.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""The command, on a cluster with enough logical CPUs for as many encoder threads as the plain graph has."""
LEAST_SHARED = 0.95
"""Least share of the plain graph's hits in ours, whose runtime may compute in bfloat16."""
KINDS = ("plain", "instructed", "repeated")
OWN_SERVERS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "ours": (["ha_proxy=true"], KINDS),
    "ours, Python proxy": (["ha_proxy=false"], KINDS),
    "ours, Python proxy, float32": (["ha_proxy=false", "dtype=float32"], ("instructed",)),
}
"""Settings of our servers, and the loads of searches that they get."""
PLAIN_SERVERS: dict[str, dict[str, str]] = {
    "straightforward": {},
    "straightforward, HAProxy": ray_compat.haproxy_environment(client_timeout_s=60),
}
"""Environments of the plain graph's server."""
Body = dict[str, Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(url: str, body: Body) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@contextmanager
def server(
    command: Sequence[str], ready: str, environment: Mapping[str, str], log: Path, cwd: str | None = None
) -> Iterator[None]:
    """Run a server's process group while the block runs."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | environment, start_new_session=True, cwd=cwd
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(ready, timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    said = log.read_text(errors="replace").strip().splitlines()
                    raise RuntimeError(f"{command[0]} did not start: {said[-1] if said else 'no word'}") from None
            time.sleep(0.5)
        yield
    finally:
        process.send_signal(signal.SIGINT)  # the first process ends our processes and Ray's children
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=40)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class Client:
    """Measures a running server and keeps the results."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds
        self.measured: dict[str, list[dict[str, Any]]] = {}
        self._latencies: dict[str, list[float]] = {}

    def measure(self, name: str, url: str, bodies: Sequence[Body]) -> None:
        """Measure one round with 64 clients."""
        file, out = self._folder / "bodies.jsonl", self._folder / "answers.jsonl"

        def load(seconds: float, bodies: Sequence[Body]) -> dict[str, Any]:
            file.write_text("".join(json.dumps(body) + "\n" for body in bodies), encoding="utf-8")
            command = [sys.executable, str(HERE / "load.py"), url, f"--bodies={file}", f"--clients={CLIENTS}"]
            said = subprocess.run(
                [*command, f"--seconds={seconds}", f"--out={out}"], check=True, capture_output=True, text=True
            )
            return dict(json.loads(said.stdout.splitlines()[-1]))

        searches = len(bodies) > WARM_UP_SEARCHES
        load(WARM_UP_S, bodies[-WARM_UP_SEARCHES:])
        found = load(self._seconds, bodies[:-WARM_UP_SEARCHES] if searches else bodies)
        assert not searches or found["requests"] <= SEARCHES, "more searches than the load has: they repeat"
        self.measured.setdefault(name, []).append(found)
        self._latencies.setdefault(name, []).extend(answer.latency for answer in read(out) if answer.ok)
        print(f"{name}: {found}", flush=True)
        assert found["failed"] == 0, found

    def rate(self, name: str) -> float | None:
        """Return the median of answers per second."""
        found = self.measured.get(name)
        return statistics.median(one["per_second"] for one in found) if found else None

    def ratio(self, above: str, below: Sequence[str]) -> float | None:
        """Return a ratio of rates; of several denominators, the fastest counts."""
        rates = [rate for name in below if (rate := self.rate(name))]
        own = self.rate(above)
        return round(own / max(rates), 3) if rates and own else None

    def figures(self) -> dict[str, dict[str, float]]:
        """Return all figures."""
        return {
            name: {
                "per_second": round(self.rate(name) or 0.0, 1),
                "p50_ms": round(1e3 * (percentile(every, 0.5) or 0.0), 1),
                "p99_ms": round(1e3 * (percentile(every, 0.99) or 0.0), 1),
            }
            for name, every in self._latencies.items()
        }


def searches(instructed: bool, repeats: float = 0.0) -> list[Body]:
    """Return plain queries, or queries under instructions: a load without repeats, or with a share, and its warm-up."""
    rng = random.Random(0)
    count = SEARCHES + WARM_UP_SEARCHES
    if instructed:
        tuples = [t for record in material.records(200)[0] for t in flatten(record)]
        queries, instructions = (sorted({getattr(t, part) for t in tuples}) for part in ("query", "instruction"))
        pairs = rng.sample(range(len(queries) * len(instructions)), 2 * count)  # a query under any record's instruction
        pairs = pairs[count:] if repeats else pairs[:count]  # two loads of one server share no search
        bodies = [
            {"query": queries[n % len(queries)], "instruction": instructions[n // len(queries)], "top_k": 10}
            for n in pairs
        ]
    else:
        rows = real_rows()[0]
        passes = (f" {n // len(rows)}" if n >= len(rows) else "" for n in range(count))  # a number tells passes apart
        bodies = [{"query": row["query"] + number, "top_k": 10} for row, number in zip(cycle(rows), passes)]
    for n in range(1, SEARCHES):
        if rng.random() < repeats:
            bodies[n] = bodies[rng.randrange(n)]
    return bodies


def built(folder: Path, model: str) -> tuple[Path, Path]:
    """Build our index of the passages, and export its vectors for the plain graph."""
    rows, _ = real_rows()
    corpus = folder / "corpus.jsonl"
    passages = dict.fromkeys(row["passage"] for row in rows)
    corpus.write_text("".join(json.dumps({"id": str(n), "text": t}) + "\n" for n, t in enumerate(passages)))
    command = [sys.executable, "-m", "infembed_ray.cli", "index", f"corpus={corpus}", f"model={model}", "factory=Flat"]
    subprocess.run([*command, f"output={folder / 'index'}"], check=True, stdout=subprocess.DEVNULL)
    shards = Index.open(folder / "index").shards
    arrays = folder / "corpus.npz"
    np.savez(
        arrays,
        ids=np.concatenate([shard.passages["id"].to_numpy() for shard in shards]).astype(str),
        texts=np.concatenate([shard.passages["text"].to_numpy() for shard in shards]).astype(str),
        vectors=np.concatenate([shard.vectors(slice(None)) for shard in shards]),
    )
    return folder / "index", arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--infinity-python", help="Python of an environment with infinity-emb[torch,optimum,server]==0.0.78"
    )
    parser.add_argument("--seconds", type=float, default=10, help="seconds of a measurement")
    parser.add_argument("--rounds", type=int, default=1, help="starts of every server")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of every encoder")
    parser.add_argument("--replicas", type=int, default=1, help="encoder replicas of ours, which divide the threads")
    parser.add_argument("--only", nargs="*", default=("searches", "embeddings"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so the servers are stopped
    threads, absent = options.threads, dict[str, str]()
    own = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"}
    quiet = own | {"DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    workloads = dict(zip(KINDS, (searches(False), searches(True), searches(True, REPEATS)), strict=True))
    texts, source = real_texts(2000)

    with tempfile.TemporaryDirectory(prefix="http-") as made:
        folder, model = Path(made), material.minilm()
        index, arrays = built(folder, model)
        client = Client(folder, options.seconds)
        hits: dict[str, list[list[str]]] = {}
        vectors: dict[str, np.ndarray] = {}

        def look(name: str, base: str, kinds: Sequence[str] = KINDS) -> None:
            """Print a server's answer and its latency."""
            if "searches" in options.only and not name.startswith("infinity"):
                sample = [*workloads["plain"][-20:], *workloads["instructed"][-20:]]
                answers = [post(f"{base}/v1/search", body) for body in sample]
                hits[name] = [[hit["id"] for hit in answer["hits"]] for answer in answers]
                for kind in kinds:
                    client.measure(f"{name}, {kind}", f"{base}/v1/search", workloads[kind])
            if "embeddings" in options.only and name not in PLAIN_SERVERS:
                served = json.load(urllib.request.urlopen(f"{base}/v1/models"))["data"][0]["id"]
                found = post(f"{base}/v1/embeddings", {"model": served, "input": texts[:16]})["data"]
                vectors[name] = np.array([one["embedding"] for one in found])
                bodies = [{"model": served, "input": text} for text in texts]
                client.measure(f"{name}, embeddings", f"{base}/v1/embeddings", bodies)

        for _ in range(options.rounds):
            if "searches" in options.only:
                for name, proxy in PLAIN_SERVERS.items():
                    port = free_port()
                    command = [sys.executable, str(HERE / "straightforward.py"), model]
                    command += [str(arrays), str(port), str(threads)]
                    base = f"http://127.0.0.1:{port}"
                    environment = own | proxy | (free_haproxy_ports() if proxy else {})
                    with server(command, f"{base}/readyz", environment, folder / "straightforward.log"):
                        look(name, base)
            for name, (extra, kinds) in OWN_SERVERS.items():
                port = free_port()
                command = [sys.executable, "-c", OURS, "serve", f"index={index}", f"port={port}"]
                command += [*extra, f"encoder_replicas={options.replicas}"]
                command += [f"cpus_per_encoder={threads // options.replicas}"]
                base = f"http://127.0.0.1:{port}"
                with server(command, f"{base}/readyz", own, folder / "ours.log"):
                    look(name, base, kinds)
            for engine in ("torch", "optimum") if "embeddings" in options.only else ():
                name = f"infinity, {engine}"
                if options.infinity_python is None:
                    absent[name] = "give --infinity-python"
                    continue
                port = free_port()
                theirs = model
                if engine == "optimum":
                    theirs = str(folder / "optimum")
                    if not Path(theirs).exists():
                        export = f"from infinity_engine import exported; exported({model!r}, {theirs!r})"
                        subprocess.run(
                            [options.infinity_python, "-c", export], cwd=HERE / "peers", check=True, capture_output=True
                        )
                command = [
                    str(Path(options.infinity_python).with_name("infinity_emb")),
                    "v2",
                    "--model-id",
                    theirs if engine == "torch" else ".",
                ]
                command += [
                    "--engine",
                    engine,
                    "--device",
                    "cpu",
                    "--dtype",
                    "float32",
                    "--batch-size",
                    "32",
                    "--pooling-method",
                    "mean",
                ]
                command += ["--url-prefix", "/v1", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
                base = f"http://127.0.0.1:{port}"
                try:
                    with server(command, f"{base}/health", quiet, folder / "infinity.log", theirs):
                        look(name, base)
                except RuntimeError as error:
                    absent[name] = str(error)

    exact = hits.get("straightforward", [])
    shared = {
        name: round(statistics.fmean(len(set(a) & set(b)) / len(a) for a, b in zip(found, exact, strict=True)), 4)
        for name, found in hits.items()
    }
    cosines = {name: float((v * vectors["ours"]).sum(axis=1).min()) for name, v in vectors.items()}
    for name, share in shared.items():
        assert share >= (0.99 if "float32" in name or name in PLAIN_SERVERS else LEAST_SHARED), shared
    assert not cosines or min(cosines.values()) >= 0.999, cosines
    infinity = [name for name in client.measured if name.startswith("infinity")]

    def over(ours: str, kind: str, plain: str = "straightforward") -> float | None:
        return client.ratio(f"{ours}, {kind}", [f"{plain}, {kind}"])

    summary = {
        "vs_straightforward": over("ours", "plain"),
        "vs_straightforward_instructed": over("ours", "instructed"),
        "vs_straightforward_repeated": over("ours", "repeated"),
        "vs_straightforward_same_proxy": over("ours, Python proxy", "plain"),
        "vs_straightforward_instructed_same_proxy": over("ours, Python proxy", "instructed"),
        "vs_straightforward_repeated_same_proxy": over("ours, Python proxy", "repeated"),
        "vs_straightforward_haproxy": over("ours", "plain", "straightforward, HAProxy"),
        "vs_straightforward_instructed_haproxy": over("ours", "instructed", "straightforward, HAProxy"),
        "vs_straightforward_repeated_haproxy": over("ours", "repeated", "straightforward, HAProxy"),
        "vs_straightforward_instructed_same_proxy_float32": over("ours, Python proxy, float32", "instructed"),
        "repeat_rate": {"plain": 0, "instructed": 0, "repeated": REPEATS},
        "vs_infinity": client.ratio("ours, embeddings", infinity),
        "measured": client.figures(),
        "hits_shared": shared,
        "least_cosine": {name: round(cosine, 6) for name, cosine in cosines.items()},
        "absent": absent,
        "clients": CLIENTS,
        "threads": threads,
        "replicas": options.replicas,
        "of": source,
        "machine": f"{os.cpu_count()} vCPU, {platform.system()}, Python {platform.python_version()}",
        "date": date.today().isoformat(),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
