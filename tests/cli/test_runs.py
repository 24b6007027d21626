"""Outputs found by their manifests, and what they were made from: real outputs of `Step`, here and in an object store."""

import json
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from infembed_ray.cli.main import main
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.progress import track
from infembed_ray.storage import run_state
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.steps import Step, fingerprint
from infembed_ray.synthesis import templates


def publish(stage, output, inputs, **facts):
    """Publish an output of a stage, and return its address."""
    step = Step(stage, AnalyzeSettings(records="", output=output), output, inputs)
    with step.publish() as staging:
        (staging.path / "data").write_text(stage)
        staging.facts |= facts
    return step.published().address


@pytest.fixture
def made(tmp_path):
    seeds = tmp_path / "seeds.jsonl"
    seeds.write_text("{}\n")
    records = publish("synthesize", str(tmp_path / "runs" / "records"), {"seeds": seeds}, usd=1.25)
    model = publish("train", str(tmp_path / "runs" / "model"), {"records": tmp_path / "runs" / "records"})
    index = publish("index", str(tmp_path / "runs" / "index"), {"model": tmp_path / "runs" / "model", "corpus": seeds})
    return {"seeds": str(seeds), "records": records, "model": model, "index": index}


def lines(capsys, *arguments):
    capsys.readouterr()
    assert main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def test_an_output_shows_its_inputs_and_theirs(made, tmp_path, capsys):
    shown = lines(capsys, "lineage", made["index"])
    assert [((len(line) - len(line.lstrip())) // 2, line.split()[0]) for line in shown] == [
        (0, "index"),
        (1, "model:"),
        (2, "records:"),
        (3, "seeds:"),
        (1, "corpus:"),
    ]
    assert "1.25 USD" in shown[2]
    assert made["seeds"] in shown[3]
    assert lines(capsys, "lineage", str(tmp_path / "runs" / "index")) == shown  # by `latest`


def test_the_bundled_prompts_have_the_same_name_in_every_copy_of_the_package(tmp_path, monkeypatch, capsys):
    """The copy that `ray job submit` uploads is deleted after the job."""
    publish("synthesize", str(tmp_path / "runs"), {"prompts": templates.DIRECTORY})
    monkeypatch.chdir(tmp_path)
    assert lines(capsys, "lineage", "runs")[1].split() == [
        "prompts:",
        "infembed_ray/synthesis/prompts",
        fingerprint(templates.DIRECTORY),
    ]


def test_an_input_that_is_gone_is_said_to_be(made, tmp_path, capsys):
    (tmp_path / "seeds.jsonl").unlink()
    assert lines(capsys, "lineage", made["records"])[1].endswith("(no longer there)")


def test_all_outputs_are_listed_with_the_latest_and_the_unfinished(made, tmp_path, capsys):
    again = publish("train", str(tmp_path / "runs" / "model"), {"records": tmp_path / "seeds.jsonl"})
    partial = tmp_path / "runs" / "model" / ".0123456789ab.partial"
    partial.mkdir()
    (partial / "data").write_text("half")
    shown = lines(capsys, "runs", str(tmp_path / "runs"))
    assert [line.split()[0] for line in shown].count("train") == 2
    assert [line.endswith("  latest") for line in shown if made["model"] in line] == [False]
    assert [line.endswith("  latest") for line in shown if again in line] == [True]
    assert shown[-1].startswith(f"unfinished  {partial}: ")


def test_outputs_in_an_object_store_are_read_there(bucket, tmp_path, capsys):
    seeds = tmp_path / "seeds.jsonl"
    seeds.write_text("{}\n")
    root = Folder.open(bucket, "output") / "lineage"
    records = publish("synthesize", (root / "records").uri, {"seeds": seeds})
    model = publish("train", (root / "model").uri, {"records": Folder.open(records, "records")})
    assert [line.split()[0] for line in lines(capsys, "lineage", model)] == ["train", "records:", "seeds:"]
    shown = lines(capsys, "runs", root.uri)
    assert {line.split()[0] for line in shown} == {"synthesize", "train"}
    assert all(line.endswith("  latest") for line in shown)


def test_the_index_of_an_api_is_found_below_the_root(made, tmp_path, capsys):
    class Api(BaseHTTPRequestHandler):
        def do_GET(self):
            card = {"index_version": made["index"].rpartition("/")[2]}
            news = {"name": "news", "model": card}
            body = json.dumps({"data": {"/v1/models": [card], "/v1/collections": [news]}[self.path]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Api)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        assert lines(capsys, "lineage", url, "--root", str(tmp_path / "runs")) == lines(
            capsys, "lineage", made["index"]
        )
        named = ["lineage", url, "--root", str(tmp_path / "runs"), "--collection"]
        assert lines(capsys, *named, "news") == lines(capsys, "lineage", made["index"])
        assert main([*named, "law"]) == 2
        assert f"--collection=law: {url} has news; give one of them" in capsys.readouterr().err
        assert main(["lineage", made["index"], "--collection", "news"]) == 2
        assert "is no API; give its URL" in capsys.readouterr().err
        assert main(["lineage", url]) == 2
        assert "--root is missing" in capsys.readouterr().err
        assert main(["lineage", url, "--root", made["records"]]) == 2
        assert "has no index" in capsys.readouterr().err
    finally:
        server.shutdown()


@pytest.mark.parametrize("verb", ["runs", "lineage", "status"])
def test_a_place_without_outputs_is_an_input_error(verb, tmp_path, capsys):
    assert main([verb, str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ status


def test_the_status_of_an_output_says_what_to_run_next(made, tmp_path, capsys):
    assert lines(capsys, "status", made["index"]) == [
        f"finished  {lines(capsys, 'lineage', made['index'])[0]}",
        f"  next: infembed serve index={made['index']}",
    ]
    shown = lines(capsys, "status", str(tmp_path / "runs"))
    assert {line.split()[1] for line in shown if line.startswith("finished")} == {"synthesize", "train", "index"}


@pytest.mark.parametrize("where", ["here", "in a store"])
def test_the_status_of_an_unfinished_run_has_its_progress_and_its_error(where, tmp_path, capsys, request, monkeypatch):
    monkeypatch.setattr(run_state, "UPDATE_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["/venv/bin/infembed", "train", "seed=1", "model=a b"])
    output = str(tmp_path) if where == "here" else (Folder.open(request.getfixturevalue("bucket"), "o") / "status").uri
    step = Step("train", AnalyzeSettings(records="", output=output), output, {})
    with pytest.raises(ValueError, match="disk"), step.publish():
        with track("train", 10) as advance:
            advance(3, note="loss 1.5")
        running = lines(capsys, "status", output)
        assert running[0].startswith(f"running  train {step.identity}  began ")
        assert running[1:] == ["  progress: train: 3/10  loss 1.5"]
        raise ValueError("no space on this\ndisk")
    failed = lines(capsys, "status", output)
    assert failed[0].startswith(f"failed  train {step.identity}")
    assert failed[1:] == [
        "  progress: train: 3/10  loss 1.5",
        "  error: ValueError: no space on this disk",
        "  next: infembed train seed=1 'model=a b'  resumes it",
    ]
    with step.publish() as staging:
        (staging.path / "data").write_text("done")
    assert [line.split()[0] for line in lines(capsys, "status", output)] == ["finished", "next:"]


@pytest.mark.integration
def test_a_killed_run_is_interrupted(tmp_path, capsys):
    code = f"""
import os, signal
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.storage.steps import Step
with Step("train", AnalyzeSettings(records="", output={str(tmp_path)!r}), {str(tmp_path)!r}, {{}}).publish():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert lines(capsys, "status", str(tmp_path))[0].startswith("interrupted  train ")
