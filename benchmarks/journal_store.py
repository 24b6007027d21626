"""Throughput and CPU of synthesis with its journal in an object store, against a local directory.

    python benchmarks/journal_store.py [--rounds 3] [--rows 3000]

The whole product runs as in synthesis_fanout.py: 256 requests in flight, two actors, answers after 100 ms. The object store
is moto, in a process of its own. The two places alternate in each round. The last line is one JSON object:

    rate    requests per second with the object store / with the directory, of the medians
    cpu     CPU seconds on the cores of the run (with both servers) per answered request, in the same ratio
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from synthesis_fanout import IN_FLIGHT, server  # noqa: E402

_STORE = """
import sys
from tests.support import object_store
with object_store.server() as environment:
    print(__import__("json").dumps(environment), flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def store() -> Iterator[None]:
    """Serve a bucket while the block runs, with the environment that leads to it."""
    with subprocess.Popen(
        [sys.executable, "-c", _STORE], cwd=HERE.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            os.environ.update(json.loads(process.stdout.readline()))
            yield
        finally:
            process.kill()


def cpu_s() -> float:
    """CPU seconds used on the cores of this process (`taskset`), where nothing else may run beside the measurement."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    return sum(sum(map(int, used[:3])) for core, *used in lines if core in cores) / os.sysconf("SC_CLK_TCK")


def run(url: str, seeds: Path, output: Path, journal: str, every_s: float) -> None:
    """Run `infembed synthesize` in a process of its own, with its own cluster."""
    arguments = {
        "seeds": seeds,
        "output": output,
        "journal": journal,
        "journal_upload_s": every_s,
        "generator.model": "gpt-4o-mini",
        "generator.max_tokens": 400,
        "judge.model": "o4-mini",
        "judge.max_tokens": 2000,
        "endpoint.base_url": url,
        "endpoint.api_key_env": "null",
        "actors": 2,
        "in_flight": IN_FLIGHT // 2,
    }
    command = [sys.executable, "-m", "infembed_ray.cli", "synthesize", *(f"{k}={v}" for k, v in arguments.items())]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode and "0 of " not in done.stderr:  # the server's constant verdict may reject all of few rows
        raise RuntimeError(done.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=3000, help="seeds; each needs at least six requests")
    parser.add_argument(
        "--every-s", type=float, default=5.0, help="seconds between uploads; the product's default is 60"
    )
    options = parser.parse_args()
    taken: dict[str, list[dict[str, float]]] = {"directory": [], "object store": []}
    with tempfile.TemporaryDirectory() as name, store():
        seeds = Path(name) / "seeds.jsonl"
        with seeds.open("w", encoding="utf-8") as stream:
            for number in range(options.rows):
                passage = f"passage {number} " + "of some words that say what there is to say " * 6
                stream.write(json.dumps({"id": str(number), "query": f"what of {number}", "passage": passage}) + "\n")
        for number in range(options.rounds):
            for place in taken:
                output = Path(name) / f"{place} {number}"
                journal = str(output / "journal") if place == "directory" else f"s3://bucket/{number}/journal"
                figures: dict[str, float] = {}
                began, before = time.perf_counter(), cpu_s()
                with server([f"--seed={number}"], figures) as url:
                    run(url, seeds, output, journal, options.every_s)
                    used, wall = cpu_s() - before, time.perf_counter() - began
                figures |= {"cpu_ms": 1000 * used / figures["answered"], "wall_s": wall}
                taken[place].append(figures)
                print(f"round {number + 1} {place:<13}{figures}", flush=True)

    def ratio(figure: str) -> float:
        local, stored = (statistics.median(each[figure] for each in taken[place]) for place in taken)
        return round(stored / local, 3)

    print(json.dumps({
        "rate": ratio("per_second"), "cpu": ratio("cpu_ms"), "figures": taken,
        "machine": f"{os.cpu_count()} vCPU, {platform.system()}", "load": os.getloadavg(), "date": date.today().isoformat(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
