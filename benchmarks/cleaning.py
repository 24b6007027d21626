"""Near-duplicates and contamination of many records: seconds, and memory of the processes.

    python benchmarks/cleaning.py [--records 200000] [--directory PATH]

Writes synthetic records (words by Zipf's law; one in seven is a copy of an earlier one with a few words changed) and an evaluation set of
5,000 passages, one in a hundred of them taken from the records. `infembed analyze clean=true` runs in a new process.

The last line is one JSON object. `driver_mb` and `worker_mb` are the largest private memory of the driver and of a worker, sampled every 0.5 s, without
pages of Ray's object store.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

VOCABULARY = 30_000
LENGTHS = {
    "query_positive": 8,
    "instruction_positive": 35,
    "instruction_negative": 35,
    "query_negative": 8,
    "document_positive": 55,
    "hard_negative_document_1": 55,
    "hard_negative_document_2": 55,
}
"""Words of each column, as in the paper's set."""
COPIES = 7
"""One record of this many is a changed copy of another."""


def rows(number: int) -> Iterator[dict[str, Any]]:
    """Yield synthetic records."""
    rng = np.random.default_rng(0)
    words = np.array([f"word{n}" for n in range(VOCABULARY)])
    shares = 1 / np.arange(1, VOCABULARY + 1)
    earlier: dict[str, np.ndarray] = {}
    for row in range(number):
        if row % COPIES == COPIES - 1:
            texts = {name: text.copy() for name, text in earlier.items()}
            for text in texts.values():
                text[rng.integers(len(text), size=rng.integers(3))] = rng.choice(words)
        else:
            drawn = rng.choice(words, size=sum(LENGTHS.values()), p=shares / shares.sum())
            texts = dict(zip(LENGTHS, np.split(drawn, np.cumsum(list(LENGTHS.values()))[:-1]), strict=True))
            earlier = texts
        yield {"id": f"r{row}", "source": "made", **{name: " ".join(text) for name, text in texts.items()}}


def write(directory: Path, number: int) -> None:
    """Write the records and the evaluation set."""
    from infembed_ray.records.tables import RECORD

    passages = []
    with pq.ParquetWriter(directory / "records.parquet", RECORD) as file:
        waiting = []
        for place, row in enumerate(rows(number)):
            waiting.append(row)
            if place % (number // 50) == 0:
                passages.append(row["document_positive"])
            if len(waiting) == 10_000 or place == number - 1:
                file.write_table(pa.Table.from_pylist(waiting, RECORD))
                waiting = []
    others = (row["document_positive"][::-1] for row in rows(4950))
    lines = [json.dumps({"id": str(n), "text": text}) for n, text in enumerate([*passages, *others])]
    (directory / "evaluation.jsonl").write_text("\n".join(lines))


def analyze(directory: Path) -> dict[str, int]:
    """Run `infembed analyze clean=true`."""
    from infembed_ray.analysis.analyze import run
    from infembed_ray.config.analysis import AnalyzeSettings

    with tempfile.TemporaryDirectory(dir=directory) as output:
        settings = AnalyzeSettings(
            records=str(directory / "records.parquet"),
            output=output,
            clean=True,
            evaluations={"e": str(directory / "evaluation.jsonl")},
        )
        return dict(run(settings).manifest["counts"])


CASES = {"analyze": analyze}


def private_mb(process: psutil.Process) -> float:
    """Return the private memory of a process, without pages of Ray's object store that only this process has touched."""
    maps = (each for each in process.memory_maps(grouped=False) if not each.path.startswith("/dev/shm"))
    return float(sum(each.private_clean + each.private_dirty for each in maps)) / 2**20


def measure(case: str, directory: Path) -> dict[str, Any]:
    """Run a case in a process of its own and watch its memory."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, __file__, "--case", case, "--directory", str(directory)], stdout=subprocess.PIPE, text=True
    )
    driver = psutil.Process(process.pid)
    most = {"driver_mb": 0.0, "worker_mb": 0.0}
    while process.poll() is None:
        for each in [driver, *driver.children(recursive=True)]:
            try:
                kind = "driver_mb" if each == driver else "worker_mb"
                if each == driver or each.name().startswith("ray::"):
                    most[kind] = max(most[kind], private_mb(each))
            except psutil.Error:
                continue
        time.sleep(0.5)
    assert process.stdout is not None
    counts = json.loads(process.stdout.read().splitlines()[-1])
    seconds = round(time.monotonic() - began, 1)
    return {"case": case, "s": seconds, **{name: round(value) for name, value in most.items()}, "counts": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--case", choices=CASES)
    options = parser.parse_args()
    if options.case:
        return print(json.dumps(CASES[options.case](options.directory)))
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        write(Path(directory), options.records)
        found = [measure(case, Path(directory)) for case in CASES]
    print(
        json.dumps(
            {"date": str(date.today()), "machine": platform.platform(), "records": options.records, "cases": found}
        )
    )


if __name__ == "__main__":
    main()
