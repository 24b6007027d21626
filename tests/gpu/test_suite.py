"""The GPU suite itself: its processes and results with made cases, and its real cases in tiny shapes on the CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.gpu import suite
from tests.support.waiting import wait_until

MADE = {
    name: suite.Case("tests.gpu.made_cases", name, 1.0, name, "an argument")
    for name in ("hangs", "passes", "exceeds", "raises", "dies", "needs_a_package", "needs_a_device")
}
OPTIONAL = {"ray", "faiss", "deepspeed", "accelerate", "peft", "bitsandbytes", "sentence_transformers", "ir_measures"}
OPTIONAL |= {
    "pytrec_eval",
    "obstore",
    "bm25s",
    "Stemmer",
    "aiohttp",
    "openai",
    "fastapi",
    "httpx2",
    "prometheus_client",
}
OPTIONAL |= {"tensorboardX", "datasets", "mteb", "onnx", "onnxruntime", "pymilvus", "boto3"}
"""Modules of which a case may import those that it names."""
ALONE = """
import importlib, json, sys
from benchmarks.gpu.suite import BASE, CASES, Context
name, *blocked = sys.argv[1:]
case = CASES[name]
sys.modules.update(dict.fromkeys(set(blocked) - {*BASE, *case.needs}))
work = getattr(importlib.import_module(case.module, "benchmarks.gpu"), case.function)
for result in work(Context("cpu", True, case.argument, profile=True)):
    print("RESULT", json.dumps(result.as_plain()))
"""


def run(names, directory, capsys, minutes=3.0, device="cpu", tiny=True):
    """Run cases; return the exit status, the lines by case, the page and the outcome."""
    status = suite.run(names, minutes, directory, device, tiny)
    (lines,) = directory.glob("*.jsonl")
    (page,) = directory.glob("*.md")
    by_case = {name: [] for name in names}
    for line in map(json.loads, lines.read_text().splitlines()):
        by_case[line["case"]].append(line)
    return status, by_case, page.read_text(), json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(suite, "CASES", suite.CASES | MADE)


@pytest.mark.integration
def test_a_case_that_fails_stops_no_other_and_its_results_stay(made, tmp_path, capsys):
    names = ["raises", "dies", "needs_a_package", "needs_a_device", "exceeds", "passes"]
    status, lines, page, outcome = run(names, tmp_path, capsys)
    assert status == 1
    for name in ("raises", "dies"):
        assert lines[name][0]["figures"] == {"figure": 1.0}
    assert lines["raises"][1]["error"] == "ValueError: two"
    assert "status 7" in lines["dies"][1]["error"]
    assert lines["needs_a_package"][0]["skipped"] == "a_package_that_is_not_there is not installed"
    assert lines["needs_a_device"][0]["skipped"] == "there is no such device"
    assert lines["exceeds"][0]["failed"] == ["above", "not a number"]
    assert lines["passes"][0] == {
        "case": "passes",
        "result": "argument",
        "figures": {"argument": "an argument"},
        "checks": {"zero": [0.0, 0.0]},
        "failed": [],
    }
    assert outcome["failed"] == ["exceeds: above", "exceeds: not a number"]
    assert [error.split(":")[0] for error in outcome["errors"]] == ["raises", "dies"]
    assert "**failed** above 2.1 <= 2.0" in page


@pytest.mark.integration
def test_a_case_that_hangs_is_killed_after_its_share(made, monkeypatch, tmp_path, capsys):
    run(["passes"], tmp_path / "first", capsys)  # starts the server of processes, which takes seconds
    monkeypatch.setattr(suite, "PATIENCE", 1.0)
    monkeypatch.setitem(suite.CASES, "passes", replace(MADE["passes"], seconds=8.0))
    status, lines, _, _ = run(["hangs", "passes"], tmp_path / "second", capsys, minutes=1.0)
    assert status == 1
    assert lines["hangs"][1]["error"] == "killed after 7 s; what it measured before stays"
    assert lines["passes"][0]["failed"] == []
    process = int(lines["hangs"][0]["figures"]["process"])
    wait_until(lambda: ended(process))


def ended(process):
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE  # until the server of processes reaps it
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("seconds", "minutes", "line"),
    [(65.0, 0.5, "needs 65 s, 30 s left"), (1.0, 0.0, "needs 1 s, 0 s left")],
)
def test_a_case_does_not_start_without_its_time(made, monkeypatch, tmp_path, capsys, seconds, minutes, line):
    monkeypatch.setitem(suite.CASES, "passes", replace(MADE["passes"], seconds=seconds))
    status, lines, page, outcome = run(["passes"], tmp_path, capsys, minutes=minutes)
    assert (status, lines["passes"][0]["not run"], outcome["not run"]) == (0, line, {"passes": line})
    assert f"not run: {line}" in page


@pytest.mark.integration
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_every_case_fails_and_says_so(made, tmp_path, capsys):
    status, lines, _, _ = run(["passes"], tmp_path, capsys, device="cuda")
    assert status == 1
    assert "torch finds no CUDA device" in lines["passes"][0]["error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in suite.CASES if name != "qlora"])
def test_a_case_passes_in_a_tiny_shape_with_the_packages_that_it_names(name):
    done = subprocess.run([sys.executable, "-c", ALONE, name, *OPTIONAL], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert not [line for line in lines if line["failed"]], lines
    assert name == "machine" or any(line["checks"] for line in lines)


@pytest.mark.slow
def test_the_command_runs_cases_on_a_cpu(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--device",
        "cpu",
        "--tiny",
        "--minutes",
        "20",
        "--out",
        tmp_path,
    ]
    done = subprocess.run(
        [*command, "--cases", "machine", "qlora", "trees"], capture_output=True, text=True, timeout=600
    )
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, outcome["errors"], set(outcome["skipped"])) == (0, [], {"qlora"}), done.stdout
    assert "## trees (" in Path(outcome["results"]).read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["varlen", "trees", "bf16", "grad_cache", "step-0.5b", "zero-2", "zero-3"])
def test_cases_pass_on_a_gpu(name, tmp_path, capsys):
    status, lines, _, _ = run([name], tmp_path, capsys, minutes=2.0, device="cuda", tiny=False)
    assert status == 0, lines
