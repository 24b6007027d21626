"""Many seeds with faults of every kind: all are accounted for, and memory does not grow with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infembed_ray import records, storage
from tests.chaos.test_kills import workers_of
from tests.stand_in_llm import ATTEMPT_FAULTS, REQUEST_FAULTS, stand_in

SEEDS = 20_000
REPOSITORY = Path(__file__).parents[2]


def resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_seed_comes_out_and_memory_stays_flat(tmp_path: Path) -> None:
    seeds, output = tmp_path / "seeds.jsonl", tmp_path / "out"
    with seeds.open("w", encoding="utf-8") as stream:
        for number in range(SEEDS):
            passage = (
                f"{number}: people {'near the river ' * (number % 9 + 1)}gather bramble and thistle for {number % 97}."
            )
            stream.write(json.dumps({"id": str(number), "query": f"about {number}", "passage": passage}) + "\n")
    faults = dict.fromkeys((*ATTEMPT_FAULTS, *REQUEST_FAULTS), 0.01)
    with stand_in(latency_s=0.05, jitter_s=0.05, retry_after_s=0.2, mistaken=0.1, **faults) as server:
        command = [
            *(sys.executable, "-m", "infembed_ray.cli", "synthesize", f"seeds={seeds}", f"output={output}"),
            *("in_flight=128", "actors=2", f"endpoint.base_url={server.url}", "endpoint.api_key_env=null"),
            "endpoint.timeout_s=3",
        ]
        with (tmp_path / "driver.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
        began, measured = time.monotonic(), list[tuple[float, float, float]]()
        while process.poll() is None:
            time.sleep(5)
            actors = [resident_mb(pid) for pid in workers_of(output / "journal")]
            measured.append((time.monotonic() - began, resident_mb(process.pid), max(actors, default=0.0)))
        assert process.returncode == 0, (tmp_path / "driver.log").read_text()[-2000:]
    manifest = storage.read_manifest(storage.resolve(output), "output")
    counts = manifest["counts"]
    assert counts["kept"] + counts["rejected"] + counts["dead_letter"] == SEEDS
    published = storage.resolve(output)
    files = (records.KEPT_FILE, records.REJECTED_FILE, records.DEAD_LETTER_FILE)
    ids = [row["id"] for file in files for row in records.read_raw(published / file)]
    assert sorted(ids, key=int) == [str(number) for number in range(SEEDS)]
    print(f"\n{counts}\n{manifest['traffic']}")
    print("seconds, driver MB, largest actor MB:")
    steady = [each for each in measured if each[2] > 0][2:-2]
    for seconds, of_driver, of_actor in steady[:: max(1, len(steady) // 20)]:
        print(f"{seconds:6.0f} {of_driver:7.0f} {of_actor:7.0f}")
    middle, last = steady[len(steady) // 3], steady[-1]
    assert last[1] < 1.25 * middle[1]
    assert last[2] < 1.25 * middle[2]
