"""Searches go on while replicas and a node are killed and the index changes; and overload is refused, not suffered."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def figures(minilm):
    command = [sys.executable, "benchmarks/serving_chaos.py", "--seconds=100", "--rate=8", "--overload-seconds=10"]
    command += ["--passages=100"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_search_is_lost_and_none_mixes_indexes(figures):
    assert figures["failed"] == 0, figures["chaos"]["faults"]
    assert figures["cut"] <= 5
    assert figures["mixed"] == 0
    assert figures["chaos"]["answered"] == figures["chaos"]["requests"] >= 800
    assert min(figures["chaos"]["answers_of"].values()) > 0  # both indexes did serve
    assert set(figures["chaos"]["statuses"]) - {"0"} <= {"200", "429", "503"}


def test_overload_is_refused_with_a_time_to_come_back_and_passes(figures):
    storm = figures["overload"]
    assert storm["unexpected"] == 0
    assert storm["mixed"] == 0
    assert storm["statuses"]["429"] > 0
    assert storm["goodput_per_second"] > 0
    assert storm["failed_after"] == 0
    before, peak = storm["largest_replica_mb"]
    assert peak < 2 * before
