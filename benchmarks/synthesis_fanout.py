"""Request rate of synthesis against a bare aiohttp client and peers, on one machine in one run.

    python benchmarks/synthesis_fanout.py [--curator-python PATH] [--distilabel-python PATH] [--figures FILE]

Ours is the whole product: `infembed synthesize` over Ray Data, journal with fsync, limits of requests, tokens and USD
(never reached), parsing, filters, judge, Parquet output. Every client has 256 requests in flight. The server is another
process and answers after 100 ms. A rate is the server's answers per second between the first and the last fifth, which
leaves out the start and the end. Figures are medians of rounds; in each round the clients alternate. --figures adds the
rounds that a file holds to these.

Peers run in their own environments: a Python with bespokelabs-curator and one with distilabel, given by flags or by
CURATOR_PYTHON and DISTILABEL_PYTHON. Without them their figures are null, with the reason.

The last line is one JSON object:
    vs_aiohttp        rate of ours / rate requests of bare aiohttp
    vs_aiohttp_contended   the same while a third process spins on one of the two cores
    cpu_ms_per_request     CPU of a request in the steady part, median, in ms: `actors` (the product's actors), `driver`, `ray`
                      (Ray's processes and the actor of the limits), and `aiohttp` (the bare client)
    cpu_vs_aiohttp    CPU of the actors / CPU of bare aiohttp, which does not depend on the machine's speed
    with_429          ours with 5 % of 429s (Retry-After: 1) / ours without
    with_stragglers   ours with 1 in 64 answers after 3 s / ours without. With 256 in flight, 256 / 145 ms = 1762 per
                      second is then the upper bound; stragglers_of_bound is the share of it that ours reaches.
    with_stragglers_and_more_in_flight   the same with 372 in flight, whose bound equals that of 256 without stragglers
    vs_curator, vs_distilabel
    per_second        median, minimum and maximum of each client and case
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from cpu_use import CpuUse  # noqa: E402

IN_FLIGHT = 256
CLIENTS = ("aiohttp", "ours", "curator", "distilabel")
STRAGGLERS = f"--stragglers={1 / 64}"
WITH_STRAGGLERS_S = 0.1 + (3.0 - 0.1) / 64
"""Mean latency with stragglers; without them it is 0.1 s."""
CASES: dict[str, tuple[list[str], int]] = {
    "plain": ([], IN_FLIGHT),
    "contended": ([], IN_FLIGHT),
    "429": (["--rate-limited=0.05"], IN_FLIGHT),
    "stragglers": ([STRAGGLERS], IN_FLIGHT),
    "stragglers, more in flight": ([STRAGGLERS], round(IN_FLIGHT * WITH_STRAGGLERS_S / 0.1)),
}
"""Flags of the server, requests in flight."""
SPIN = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
"""Program that keeps one core busy."""

Client = Callable[[str, int], None]


@contextlib.contextmanager
def server(flags: list[str], figures: dict[str, float]) -> Iterator[str]:
    """Run the server; afterwards `figures` holds its counts."""
    command = [sys.executable, str(HERE / "llm_server.py"), *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
            figures.update(json.loads(process.communicate()[0]))
        finally:
            process.kill()


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy."""
    with subprocess.Popen([sys.executable, "-c", SPIN]) as spinner:
        try:
            yield
        finally:
            spinner.kill()


def kind_of(command: str) -> str:
    """Return the kind of a process, by its command line."""
    parts = {"llm_server.py": "server", "sched_setaffinity": "spinner", "/peers/": "client", "_Synthesizer": "actors"}
    return next((kind for part, kind in parts.items() if part in command), "ray")


def measure(client: Client, case: str, seed: int) -> dict[str, Any]:
    """Return the server's figures, and the CPU of a request by kind of process."""
    flags, in_flight = CASES[case]
    figures: dict[str, Any] = {}
    with (
        CpuUse(kind_of) as cpu,
        busy_core() if case == "contended" else contextlib.nullcontext(),
        server([*flags, f"--seed={seed}"], figures) as url,
    ):
        client(url, in_flight)
    began, ended = figures["steady_from"], figures["steady_to"]
    answers = max(1.0, figures["per_second"] * (ended - began))
    figures["cpu_ms"] = {kind: round(1e3 * used / answers, 4) for kind, used in cpu.between(began, ended).items()}
    return figures


def peer(python: str, script: str, requests: int) -> Client:
    """Run a client in its own process and environment."""

    def run(url: str, in_flight: int) -> None:
        command = [python, str(HERE / "peers" / script), url, str(requests), str(in_flight)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=600)

    return run


