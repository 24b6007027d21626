"""Memory of synthesis over time: 20,000 seeds through all steps, with 1 % of every kind of fault.

    python benchmarks/synthesis_endurance.py --figure memory.svg

The stand-in endpoint is tests/support/stand_in_llm.py: 429s, 500s, hangs, dropped connections, truncated bodies, rejected
requests, refusals, empty, cut-off and malformed answers, 1 % each, and 10 % of wrong judgements. The budget and the limits
per minute are on, but never reached. The memory of the driver and of each actor is read every two seconds; `private` leaves
out shared pages, mainly those of the object store.

The last line is one JSON object: the counts, `unaccounted` (must be 0), and `driver_growth` and `actor_growth`, the private
memory at the end / after a third of the run (each the median of a tenth of the run).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.chaos.seeds import write_seeds  # noqa: E402
from tests.support.stand_in_answers import UNUSABLE  # noqa: E402
from tests.support.stand_in_llm import ATTEMPT_FAULTS, REQUEST_FAULTS, StandIn, stand_in_process  # noqa: E402

EVERY_S = 2.0

Sample = tuple[float, dict[str, tuple[float, float]]]
"""Seconds since the start, and process -> resident and private MB."""


def memory_mb(pid: int) -> tuple[float, float]:
    resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    page = os.sysconf("SC_PAGE_SIZE") / 1e6
    return resident * page, (resident - shared) * page


def writers(journal: Path) -> list[int]:
    """Return the processes of a journal's segments, in their order."""
    return sorted(int(segment.stem.split("-")[-3]) for segment in journal.glob("*.jsonl"))


def follow(process: subprocess.Popen[bytes], journal: Path) -> list[Sample]:
    """Read the memory of the driver and the actors until the driver ends."""
    began, samples = time.monotonic(), list[Sample]()
    while process.poll() is None:
        sample = {}
        named = {"driver": process.pid, **{f"actor {n}": pid for n, pid in enumerate(writers(journal), start=1)}}
        for name, pid in named.items():
            try:
                sample[name] = memory_mb(pid)
            except (OSError, ValueError):  # the process has just ended
                continue
        samples.append((time.monotonic() - began, sample))
        time.sleep(EVERY_S)
    return samples


def growth(samples: list[Sample], name: str) -> float:
    values = [sample[name][1] for _, sample in samples if name in sample]
    tenth = max(1, len(values) // 10)
    third = len(values) // 3
    return statistics.median(values[-tenth:]) / statistics.median(values[third : third + tenth])


def synthesize(seeds: Path, output: Path, server: StandIn, log: Path) -> list[Sample]:
    command = [
        *(sys.executable, "-m", "infembed_ray.cli", "synthesize", f"seeds={seeds}", f"output={output}"),
        *(f"endpoint.base_url={server.url}", "endpoint.api_key_env=null", "endpoint.timeout_s=3"),
        *("actors=2", "in_flight=64", "generator={model: gpt-4o-mini, temperature: 1.0, max_tokens: 400}"),
        "judge={model: o4-mini, max_tokens: 2000}",
        *("limits.requests_per_minute=1000000", "limits.tokens_per_minute=10000000000", "limits.budget_usd=10000"),
    ]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=stream, stderr=stream)
        samples = follow(process, output / "journal")
    if process.returncode:
        raise SystemExit(log.read_text()[-3000:])
    return samples


WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 340, 56, 40, 110, 44
COLOURS = {"driver": "#2a6f97", "actor 1": "#c8553d", "actor 2": "#d9a441"}


def figure(samples: list[Sample], title: str) -> str:
    """Draw resident memory over time as SVG; private memory is dashed."""
    last = samples[-1][0]
    most = max(value[0] for _, sample in samples for value in sample.values())
    step = next(s for s in (50, 100, 200, 500, 1000, 2000) if most / s <= 6)
    top = (int(most / step) + 1) * step

    def x(seconds: float) -> float:
        return LEFT + seconds / last * (WIDTH - LEFT - RIGHT)

    def y(mb: float) -> float:
        return HEIGHT - BOTTOM - mb / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
    ]
    for mb in range(0, top + 1, step):
        parts.append(f'<path d="M{LEFT} {y(mb):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(mb) + 4:.1f}" text-anchor="end">{mb}</text>')
    minutes = last / 60
    every = next(m for m in (0.5, 1, 2, 5, 10, 20) if minutes / m <= 12)
    for number in range(int(minutes / every) + 1):
        at = number * every
        parts.append(f'<text x="{x(60 * at):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{at:g}</text>')
    parts.append(f'<text x="{x(last):.1f}" y="{HEIGHT - 8}" text-anchor="end">minutes</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 6}" text-anchor="end">MB</text>')
    ends = []
    for name, colour in COLOURS.items():
        for kind, dashes in ((0, ""), (1, ' stroke-dasharray="3 3"')):
            points = [f"{x(at):.1f},{y(sample[name][kind]):.1f}" for at, sample in samples if name in sample]
            parts.append(
                f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>'
            )
        resident, private = next(sample[name] for _, sample in reversed(samples) if name in sample)
        ends += [(y(resident), colour, name), (y(private), colour, "private")]
    below = 0.0
    for at, colour, label in sorted(ends):
        below = max(at + 4, below + 13)
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{below:.1f}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--latency-s", type=float, default=0.05)
    parser.add_argument("--figure", type=Path, help="SVG file to write")
    parser.add_argument("--samples", type=Path, help="JSONL file to write: seconds, process -> [resident, private] MB")
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

    from infembed_ray.records import tables
    from infembed_ray.storage import steps

    faults = dict.fromkeys((*ATTEMPT_FAULTS, *REQUEST_FAULTS), 0.01)
    with tempfile.TemporaryDirectory() as name:
        seeds, output = write_seeds(Path(name) / "seeds.jsonl", options.seeds), Path(name) / "out"
        with stand_in_process(
            latency_s=options.latency_s, jitter_s=0.05, retry_after_s=0.2, mistaken=0.1, **faults
        ) as server:
            samples = synthesize(seeds, output, server, Path(name) / "driver.log")
            log = server.log()
        published = steps.resolve(output)
        manifest = steps.read_manifest(published, "output")
        files = (tables.KEPT_FILE, tables.REJECTED_FILE, tables.DEAD_LETTER_FILE)
        ids = Counter(row["id"] for file in files for row in tables.read_raw(published / file))
    if options.samples:
        options.samples.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    if options.figure:
        title = f"{options.seeds:,} seeds, {len(log):,} requests, 2 actors: resident memory, private dashed"
        options.figure.write_text(figure(samples, title))
    actors = sorted({name for _, sample in samples for name in sample if name.startswith("actor")})
    usable = (entry for entry in log if entry["ended"] == "answered" and entry["fault"] not in UNUSABLE)
    answered = Counter(entry["request"] for entry in usable)
    print(json.dumps({
        "counts": manifest["counts"],
        "unaccounted": options.seeds - len(ids) + sum(times - 1 for times in ids.values()),
        "seconds": manifest["seconds"],
        "requests": dict(Counter(entry["ended"] for entry in log)),
        "answered_twice": sum(times > 1 for times in answered.values()),
        "driver_growth": round(growth(samples, "driver"), 3),
        "actor_growth": round(max(growth(samples, name) for name in actors), 3),
        "machine": f"{os.cpu_count()} vCPU, {platform.system()}",
        "date": date.today().isoformat(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
