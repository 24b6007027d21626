"""The quickstart as a user runs it, in an empty directory and without a key, and the texts of the tutorial about it."""

import contextlib
import io
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

from infembed_ray.cli.main import main
from infembed_ray.quickstart import chain
from infembed_ray.storage.steps import resolve
from tests.support.files import read_jsonl
from tests.support.ports import free_port

TUTORIAL = (Path(__file__).parents[2] / "docs" / "start" / "tutorial.md").read_text(encoding="utf-8")
PRINTED, PRINTED_BY_SAMPLE = re.findall(r"```text\n(.*?)```", TUTORIAL, re.DOTALL)[:2]
SAMPLE = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)[0]
ROOT = Path("runs/quickstart")
TOLERANCE = 0.05
"""Absolute tolerance of measures and scores, because the trained weights differ from CPU to CPU."""
LOSSES = {1: 0.6250, 2: 0.5563, 5: 0.8355, 10: 0.9021, 20: 1.1606, 30: 0.2978, 40: 0.7404, 46: 0.1760}
"""Step -> training loss of the recorded run."""
MEASURES = {
    "MiniLM": (0.4306, 0.6320, 0.7564, 0.8420, 0.6807),
    "MiniLM + InF-Embed": (0.6032, 0.6850, 0.8636, 0.8321, 0.7397),
}
"""p-MRR, nDCG@10 of the three kinds of requests, and MAP@1000 of the recorded run."""


@contextmanager
def kept_serving(root, port):
    """Run the quickstart with `--keep-serving` in a process of its own; yields what it prints until it serves."""
    command = [sys.executable, "-m", "infembed_ray.cli", "quickstart", "--port", str(port), "--keep-serving"]
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENAI_API_KEY", "RAY_ADDRESS")}
    with (root / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # A shell starts background jobs with SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                if "Ctrl-C" in line:
                    break
            else:
                pytest.fail((root / "stderr").read_text()[-2000:])
            yield "".join(lines)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=300)


def measures(output):
    """The header of the printed table, and model -> its measures without differences."""
    lines = output.splitlines()
    (header,) = (number for number, line in enumerate(lines) if re.match("model .*p-MRR", line))
    rows = [re.split(r" {2,}", line.strip()) for line in (lines[header], *lines[header + 2 : header + 4])]
    return rows[0], {name: [float(cell.split()[0]) for cell in cells] for name, *cells in rows[1:]}


def answers(output):
    """The lines of the two printed rankings down to the first hits, without scores."""
    lines = output[output.index("┏") : output.index("├")].splitlines()
    return [re.sub(r"\d\.\d{3}", "", line) for line in lines]


def scores(output):
    """(3, 2) scores of the passages on eating and on trials: without an instruction, for patients, for clinicians."""
    return np.array(re.findall(r"\d\.\d{3}", output), dtype=float).reshape(3, 2)


