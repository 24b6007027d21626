"""20,000 seeds with faults of every kind: every seed has an outcome, and memory does not grow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_seed_comes_out_and_memory_stays_flat() -> None:
    command = [sys.executable, "benchmarks/synthesis_endurance.py", "--seeds=20000"]
    figures = json.loads(
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True).stdout.splitlines()[-1]
    )
    print(f"\n{figures}")
    counts = figures["counts"]
    assert counts["kept"] + counts["rejected"] + counts["dead_letter"] == counts["seeds"] == 20_000
    assert figures["unaccounted"] == figures["answered_twice"] == 0
    assert figures["driver_growth"] < 1.2
    assert figures["actor_growth"] < 1.2
