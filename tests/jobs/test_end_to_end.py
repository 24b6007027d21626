"""The jobs of synthesize and serve, submitted with `ray job submit` to a real head with a token; test_no_shared_directory.py has all.

A stage is then repeated in this process: it must find its output before it needs a cluster. The data are the bundled sample
with its journal of responses.
"""

import contextlib
import io
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from infembed_ray.cli.main import main
from infembed_ray.quickstart import sample
from infembed_ray.records import tables
from infembed_ray.records.tables import Record
from infembed_ray.storage import provenance, steps
from tests.jobs.head import Head, running_head
from tests.serving.indexes import publish_index
from tests.support.files import read_jsonl, write_jsonl
from tests.support.ports import free_port
from tests.support.strangers import ask_gcs, call_replica, ports_of_replicas, status

pytestmark = [pytest.mark.ray, pytest.mark.end_to_end]

LLM_KEY = "key-of-the-llm"
API_KEY = "key-of-the-http-api"
DOCUMENTS = 60


@dataclass(frozen=True)
class Repeated:
    """What a job printed, what its repetition printed, and their output."""

    first: str
    second: str
    output: Path
    untouched: bool
    """Whether the repetition left every file of the output unchanged."""

    @property
    def manifest(self) -> dict[str, Any]:
        return steps.read_manifest(self.output, "output")


def submit_and_repeat(head: Head, verb: str, output: Path, **settings: Any) -> Repeated:
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()] + [f"output={output}"]
    first = head.submit(verb, *overrides)
    assert first.returncode == 0, first.stdout
    published = steps.resolve(output)
    before = {path: path.stat().st_mtime_ns for path in published.rglob("*")}
    with contextlib.redirect_stdout(io.StringIO()) as second:
        assert main([verb, *overrides]) == 0
    after = {path: path.stat().st_mtime_ns for path in published.rglob("*")}
    return Repeated(first.stdout, second.getvalue(), published, untouched=before == after)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory that all nodes share."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def corpus(directory: Path, synthesized: Repeated) -> Path:
    records = tables.read(synthesized.output, Record, "records", split="train")
    rows = [{"id": row.id, "text": row.document_positive} for row in records][:DOCUMENTS]
    return write_jsonl(directory / "corpus.jsonl", rows)


# ------------------------------------------------------------------------------------------------------ the jobs


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with running_head({"OPENAI_API_KEY": LLM_KEY, "INFEMBED_API_KEYS": API_KEY}) as head:
        yield head


@pytest.fixture(scope="module")
def synthesized(head: Head, directory: Path) -> Repeated:
    model = sample.MODEL.model
    source = {"seeds": sample.SEEDS, "replay": f"[{sample.JOURNAL}]", "generator__model": model, "judge__model": model}
    return submit_and_repeat(head, "synthesize", directory / "records", **source)


class Served(NamedTuple):
    """URL of the API that a job left on the cluster, and what that job and its repetition printed."""

    url: str
    first: str
    second: str


@pytest.fixture(scope="module")
def served(head: Head, directory: Path, corpus: Path, minilm: str) -> Served:
    port = free_port()
    index = publish_index(directory / "served", minilm, {row["id"]: row["text"] for row in read_jsonl(corpus)})
    settings = f"index={index.parent}", f"port={port}", "wait=false"
    first, second = head.submit("serve", *settings), head.submit("serve", *settings)
    assert first.returncode == 0, first.stdout
    assert second.returncode == 0, second.stdout
    return Served(f"http://127.0.0.1:{port}", first.stdout, second.stdout)


def search(served: Served, body: dict[str, Any], key: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{served.url}/v1/search",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


# --------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_a_submission_without_the_token_is_rejected(head, tmp_path, mode):
    (tmp_path / "auth_token").write_text("some-other-secret-of-at-least-thirty-two-characters")
    stranger = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "auth_token")}
    refused = head.submit("analyze", "records=r", "output=o", **stranger)
    assert refused.returncode != 0
    assert re.search(r"authenticat", refused.stdout, re.IGNORECASE)
    assert "submitted successfully" not in refused.stdout


def test_the_heads_ports_refuse_a_stranger(head, tmp_path):
    gcs = f"127.0.0.1:{head.ports['port']}"
    with_token = {name: head.environment[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    assert "keys: " in ask_gcs(gcs, **with_token).stdout
    refused = ask_gcs(gcs, RAY_AUTH_MODE="disabled")
    assert refused.returncode != 0
    assert "InvalidAuthToken" in refused.stderr
    for port in ("dashboard-port", "dashboard-agent-listen-port"):
        pages = ("/api/jobs/", "/api/job_agent/jobs/", "/api/v0/logs", "/logs", "/metrics")
        assert {status(head.ports[port], page) for page in pages} == {401}


def test_a_repeated_job_does_nothing_and_says_why(synthesized):
    done = synthesized
    reason = "nothing to do: same inputs and settings, output finished on "
    assert reason not in done.first
    assert reason + done.manifest["created"] in done.second
    assert str(done.output) in done.first
    assert str(done.output) in done.second
    assert done.untouched


def test_the_manifest_names_the_job_and_the_code_without_a_checkout(synthesized):
    recorded = synthesized.manifest["provenance"]
    assert re.fullmatch(r"raysubmit_\w+", recorded["job"]["submission_id"])
    assert recorded["cluster"]["CPU"] == 8
    assert recorded["code"] == provenance.code() | {"commit": None}


def test_keys_leave_no_trace_in_logs_and_outputs(synthesized, directory):
    assert LLM_KEY not in synthesized.first
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    assert not any(LLM_KEY.encode() in path.read_bytes() for path in files)


def test_a_repeated_serve_does_nothing_and_says_why(served):
    reason = "serve: nothing to do: same index and settings, already served at "
    assert reason not in served.first
    assert f"{reason}{served.url}" in served.second


def test_the_api_finds_a_passage_and_requires_a_key(served, corpus):
    wanted = read_jsonl(corpus)[-1]
    question = {"query": wanted["text"], "instruction": "The text itself.", "top_k": 3}
    hits = search(served, question, API_KEY)["hits"]
    assert len(hits) == 3
    assert hits[0]["id"] == wanted["id"]
    assert hits[0]["text"] == wanted["text"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        search(served, question, "a guess")


def test_the_replicas_of_the_api_refuse_a_stranger(served, head):
    answers = {call_replica(port) for port in ports_of_replicas(head.ports["port"])}
    own, of_ray = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED  # Ray's port has another service
    assert answers == {own, of_ray}
