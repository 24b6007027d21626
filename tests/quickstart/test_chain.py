"""The quickstart as a newcomer runs it: a process of its own, an empty directory, no key."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from infembed_ray.quickstart import chain
from infembed_ray.storage import resolve

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
PRINTED, PRINTED_BY_SAMPLE = re.findall(r"```text\n(.*?)```", README, re.DOTALL)[:2]
SAMPLE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
CHECKPOINT = "runs/quickstart/checkpoint"
TOLERANCE = 0.05
"""Of figures and scores: the trained weights differ from machine to machine."""


def arguments(port, *more):
    command = [sys.executable, "-m", "infembed_ray.cli", "quickstart", "--port", str(port), *more]
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENAI_API_KEY", "RAY_ADDRESS")}
    return {"args": command, "env": environment, "text": True}


def quickstart(root, port):
    """Run it under `root` as the working directory: all paths are relative, as in the README."""
    root.mkdir(exist_ok=True)
    return subprocess.run(**arguments(port), cwd=root, capture_output=True, timeout=1500, check=False)


@contextmanager
def kept_serving(root, port):
    """Run it with `--keep-serving`; yields what it printed until it serves."""
    process = subprocess.Popen(**arguments(port, "--keep-serving"), cwd=root, stdout=subprocess.PIPE)
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        yield "".join(lines)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)


def figures(output):
    """The columns of the table before and after training, and its figures without differences, by model."""
    lines = output.splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("model  "))
    rows = [re.split(r" {2,}", line.strip()) for line in (lines[header], *lines[header + 2 : header + 4])]
    return rows[0], {name: [float(cell.split()[0]) for cell in cells] for name, *cells in rows[1:]}


def answers(output):
    """The lines of the two rankings down to the first hits, without scores."""
    lines = output[output.index("┏") : output.index("├")].splitlines()
    return [re.sub(r"\d\.\d{3}", "", line) for line in lines]


def scores(output):
    """(3, 2) scores of the passages on eating and on trials: without an instruction, for patients, for clinicians."""
    return np.array(re.findall(r"\d\.\d{3}", output), dtype=float).reshape(3, 2)


def run_sample(checkpoint, root):
    """Standard output of the README's Python sample, with another model."""
    code = SAMPLE.replace(f'"{CHECKPOINT}"', repr(checkpoint))
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300, check=True
    ).stdout


def test_the_readmes_sample_disobeys_before_training_as_the_readme_says(tmp_path, minilm):
    (sentence,) = re.findall(r"MiniLM before training gives (.*?):", README, re.DOTALL)
    eating, trials = scores(run_sample(minilm, tmp_path)).T
    assert np.stack([eating, trials], axis=1) == pytest.approx(scores(sentence), abs=0.0011)
    assert (eating < trials).all()


@pytest.mark.ray
@pytest.mark.end_to_end
@pytest.mark.timeout(3600)
def test_the_whole_product_runs_on_the_sample_and_a_second_run_only_asks_again(tmp_path, minilm):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first = quickstart(tmp_path, port)
    assert first.returncode == 0, first.stderr[-2000:]
    outputs = tmp_path / "runs" / "quickstart"

    funnel = json.loads((resolve(outputs / "records") / "manifest.json").read_text())["counts"]
    assert funnel["calls"] == 0
    assert funnel["seeds"] == funnel["kept"] + funnel["rejected"] + funnel["dead_letter"] == 144
    before, after = json.loads((resolve(outputs / "results") / "manifest.json").read_text())["figures"].values()
    assert after["records"]["p-MRR"] > before["records"]["p-MRR"]
    assert (outputs / "report.html").stat().st_size > 5_000

    # What it prints is what the README shows: one table, and the two answers.
    assert first.stdout.count("\nmodel  ") == 1
    columns, of_models = figures(first.stdout)
    expected_columns, expected = figures(PRINTED)
    assert columns == expected_columns
    assert of_models.keys() == expected.keys()
    for model, values in of_models.items():
        assert values[0] == pytest.approx(expected[model][0], abs=100 * TOLERANCE)  # p-MRR x100
        assert values[1:] == pytest.approx(expected[model][1:], abs=TOLERANCE)
    assert answers(first.stdout) == answers(PRINTED)
    assert "> marks the passage" in PRINTED
    ending = first.stdout[first.stdout.index("\n== ask: ") :].splitlines()
    own = [line for line in (*PRINTED.splitlines(), *ending) if "(raylet)" not in line]
    assert max(map(len, own)) <= 100

    # The README's sample prints what the README says.
    found, expected = scores(run_sample(CHECKPOINT, tmp_path)), scores(PRINTED_BY_SAMPLE)
    assert found == pytest.approx(expected, abs=TOLERANCE)
    for eating, trials in (found.T, expected.T):
        assert eating[1] > trials[1] + TOLERANCE
        assert trials[2] > eating[2] + TOLERANCE

    with kept_serving(tmp_path, port) as second:
        assert second.count("nothing to do: same inputs and settings") == 5
        assert figures(second) == figures(first.stdout)
        assert answers(second) == answers(first.stdout)
        asked = re.findall(r"^  (curl .*?\}')\n  # first hit: (\S+)$", second, re.DOTALL | re.MULTILINE)
        assert [hit for _, hit in asked] == list(chain.INSTRUCTIONS)
        assert len({hit for _, hit in asked}) == 2
        for command, hit in asked:
            reply = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
            assert [found["id"] for found in json.loads(reply.stdout)["hits"]] == [hit]
        (later,) = set(re.findall(r"localhost:(\d+)", first.stdout))
        assert f"infembed serve index=runs/quickstart/index port={later}\n" in first.stdout


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
