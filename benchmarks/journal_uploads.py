"""What uploads of a journal cost the process that appends to it: 1000 answers a second, with and without an object store.

    python benchmarks/journal_uploads.py [--every-s 3] [--rounds 2]

Prints CPU seconds of the process, and how late the event loop wakes (ms). The store is moto, in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from journal_store import store

from infembed_ray.llm.chat import Completion, Request
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.journal_store import open_journal
from infembed_ray.storage.object_store import SCRATCH, Folder

SECONDS, PER_SECOND = 12, 1000


async def append(journal: Journal) -> dict[str, float]:
    """Append at a constant rate; return the figures."""
    answer = Completion("x" * 800, "stop", "gpt-4o-mini-2024-07-18", 400, 110)
    late_ms: list[float] = []
    appends: list[asyncio.Task[None]] = []
    began, cpu = time.perf_counter(), time.process_time()
    while (now := time.perf_counter() - began) < SECONDS:
        for number in range(len(appends), int(now * PER_SECOND)):
            request = Request("gpt-4o-mini", ({"role": "user", "content": str(number)},), "p=1", "s", "r")
            appends.append(asyncio.create_task(journal.append(request, answer)))
        slept = time.perf_counter()
        await asyncio.sleep(0.005)
        late_ms.append(1000 * (time.perf_counter() - slept - 0.005))
    await asyncio.gather(*appends)
    late_ms.sort()
    late = {name: round(late_ms[int(share * (len(late_ms) - 1))], 1) for name, share in (("p99", 0.99), ("max", 1.0))}
    return {"answers": len(appends), "cpu_s": round(time.process_time() - cpu, 2), **late}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--every-s", type=float, default=3.0, help="seconds between uploads; the product's default is 60"
    )
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with store(), tempfile.TemporaryDirectory() as directory:
        os.environ[SCRATCH] = directory
        for number in range(options.rounds):
            print("directory   ", asyncio.run(append(Journal(Path(directory) / f"local {number}"))), flush=True)
            journal = open_journal(Folder(f"s3://bucket/{number}"), upload_s=options.every_s)
            print("object store", asyncio.run(append(journal)), flush=True)
            journal.close()


if __name__ == "__main__":
    main()
