"""The quickstart as a newcomer runs it: a process of its own, an empty directory, no key."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from infembed_ray.storage import resolve


def quickstart(root, port):
    """Run it under `root` as the working directory: all paths are relative, as in the README."""
    root.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENAI_API_KEY", "RAY_ADDRESS")}
    return subprocess.run(
        [sys.executable, "-m", "infembed_ray.cli", "quickstart", "--directory", "runs", "--port", str(port)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.ray
@pytest.mark.end_to_end
@pytest.mark.timeout(1800)
def test_the_whole_product_runs_on_the_sample_and_a_second_run_only_asks_again(tmp_path, minilm):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first = quickstart(tmp_path, port)
    assert first.returncode == 0, first.stderr[-2000:]

    funnel = json.loads((resolve(tmp_path / "runs" / "records") / "manifest.json").read_text())["counts"]
    assert funnel["calls"] == 0
    assert funnel["seeds"] == funnel["kept"] + funnel["rejected"] + funnel["dead_letter"] == 144
    before, after = json.loads((resolve(tmp_path / "runs" / "results") / "manifest.json").read_text())[
        "figures"
    ].values()
    assert after["records"]["p-MRR"] > before["records"]["p-MRR"]
    firsts = [line for line in first.stdout.splitlines() if re.match(r"│ 1 ", line)]
    assert len(firsts) == 1
    assert "databases-02/positive  <- what was asked for" in firsts[0]
    assert "databases-02/negative_instruction" in firsts[0]
    assert (tmp_path / "runs" / "report.html").stat().st_size > 5_000

    second = quickstart(tmp_path, port)
    assert second.returncode == 0, second.stderr[-2000:]
    assert second.stdout.count("nothing to do: same inputs and settings") == 5
    assert "databases-02/positive  <- what was asked for" in second.stdout


def test_a_port_in_use_is_refused_before_any_work(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = quickstart(tmp_path, port)
    assert refused.returncode == 2
    assert f"port={port}" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()
