"""Start of a synthesis actor on a large journal: seconds, and memory of the process.

    python benchmarks/journal_resume.py [--entries 10000000] [--directory PATH]

Writes a journal of 8 actors, as large as `--entries` answers of realistic length, and opens it as one actor of a resumed run
does, each time in a new process:

    same      the run has the number of actors that wrote the journal (1, 4 or 8), so the actor reads its own segments
    other     the run has another number of actors (4, on segments of 8), so every actor reads and indexes all

The last line is one JSON object. `memory_mb` is the growth of the process by opening the journal, at most and afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path

WRITERS = 8
TEXT = "In this case the cost comes first, then the time that it takes, and then what people say who have done it. " * 4


def write(directory: Path, entries: int) -> int:
    """Write the segments; return their size in bytes."""
    from infembed_ray.llm.chat import Completion, Request
    from infembed_ray.llm.journal import encode

    request = Request("gpt-4o-mini", (), "passage_writing=1", "hard_negative_document_1", "seed")
    line = encode(request, Completion(TEXT, "stop", "gpt-4o-mini-2024-07-18", 400, 110))
    middle = re.sub(rb'^\{"key": "\w+"|, "crc32": .*', b"", line.rstrip())
    for number in range(WRITERS):
        name = f"node-1-0000000{number}-{number + 1}of{WRITERS}.jsonl"
        with (directory / name).open("wb", buffering=1 << 20) as stream:
            for _ in range(entries // WRITERS):
                said = b'{"key": "%b"%b' % (os.urandom(32).hex().encode(), middle)
                stream.write(b'%b, "crc32": "%08x"}\n' % (said, zlib.crc32(said)))
    return sum(file.stat().st_size for file in directory.iterdir())


def memory_mb() -> dict[str, float]:
    status = Path("/proc/self/status").read_text()
    return {name: int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1024 for name in ("VmHWM", "VmRSS")}  # type: ignore[index]


def open_as(directory: Path, number: int, of: int) -> None:
    """Open the journal as an actor and print what that took."""
    from infembed_ray.llm.journal import Journal

    before, cpu, began = memory_mb(), time.process_time(), time.perf_counter()
    journal = Journal(directory, partition=f"{number}of{of}")
    took = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    after = memory_mb()
    print(json.dumps({
        **{name: round(value, 2) for name, value in took.items()},
        "memory_mb": [round(after["VmHWM"] - before["VmRSS"]), round(after["VmRSS"] - before["VmRSS"])],
        "entries": len(journal),
    }))  # fmt: skip


def views(directory: Path) -> Iterator[tuple[str, Path, int]]:
    """Yield (case, directory, number of actors); the same bytes under the names that 1, 4 or 8 actors would give."""
    segments = sorted(directory.glob("*.jsonl"))
    for of in (1, 4, 8):
        view = directory / f"written by {of}"
        view.mkdir()
        for number, segment in enumerate(segments):
            (view / f"node-1-0000000{number}-{number % of + 1}of{of}.jsonl").hardlink_to(segment)
        yield "same", view, of
    yield "other", directory, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--directory", type=Path, help="where the journal is written for a while; default: /tmp")
    parser.add_argument("--open", nargs=3, metavar=("DIRECTORY", "NUMBER", "OF"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        open_as(Path(options.open[0]), int(options.open[1]), int(options.open[2]))
        return

    figures: dict[str, dict[str, object]] = {}

    def measure(case: str, directory: Path, of: int) -> None:
        command = [sys.executable, __file__, "--open", str(directory), "1", str(of)]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        figures[f"{case}, {of} actors"] = json.loads(found)
        print(case, of, found.strip(), flush=True)

    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        began = time.perf_counter()
        size = write(Path(name), options.entries)
        print(f"wrote {size / 1e9:.2f} GB in {time.perf_counter() - began:.0f} s", flush=True)
        for case, directory, of in views(Path(name)):
            measure(case, directory, of)
    print(json.dumps({
        "entries": options.entries, "bytes": size, "figures": figures,
        "machine": f"{os.cpu_count()} vCPU, {platform.system()}", "load": os.getloadavg(), "date": date.today().isoformat(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
