"""Log lines as text or JSON, and figures without Ray."""

import json
import subprocess
import sys
from datetime import datetime

import pytest

from infembed_ray import telemetry
from infembed_ray.cli.main import main
from infembed_ray.progress import say, track


@pytest.fixture
def as_json(monkeypatch):
    monkeypatch.setenv(telemetry.LOG_FORMAT, "json")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # `main` sets another one


def test_a_line_names_its_run_only_within_it(as_json, capsys):
    say("\npipeline: train (1 of 2)")
    with telemetry.running("train", "0c54e1f4d2aa"):
        say("train: 3 steps — done")
        with telemetry.running("evaluate", "2926f87afab1"):
            say("inner")
        say("outer")
    say("after")
    first, second, *others = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first.keys() == {"asctime", "levelname", "message"}
    assert first["message"] == "pipeline: train (1 of 2)"
    assert abs(datetime.strptime(first["asctime"], "%Y-%m-%d %H:%M:%S,%f") - datetime.now()).total_seconds() < 60
    assert second["message"] == "train: 3 steps — done"
    assert [second["stage"], second["run"], second["levelname"]] == ["train", "0c54e1f4d2aa", "INFO"]
    assert [line.get("run") for line in others] == ["2926f87afab1", "0c54e1f4d2aa", None]


def test_progress_and_errors_are_json_lines(as_json, capsys):
    with track("encode", 2) as advance:
        advance(2)
    assert main(["runs", "/no/such/directory"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["message"].startswith("encode: 2/2")
    error = json.loads(captured.err)
    assert error["levelname"] == "ERROR"
    assert error["message"].startswith("infembed runs: DIR=/no/such/directory")


def test_another_format_is_an_input_error(monkeypatch, capsys):
    monkeypatch.setenv(telemetry.LOG_FORMAT, "xml")
    assert main(["runs", "/no/such/directory"]) == 2
    assert capsys.readouterr().err.startswith("infembed runs: INFEMBED_LOG_FORMAT=xml: ")


@pytest.mark.integration
def test_a_traceback_is_one_json_line_and_figures_need_no_ray():
    code = """
import sys
from infembed_ray import telemetry
telemetry.set_up_logs()
with telemetry.running("train", "0c54e1f4d2aa"):
    telemetry.report(training_loss=1.0, index_passages_total={"encoded": 2, "reused": None})
    assert "ray" not in sys.modules
    1 / 0
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"INFEMBED_LOG_FORMAT": "json", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    line = json.loads(done.stderr)
    assert line["message"] == "ZeroDivisionError: division by zero"
    assert line["exc_text"].startswith("Traceback (most recent call last)")
    assert line["exc_text"].endswith("ZeroDivisionError: division by zero\n")