def run_sample(checkpoint):
    """Run the tutorial's Python sample with a model; returns what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(SAMPLE.replace('"runs/quickstart/checkpoint"', repr(str(checkpoint))), {})
    return printed.getvalue()


@pytest.mark.integration
def test_the_tutorials_sample_ignores_the_instruction_before_training(minilm):
    (sentence,) = re.findall(r"Before training, MiniLM gives (.*?):", TUTORIAL, re.DOTALL)
    eating, trials = scores(run_sample(minilm)).T
    assert np.stack([eating, trials], axis=1) == pytest.approx(scores(sentence), abs=0.0011)
    assert (eating < trials).all()


@pytest.mark.ray
@pytest.mark.end_to_end
@pytest.mark.slow  # .ci/run runs it after the others
@pytest.mark.timeout(1800)
def test_quickstart_prints_what_the_tutorial_shows_and_a_second_run_has_nothing_to_do(
    tmp_path, monkeypatch, capsys, minilm
):
    monkeypatch.chdir(tmp_path)
    port = free_port()
    with kept_serving(tmp_path, port) as printed:
        ask_as_printed(printed, port)
    made_no_calls_and_counts_every_seed()
    trained_with_the_recorded_losses()
    measured_as_recorded()
    assert (ROOT / "report.html").stat().st_size > 5_000
    printed_as_in_the_tutorial(printed)
    sample_prints_as_in_the_tutorial()

    ending = chain.ending(ROOT, ROOT / "report.html", port)
    assert f"infembed serve index=runs/quickstart/index port={port}" in ending
    assert set(re.findall(r"localhost:(\d+)", ending)) == {str(port)}
    assert max(map(len, ending.splitlines())) <= 100

    capsys.readouterr()
    second = chain.run_stages(ROOT, minilm)
    assert not any(output.fresh for output in second.values())
    again = capsys.readouterr().out
    assert again.count("nothing to do: same inputs and settings") == 5
    assert measures(again) == measures(printed)


def ask_as_printed(printed, port):
    """The printed curl commands return the printed first hits, which differ with the instruction."""
    asked = re.findall(r"^  (curl .*?\}')\n  # first hit: (\S+)$", printed, re.DOTALL | re.MULTILINE)
    assert [hit for _, hit in asked] == list(chain.INSTRUCTIONS)
    assert len({hit for _, hit in asked}) == 2
    for command, hit in asked:
        assert f"localhost:{port}/" in command
        reply = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
        assert [found["id"] for found in json.loads(reply.stdout)["hits"]] == [hit]


def made_no_calls_and_counts_every_seed():
    funnel = json.loads((resolve(ROOT / "records") / "manifest.json").read_text())["counts"]
    assert funnel["calls"] == 0
    assert funnel["seeds"] == funnel["kept"] + funnel["rejected"] + funnel["dead_letter"] == 144


def trained_with_the_recorded_losses():
    log = {line["step"]: line["loss"] for line in read_jsonl(resolve(ROOT / "checkpoint") / "metrics.jsonl")}
    assert len(log) == 46
    assert log[1] == pytest.approx(LOSSES[1], abs=1e-3)  # before the first update
    assert {step: log[step] for step in LOSSES} == pytest.approx(LOSSES, abs=TOLERANCE)


def measured_as_recorded():
    found = json.loads((resolve(ROOT / "results") / "manifest.json").read_text())["figures"]
    values = {model: tuple(of_model["records"].values()) for model, of_model in found.items()}
    assert values["MiniLM"] == pytest.approx(MEASURES["MiniLM"], abs=2e-3)
    assert values["MiniLM + InF-Embed"] == pytest.approx(MEASURES["MiniLM + InF-Embed"], abs=TOLERANCE)
    assert values["MiniLM + InF-Embed"][0] > values["MiniLM"][0]


def printed_as_in_the_tutorial(printed):
    columns, of_models = measures(printed)
    expected_columns, expected = measures(PRINTED)
    assert columns == expected_columns
    assert of_models.keys() == expected.keys()
    for model, values in of_models.items():
        assert values[0] == pytest.approx(expected[model][0], abs=100 * TOLERANCE)  # p-MRR x100
        assert values[1:] == pytest.approx(expected[model][1:], abs=TOLERANCE)
    assert answers(printed) == answers(PRINTED)
    assert "> marks the passage" in PRINTED
    asked = printed[printed.index("\n== ask: ") :].splitlines()
    assert max(len(line) for line in (*PRINTED.splitlines(), *asked) if "(raylet)" not in line) <= 100


def sample_prints_as_in_the_tutorial():
    found, expected = scores(run_sample(ROOT / "checkpoint")), scores(PRINTED_BY_SAMPLE)
    assert found == pytest.approx(expected, abs=TOLERANCE)
    for eating, trials in (found.T, expected.T):
        assert eating[1] > trials[1] + TOLERANCE
        assert trials[2] > eating[2] + TOLERANCE


@pytest.mark.integration
def test_a_port_in_use_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["quickstart", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"port={port}" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
