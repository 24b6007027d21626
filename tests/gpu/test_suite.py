"""The GPU suite itself: its processes and results with made cases, and its real cases in tiny shapes on the CPU."""

import json
from dataclasses import replace

import psutil
import pytest
import torch

from benchmarks.gpu import suite
from tests.support.waiting import wait_until

MADE = {
    name: suite.Case("tests.gpu.made_cases", name, 1.0, name, "an argument")
    for name in (
        "hangs",
        "passes",
        "exceeds",
        "raises",
        "dies",
        "needs_a_package",
        "needs_a_device",
        "without_ray",
    )
}
QUICK = ["varlen", "trees", "grad_cache", "step-0.5b", "qlora"]


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
    assert lines["hangs"][1]["error"] == "killed after 7 s, its share of the time"
    assert lines["passes"][0]["failed"] == []
    process = int(lines["hangs"][0]["figures"]["process"])
    wait_until(lambda: not psutil.pid_exists(process))  # the server reaps it


@pytest.mark.integration
def test_no_case_imports_ray(made, tmp_path, capsys):
    status, lines, _, _ = run(["without_ray"], tmp_path, capsys)
    assert status == 0, lines
    assert {line["result"] for line in lines["without_ray"]} == {case.module for case in suite.CASES.values()} - {
        "tests.gpu.made_cases"
    }


def test_a_case_without_time_is_skipped(made, tmp_path, capsys):
    status, lines, _, _ = run(["passes"], tmp_path, capsys, minutes=0.0)
    assert (status, lines["passes"][0]["skipped"]) == (0, "no time was left")


@pytest.mark.integration
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_every_case_fails_and_says_so(made, tmp_path, capsys):
    status, lines, _, _ = run(["passes"], tmp_path, capsys, device="cuda")
    assert status == 1
    assert "torch finds no CUDA device" in lines["passes"][0]["error"]


@pytest.mark.slow
def test_the_quick_cases_pass_in_tiny_shapes_on_a_cpu(tmp_path, capsys):
    check_tiny(QUICK, tmp_path, capsys, skipped={"qlora"})


@pytest.mark.slow
def test_all_other_cases_pass_in_tiny_shapes_on_a_cpu(tmp_path, capsys):
    check_tiny([name for name in suite.CASES if name not in QUICK], tmp_path, capsys, skipped=set())


def check_tiny(names, directory, capsys, skipped):
    status, lines, page, outcome = run(names, directory, capsys, minutes=60.0)  # no share ends early on a busy machine
    assert (status, set(outcome["skipped"])) == (0, skipped), outcome
    for name in set(names) - skipped:
        assert all("result" in line for line in lines[name]), lines[name]
        assert f"## {name} (" in page
        assert name == "machine" or any(line["checks"] for line in lines[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["varlen", "trees", "bf16", "grad_cache", "step-0.5b", "zero-2", "zero-3"])
def test_cases_pass_on_a_gpu(name, tmp_path, capsys):
    status, lines, _, _ = run([name], tmp_path, capsys, minutes=2.0, device="cuda", tiny=False)
    assert status == 0, lines
