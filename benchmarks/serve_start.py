"""Start of `infembed serve` on one machine: seconds from the command to `ready` and to the first answer.

    python benchmarks/serve_start.py --cache DIR [--passages N] [--rounds N] [--setting NAME=VALUE ...]

DIR keeps an index of two shards of the default type over N random unit vectors (384 dimensions, MiniLM's fingerprint). The
first start of a round has an empty scratch directory, so the command loads the model for its fingerprint; the second finds it there. Both have their files in the page cache.

A sampler reads the command's processes four times a second. It reports of each: when it began, when it took its role (its title
changed, so its imports were done), and the CPU seconds that it had used when the API was ready. `driver` has the seconds at which steps
of the command ended. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import material
import numpy as np
import psutil
from serving_http import free_port

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.retrieval.shards import Build, shard_of
from infembed_ray.retrieval.versions import IndexFacts
from tests.support.shards import write_shard

DIMENSION, SHARDS, WORDS = 384, 2, 40
SAMPLE_S, TIMEOUT_S = 0.25, 120.0
DRIVER = """
import functools, sys, time
def note(step): print(f"step {time.time():.3f} {step}", flush=True)
note("interpreter")
from infembed_ray.cli import main as cli
from infembed_ray.serving import distributed
note("imports")
def timed(owner, name, step):
    inner = getattr(owner, name)
    @functools.wraps(inner)
    def outer(*args, **kwargs):
        result = inner(*args, **kwargs)
        note(step)
        return result
    setattr(owner, name, outer)
timed(distributed.Plan, "resolve", "plan")
for name in ("_connect", "_start_serve", "switch_to", "roll_out"):
    timed(distributed, name, name.strip("_"))
sys.exit(cli.main(sys.argv[1:]))
"""


def make(root: Path, passages: int) -> None:
    """Write a published index of random unit vectors."""
    encoder = InstructionEncoder.from_pretrained(material.minilm())
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((passages, DIMENSION), dtype=np.float32)
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    words = np.array([f"word{n}" for n in range(2000)])
    texts = [" ".join(row) for row in words[rng.integers(0, len(words), (passages, WORDS))]]
    ids = [f"p{n:07d}" for n in range(passages)]
    of = np.array([shard_of(id, SHARDS) for id in ids])
    facts = []
    for number in range(SHARDS):
        rows = np.flatnonzero(of == number)
        mine = [ids[row] for row in rows], [texts[row] for row in rows], vectors[rows]
        facts.append(write_shard(root / f"shard-{number:05d}", *mine, build=Build(shards=SHARDS)))
    described = IndexFacts(
        encoder=encoder.fingerprint(),
        model=material.minilm(),
        template=encoder.text.template,
        dimension=DIMENSION,
        passages=passages,
        shards=facts,
        lineage="v1",
    )
    manifest = {"stage": "index", "identity": "v1", "created": "", "index": described.as_json()}
    (root / "manifest.json").write_text(json.dumps(manifest))


class Sampler(threading.Thread):
    """Watches the descendants of a process until `stop` is called."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._root, self._ended = process, threading.Event()
        self.seen: dict[int, dict[str, Any]] = {}

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            with suppress(psutil.Error):
                for process in (self._root, *self._root.children(recursive=True)):
                    with suppress(psutil.Error):
                        self._look(process)

    def _look(self, process: psutil.Process) -> None:
        name, times = title(process), process.cpu_times()
        entry = self.seen.setdefault(process.pid, {"began": process.create_time(), "names": {}})
        entry["names"].setdefault(name, (time.time(), times.user + times.system))
        entry["cpu"] = times.user + times.system

    def stop(self, start: float) -> list[dict[str, Any]]:
        """End, and return what was seen, in seconds since the start."""
        self._ended.set()
        self.join()
        rows = []
        for entry in self.seen.values():
            name, (at, cpu) = list(entry["names"].items())[-1]
            row = {"process": name, "began": entry["began"] - start, "role": at - start, "cpu_before_role": cpu}
            rows.append({**{k: v if isinstance(v, str) else round(v, 2) for k, v in row.items()}, "cpu": entry["cpu"]})
        return sorted(rows, key=lambda row: row["began"])


def title(process: psutil.Process) -> str:
    """Return what a process is: a replica's deployment, an actor, or a script."""
    words = process.cmdline()
    if not words:
        return process.name()
    if match := re.match(r"ray::(?:ServeReplica:)?([\w:-]*)", words[0]):
        return re.sub(r"infembed(-\w+-\w+-\w+)?:", "", match[1])
    script = next((word for word in words[1:] if word.endswith(".py")), words[0])
    return Path(script).name


def start(index: Path, user_cache: Path, settings: list[str]) -> dict[str, Any]:
    """Start the command, search once, end it; return the seconds."""
    port = free_port()
    command = [sys.executable, "-c", DRIVER, "serve", f"index={index}", f"port={port}", *settings]
    environment = os.environ | {"INFEMBED_SCRATCH": str(user_cache), "PYTHONUNBUFFERED": "1"}
    body = json.dumps({"query": "Is anybody there?", "instruction": "Only guidelines.", "top_k": 10}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/search", body, {"Content-Type": "application/json"})
    began = time.time()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    sampler = Sampler(psutil.Process(process.pid))
    sampler.start()
    driver: dict[str, float] = {}
    try:
        for line in process.stdout:
            if line.startswith("step "):
                _, at, step = line.split()
                driver[step] = round(float(at) - began, 2)
            elif "press Ctrl-C" in line:
                break
        ready = time.time() - began
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            assert len(json.load(response)["hits"]) == 10
        answered = time.time() - began
        processes = sampler.stop(began)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    cpu = sum(row["cpu"] for row in processes)
    return {"ready": ready, "first_answer": answered, "cpu": cpu, "driver": driver, "processes": processes}


def main() -> None:
    """Measure, print a table, and print a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cache", type=Path, required=True, help="directory that keeps the index")
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--setting", nargs="*", default=[], help="settings of `infembed serve`")
    given = parser.parse_args()
    index = given.cache / f"index-{given.passages}" / "v1"
    if not (index / "manifest.json").is_file():
        make(index, given.passages)
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "second": []}
    for _ in range(given.rounds):
        user_cache = given.cache / "user-cache"
        shutil.rmtree(user_cache, ignore_errors=True)
        for name, starts in found.items():
            starts.append(start(index, user_cache, given.setting))
            print(f"{name}: ready {starts[-1]['ready']:.1f} s {starts[-1]['driver']}")
            for row in starts[-1]["processes"]:
                print(
                    "  {process:24} began {began:5.1f} role {role:5.1f} cpu {cpu_before_role:5.2f} {cpu:6.2f}".format(
                        **row
                    ),
                    flush=True,
                )
    figures = {
        name: {key: round(statistics.median(s[key] for s in starts), 2) for key in ("ready", "first_answer", "cpu")}
        for name, starts in found.items()
    }
    last = {name: {key: starts[-1][key] for key in ("driver", "processes")} for name, starts in found.items()}
    machine = f"{os.cpu_count()} vCPU, {platform.system()}, Python {platform.python_version()}"
    facts = {"passages": given.passages, "rounds": given.rounds, "machine": machine, "date": date.today().isoformat()}
    print(json.dumps({**figures, "last": last, **facts}))


if __name__ == "__main__":
    main()
