"""Serving under constant load with killed replicas, a killed node and two hand-overs; then at five times its capacity.

    python benchmarks/serving_chaos.py [--seconds 240] [--rate 12] [--overload-seconds 30]
    taskset -c 0 python benchmarks/serving_chaos.py      # everything on one core

A cluster of a head and three simulated nodes runs `infembed serve` with two replicas of the ingress, the encoder and each
of two shards. The capacity is measured first, with 32 clients in a closed loop. Searches then arrive at 60 % of the capacity
(open loop of load.py), beside `--slow-uploads` clients that send their request a few bytes at a time. Meanwhile a replica of the encoder, of a shard and of the ingress is killed (SIGKILL), `infembed
serve` switches to another index, a node with replicas is killed (its raylet and all of its workers), and `infembed serve`
switches back. The two indexes hold the same texts under ids that begin with A- or B-, so the hits of an answer show
whether it mixes them.

The overload runs on one node with one replica of everything; servers and client each get half of the cores. The capacity is
the rate of 64 clients in a closed loop. Five times as many requests per second are sent, without retries, while the
replicas' resident memory is read. Then the load returns to a third of the capacity.

`--overload-seconds 0` and `--seconds 0` run one part only; `--set request_timeout_s=10` changes a setting of `infembed serve`.

The last line is one JSON object:
    failed      requests without success that were not rejected with Retry-After (429 or 503) each time
    cut         requests whose connection to the killed node broke
    mixed       answers with hits of several indexes, or of another index than they name
    p99_ms      before, during (10 s) and after each event
    recovery_s  seconds from a kill, or from the end of a hand-over, to the last request that took more than twice the p99
                before the event and 50 ms; requests in flight at the next event do not count
    overload    goodput / capacity, answers by status, growth of replicas' memory, seconds until latencies are normal again
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import material
import psutil
from load import Answer, milliseconds, mixed, percentile, read, summary
from serving_engine import real_rows
from serving_http import free_port

from infembed_ray.training.collate import flatten

HERE = Path(__file__).parent
CLIENTS = 64
CAPACITY_CLIENTS = 32
CAPACITY_S = 20.0
SHARE = 0.6
"""Constant load / measured capacity."""
DURING_S = 10.0
SETTLE_S = 3.0
"""Seconds of warm-up of a load, which are not counted."""
SLOW_BYTES, SLOW_PAUSE_S = 64, 0.25
"""Bytes that a slow client sends at a time, and its pause between them."""
REPLICA = "ray::ServeReplica:"
RECOVERED = 2.0
"""Latency / latency before the overload, below which the overload counts as over."""


class Nodes:
    """A simulated cluster of a head and nodes to kill.

    Args:
        head_cpus: CPUs of the head.
        count: number of other nodes, with four CPUs each.
    """

    def __init__(self, head_cpus: int, count: int) -> None:
        from ray.cluster_utils import Cluster

        store = {"object_store_memory": 80 * 2**20}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head_cpus, **store})
        self._nodes = [self._cluster.add_node(num_cpus=4, **store) for _ in range(count)]

    @property
    def address(self) -> str:
        """Of the cluster."""
        return str(self._cluster.address)

    def replicas(self, of: str = "") -> list[psutil.Process]:
        """Return the processes of replicas whose deployment's name contains this."""
        return [process for node in (self._cluster.head_node, *self._nodes) for process in self._replicas(node, of)]

    def kill_replica(self, of: str) -> None:
        """Kill one of these replicas with SIGKILL."""
        found = self.replicas(of)
        assert found, f"no replica of {of}"
        print(f"killing {found[0].cmdline()[0]}", flush=True)
        found[0].kill()

    def kill_node(self) -> None:
        """Kill the node with most replicas, except the head, with all of its processes."""
        node = max(self._nodes, key=lambda node: len(self._replicas(node, "")))
        victims = self._replicas(node, "")
        print(f"killing a node with {[process.cmdline()[0] for process in victims]}", flush=True)
        everything = self._raylet(node).children(recursive=True)
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        for process in everything:  # a lost machine takes all of them; here they would live on for seconds
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def leave_cores(self) -> int:
        """Reserve half of the cores for the client, so its cost affects neither capacity nor overload.

        Returns:
            Number of cores that the servers keep.
        """
        cores = sorted(os.sched_getaffinity(0))
        kept, left = cores[: len(cores) // 2] or cores, cores[len(cores) // 2 :]
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                for thread in process.threads():
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(thread.id, kept)
        os.sched_setaffinity(0, left)
        return len(kept)

    def close(self) -> None:
        """Stop the API and the cluster."""
        self._cluster.shutdown()

    def _raylet(self, node: Any) -> psutil.Process:
        return psutil.Process(node.all_processes["raylet"][0].process.pid)

    def _replicas(self, node: Any, of: str) -> list[psutil.Process]:
        found = []
        for process in self._raylet(node).children(recursive=True):
            try:
                title = process.cmdline()[0]
            except (psutil.Error, IndexError):
                continue
            if title.startswith(REPLICA) and of in title:
                found.append(process)
        return found


@dataclass
class Trial:
    """The served indexes and the load on them."""

    folder: Path
    nodes: Nodes
    port: int
    model: str
    settings: Sequence[str]
    bodies: Path = field(init=False)

    def __post_init__(self) -> None:
        records, _ = material.records(150)
        queries = [{"query": t.query, "instruction": t.instruction, "top_k": 10} for r in records for t in flatten(r)]
        self.bodies = self.folder / "bodies.jsonl"
        self.bodies.write_text("".join(json.dumps(body) + "\n" for body in queries), encoding="utf-8")

    def infembed(self, *arguments: str) -> None:
        """Run the command as a user of the cluster."""
        environment = os.environ | {"RAY_ADDRESS": self.nodes.address}
        command = [sys.executable, "-m", "infembed_ray.cli", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    def index(self, owner: str, passages: int) -> None:
        """Build an index of MS MARCO passages under ids that begin with the owner."""
        texts = dict.fromkeys(row["passage"] for row in real_rows()[0][:passages])
        corpus = self.folder / f"{owner}.jsonl"
        corpus.write_text("".join(json.dumps({"id": f"{owner}-{n}", "text": t}) + "\n" for n, t in enumerate(texts)))
        self.infembed("index", f"corpus={corpus}", f"model={self.model}", f"output={self.folder / owner}", "shards=2")

    def serve(self, owner: str) -> None:
        """Switch the API to an index."""
        self.infembed("serve", f"index={self.folder / owner}", f"port={self.port}", "wait=false", *self.settings)

    @contextmanager
    def load(self, name: str, *arguments: str) -> Iterator[Client]:
        """Start a client in another process."""
        out = self.folder / f"{name}.jsonl"
        url = f"http://127.0.0.1:{self.port}/v1/search"
        command = [sys.executable, str(HERE / "load.py"), url, f"--bodies={self.bodies}", f"--out={out}", *arguments]
        client = Client(subprocess.Popen(command, stdout=subprocess.DEVNULL), out)
        try:
            yield client
        finally:
            client.process.kill()


@dataclass
class Client:
    """A process that sends requests and writes the answers when it ends."""

    process: subprocess.Popen[bytes]
    out: Path

    def end(self) -> None:
        """Stop sending; complete requests in flight."""
        self.process.terminate()

    def answers(self) -> list[Answer]:
        """Wait for the end; return all answers."""
        assert self.process.wait(timeout=600) == 0
        return read(self.out)


def capacity_of(trial: Trial, clients: int, seconds: float, name: str = "capacity") -> float:
    """Measure answered searches per second with a fixed number of clients in a closed loop."""
    with trial.load(name, f"--clients={clients}", f"--seconds={seconds + SETTLE_S}") as client:
        measured = client.answers()
    begin = min(answer.at for answer in measured) + SETTLE_S
    return _good(measured, begin, begin + seconds)


@contextmanager
def slow_uploads(port: int, count: int) -> Iterator[None]:
    """Keep connections open that send a search of 1 MiB a few bytes at a time; a closed one begins again."""
    over = threading.Event()
    header = b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1048576\r\n\r\n"

    def send() -> None:
        while not over.wait(SLOW_PAUSE_S):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(header + b'{"query": "')
                while not over.wait(SLOW_PAUSE_S):
                    connection.sendall(b"a" * SLOW_BYTES)

    threads = [threading.Thread(target=send, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def chaos(trial: Trial, seconds: float, rate: float | None) -> dict[str, Any]:
    """Run the events under constant load, each a fixed time after the end of the previous one."""
    capacity = None if rate else capacity_of(trial, CAPACITY_CLIENTS, CAPACITY_S, "chaos-capacity")
    rate = rate or SHARE * (capacity or 0.0)
    print(f"capacity {capacity}, load {rate:.1f} a second", flush=True)
    events: list[tuple[str, Callable[[], None]]] = [
        ("encoder replica", lambda: trial.nodes.kill_replica(":encoder")),
        ("shard replica", lambda: trial.nodes.kill_replica(":shard-00000")),
        ("ingress replica", lambda: trial.nodes.kill_replica(":ingress")),
        ("flip to B", lambda: trial.serve("B")),
        ("node", trial.nodes.kill_node),
        ("flip to A", lambda: trial.serve("A")),
    ]
    times: dict[str, tuple[float, float]] = {}
    apart = seconds / (len(events) + 1)
    with trial.load("chaos", f"--rate={rate}", "--seconds=3600") as client:
        began, due = time.time(), apart
        for name, happen in events:
            time.sleep(max(0.0, began + due - time.time()))
            start = time.time()
            happen()
            times[name] = (start, time.time())
            print(f"{start - began:6.1f} s  {name}: took {time.time() - start:.1f} s", flush=True)
            due = time.time() - began + apart
        time.sleep(max(0.0, began + max(due, seconds) - time.time()))
        client.end()
        found = sorted(client.answers(), key=lambda answer: answer.at)
    ends = [*[start for start, _ in times.values()][1:], found[-1].at + 1]
    windows = {
        name: {
            "before": (start - DURING_S, start),
            "during": (start, max(start + DURING_S, end)),
            "after": (max(start + DURING_S, end), following),
        }
        for (name, (start, end)), following in zip(times.items(), ends, strict=True)
    }
    p99 = {name: {when: _p99(found, *window) for when, window in of.items()} for name, of in windows.items()}
    recovery = {}
    for name, (start, end) in times.items():
        usual, following = (p99[name]["before"] or 0.0) / 1e3, windows[name]["after"][1]
        between = [a for a in found if start <= a.at and a.at + a.latency < following]
        slow = [a.at for a in between if not (a.ok and a.latency < RECOVERED * usual + 0.05)]
        over = end if name.startswith("flip") else start
        recovery[name] = round(max(0.0, max(slow, default=over) - over), 1)
    told = [answer for answer in found if len(answer.statuses) > 1]
    cut = [answer for answer in found if 0 in answer.statuses]
    return {
        **summary(found, found[-1].at - found[0].at),
        "rate": round(rate, 2),
        "cut": len(cut),
        "p99_ms": p99,
        "recovery_s": recovery,
        "capacity_per_second": capacity and round(capacity, 1),
        "seconds_of": {name: round(end - start, 1) for name, (start, end) in times.items()},
        "answers_of": {owner: sum(a.owners == (owner,) for a in found) for owner in "AB"},
        "most_attempts": max(len(answer.statuses) for answer in found),
        "told_p99_ms": milliseconds(percentile([answer.latency for answer in told], 0.99)),
        "failed_at_s": _span([answer.at - found[0].at for answer in found if answer.failed]),
        "worst_ms": milliseconds(max(answer.latency for answer in found)),
    }


def _good(answers: Sequence[Answer], begin: float, end: float) -> float:
    """Return answered requests per second, by time of answer."""
    return sum(answer.ok and begin <= answer.at + answer.latency < end for answer in answers) / (end - begin)


def _span(values: Sequence[float]) -> list[float]:
    return [round(min(values), 1), round(max(values), 1)] if values else []


def _p99(answers: Sequence[Answer], begin: float, end: float) -> float | None:
    return milliseconds(percentile([a.latency for a in answers if a.ok and begin <= a.at < end], 0.99))


def overload(trial: Trial, seconds: float) -> dict[str, Any]:
    """Send five times the capacity, then a third of it."""
    measuring = max(5.0, seconds / 3)
    apart = trial.nodes.leave_cores()
    capacity = capacity_of(trial, CLIENTS, measuring)
    memory: list[tuple[float, float]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            memory.append((time.time(), max(process.memory_info().rss for process in trial.nodes.replicas())))

    with trial.load("calm", f"--rate={capacity / 3}", f"--seconds={measuring}") as client:
        usual = percentile([answer.latency for answer in client.answers()], 0.5) or 0.0
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.time()
    with trial.load("overload", f"--rate={5 * capacity}", f"--seconds={seconds}", "--give-up") as client:
        time.sleep(max(0.0, began + seconds - time.time()))
        ended = time.time()
        with trial.load("after", f"--rate={capacity / 3}", f"--seconds={max(10.0, seconds)}") as later:
            after = later.answers()
        stormed = client.answers()
    over.set()
    watcher.join()
    good = _good(stormed, min(a.at for a in stormed) + SETTLE_S, max(a.at for a in stormed))
    late = [a.at for a in after if not a.ok or a.latency > RECOVERED * usual + 0.05]
    early, peak = [rss for at, rss in memory if at < began + 3], max(rss for _, rss in memory)
    return {
        "cores": apart,
        "capacity_per_second": round(capacity, 1),
        "sent_per_second": round(5 * capacity, 1),
        "goodput_per_second": round(good, 1),
        "goodput_over_capacity": round(good / capacity, 3),
        "statuses": summary(stormed, seconds)["statuses"],
        "unexpected": sum(a.failed and not a.told for a in stormed),
        "mixed": mixed([*stormed, *after]),
        "calm_p50_ms": milliseconds(usual),
        "accepted_p99_ms": milliseconds(percentile([a.latency for a in stormed if a.ok], 0.99)),
        "refused_p50_ms": milliseconds(percentile([a.latency for a in stormed if not a.ok], 0.5)),
        "largest_replica_mb": [round(statistics.median(early) / 1e6), round(peak / 1e6)]
        if early
        else round(peak / 1e6),
        "recovery_s": round(max(late) - ended, 1) if late else 0.0,
        "failed_after": sum(a.failed for a in after),
    }


@contextmanager
def serving(folder: Path, nodes: Nodes, settings: Sequence[str], passages: int) -> Iterator[Trial]:
    """Serve index A on a cluster while the block runs; index B exists, too."""
    try:
        # The load repeats its searches, and a cached one costs almost nothing.
        trial = Trial(folder, nodes, free_port(), material.minilm(), settings)
        for owner in "AB":
            if not (folder / owner).exists():
                trial.index(owner, passages)
        trial.serve("A")
        print(f"replicas: {sorted(process.cmdline()[0] for process in nodes.replicas())}", flush=True)
        yield trial
    finally:
        nodes.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240, help="seconds of constant load; 0: none")
    parser.add_argument("--rate", type=float, help="searches per second (default: 60 % of the capacity)")
    parser.add_argument("--slow-uploads", type=int, default=0, metavar="N", help="clients that send slowly meanwhile")
    parser.add_argument("--overload-seconds", type=float, default=30, help="seconds of overload; 0: none")
    parser.add_argument("--passages", type=int, default=400)
    parser.add_argument("--answers", type=Path, help="copy answers under constant load to this .jsonl file")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of `infembed serve`"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so the cluster is stopped
    found: dict[str, Any] = {}
    stormed: dict[str, Any] | None = None
    twice = ["ingress_replicas=2", "encoder_replicas=2", "shard_replicas=2"]
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        if options.seconds:
            with (
                serving(folder, Nodes(2, 3), [*twice, *options.set], options.passages) as trial,
                slow_uploads(trial.port, options.slow_uploads),
            ):
                found = chaos(trial, options.seconds, options.rate)
                if options.answers:
                    shutil.copyfile(trial.folder / "chaos.jsonl", options.answers)
                print(json.dumps(found), flush=True)
        if options.overload_seconds:
            with (
                serving(folder, Nodes(8, 0), options.set, options.passages) as trial,
                slow_uploads(trial.port, options.slow_uploads),
            ):
                stormed = overload(trial, options.overload_seconds)
    figures = {name: found.pop(name, None) for name in ("failed", "cut", "mixed", "p99_ms", "recovery_s")}
    figures |= {
        "overload": stormed,
        "chaos": found or None,
        "settings": options.set,
        "slow_uploads": options.slow_uploads,
    }
    machine = f"{os.cpu_count()} vCPU, {platform.system()}, Python {platform.python_version()}"
    print(json.dumps(figures | {"machine": machine, "date": date.today().isoformat()}))


if __name__ == "__main__":
    main()
