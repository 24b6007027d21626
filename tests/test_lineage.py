"""Outputs found by their manifests, and what they were made from: real outputs of `Step`, here and in an object store."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from infembed_ray.cli import main
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.object_store import Folder
from infembed_ray.storage import Step


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
            assert self.path == "/v1/models"
            body = json.dumps({"data": [{"index_version": made["index"].rpartition("/")[2]}]}).encode()
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
        assert main(["lineage", url]) == 2
        assert "--root is missing" in capsys.readouterr().err
        assert main(["lineage", url, "--root", made["records"]]) == 2
        assert "has no index" in capsys.readouterr().err
    finally:
        server.shutdown()


@pytest.mark.parametrize("verb", ["runs", "lineage"])
def test_a_place_without_outputs_is_an_input_error(verb, tmp_path, capsys):
    assert main([verb, str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