def ours(directory: Path, rows: int, actors: int) -> Client:
    """Run `infembed synthesize` on generated seeds; every row needs at least six requests."""
    from infembed_ray.config.synthesis import SynthesizeSettings
    from infembed_ray.errors import InputError
    from infembed_ray.synthesis.distributed import run as synthesize

    words = [f"word{number}" for number in range(2000)]
    rng = random.Random(0)
    seeds = directory / "seeds.jsonl"
    with seeds.open("w", encoding="utf-8") as stream:
        for number in range(rows):
            passage = " ".join(rng.choices(words, k=55))
            stream.write(json.dumps({"id": str(number), "query": f"what of {number}", "passage": passage}) + "\n")

    def run(url: str, in_flight: int) -> None:
        output = tempfile.mkdtemp(dir=directory)
        settings = SynthesizeSettings.from_mapping(
            {
                "seeds": str(seeds),
                "output": output,
                "generator": {"model": "gpt-4o-mini", "temperature": 1.0, "max_tokens": 400},
                "judge": {"model": "o4-mini", "max_tokens": 2000},
                "endpoint": {"base_url": url, "api_key_env": None},
                "limits": {"requests_per_minute": 10**7, "tokens_per_minute": 10**11, "budget_usd": 10**5},
                "actors": actors,
                "in_flight": in_flight // actors,
            }
        )
        try:
            synthesize(settings)
        except InputError as error:
            if not str(error).startswith("0 of "):  # the server's constant verdict may reject all of few rows
                raise

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4000, help="seeds of ours; each needs at least six requests")
    parser.add_argument("--requests", type=int, default=20_000, help="requests of bare aiohttp")
    parser.add_argument("--peer-requests", type=int, default=3000)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--figures", type=Path, help="JSON lines of earlier rounds; new ones are appended")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="only these")
    parser.add_argument("--curator-python", default=os.environ.get("CURATOR_PYTHON"))
    parser.add_argument("--distilabel-python", default=os.environ.get("DISTILABEL_PYTHON"))
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        clients: dict[str, Client] = {
            "aiohttp": peer(sys.executable, "aiohttp_fanout.py", options.requests),
            "ours": ours(Path(directory), options.rows, options.actors),
        }
        for name in ("curator", "distilabel"):
            python = getattr(options, f"{name}_python")
            if python is None:
                absent[name] = f"no --{name}-python given"
            else:
                clients[name] = peer(python, f"{name}_fanout.py", options.peer_requests)
        rates: dict[str, dict[str, list[float]]] = {name: {case: [] for case in CASES} for name in CLIENTS}
        cpu: dict[str, list[dict[str, float]]] = {"aiohttp": [], "ours": []}
        for taken in _lines(options.figures):
            rates[taken["client"]][taken["case"]].append(taken["per_second"])
            if taken["case"] == "plain" and taken["client"] in cpu:
                cpu[taken["client"]].append(taken["cpu_ms"])
        first = len(rates["ours"]["plain"])
        for number in range(first, first + options.rounds):
            for case in options.cases:
                for name, client in clients.items():
                    if name in absent or (name in ("curator", "distilabel") and STRAGGLERS in CASES[case][0]):
                        continue
                    try:
                        figures = measure(client, case, seed=number)
                    except subprocess.SubprocessError as error:
                        said = getattr(error, "stderr", None) or b""
                        absent[name] = f"{case}: {error} {said.decode(errors='replace')[-300:]}"
                        continue
                    rates[name][case].append(figures["per_second"])
                    if case == "plain" and name in cpu:
                        cpu[name].append(figures["cpu_ms"])
                    print(f"round {number + 1} {case:<27}{name:<11}{figures}", flush=True)
                    if options.figures is not None:
                        with options.figures.open("a", encoding="utf-8") as stream:
                            stream.write(json.dumps({"client": name, "case": case, **figures}) + "\n")
    print(json.dumps(summary(rates, absent) | cpu_summary(cpu)))


def cpu_summary(taken: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the medians of ours and of bare aiohttp."""

    def median(client: str, kind: str) -> float | None:
        values = [each[kind] for each in taken[client] if kind in each]
        return round(statistics.median(values), 3) if values else None

    ours, bare = median("ours", "actors"), median("aiohttp", "client")
    figures = {"actors": ours, "driver": median("ours", "driver"), "ray": median("ours", "ray"), "aiohttp": bare}
    return {"cpu_ms_per_request": figures, "cpu_vs_aiohttp": round(ours / bare, 3) if ours and bare else None}


def _lines(file: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file is not None and file.exists() else []


def summary(rates: Mapping[str, Mapping[str, list[float]]], absent: Mapping[str, str]) -> dict[str, Any]:
    medians = {
        name: {case: statistics.median(values) for case, values in cases.items() if values}
        for name, cases in rates.items()
    }

    def ratio(above: tuple[str, str], below: tuple[str, str]) -> float | None:
        over, under = (medians.get(name, {}).get(case) for name, case in (above, below))
        return round(over / under, 3) if over and under else None

    stragglers = medians["ours"].get("stragglers")
    return {
        "vs_aiohttp": ratio(("ours", "plain"), ("aiohttp", "plain")),
        "vs_aiohttp_contended": ratio(("ours", "contended"), ("aiohttp", "contended")),
        "with_429": ratio(("ours", "429"), ("ours", "plain")),
        "with_stragglers": ratio(("ours", "stragglers"), ("ours", "plain")),
        "stragglers_of_bound": round(stragglers * WITH_STRAGGLERS_S / IN_FLIGHT, 3) if stragglers else None,
        "with_stragglers_and_more_in_flight": ratio(("ours", "stragglers, more in flight"), ("ours", "plain")),
        "stragglers_vs_aiohttp": ratio(("ours", "stragglers"), ("aiohttp", "stragglers")),
        "vs_curator": ratio(("ours", "plain"), ("curator", "plain")),
        "vs_curator_429": ratio(("ours", "429"), ("curator", "429")),
        "vs_distilabel": ratio(("ours", "plain"), ("distilabel", "plain")),
        "per_second": {
            name: {case: [medians[name][case], min(values), max(values)] for case, values in cases.items() if values}
            for name, cases in rates.items()
        },
        "rounds": len(rates["ours"]["plain"]),
        "absent": {name: why for name, why in absent.items() if not medians[name]},
        "machine": f"{os.cpu_count()} vCPU, {platform.system()}",
        "date": date.today().isoformat(),
    }


if __name__ == "__main__":
    main()
