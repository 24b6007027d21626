"""The API on a real Ray Serve, over real HTTP, with the real small encoder; replaced and broken while it is asked."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import faiss
import numpy as np
import openai
import pytest
import ray
import yaml
from ray import serve
from ray._common.utils import import_attr
from ray.cluster_utils import Cluster
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app
from ray.serve.context import _get_global_client
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ReplicaState,
    ServeDeploySchema,
    ServeStatus,
)

from infembed_ray.config import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.object_store import SCRATCH, Folder
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.shards import shard_of
from infembed_ray.serving import distributed
from infembed_ray.serving.deployments import ENCODER, INGRESS, ShardSearch
from infembed_ray.serving.distributed import Plan, require_free_port, run, serving
from infembed_ray.storage import output_files
from tests.serving.made import publish_index

PASSAGES = {
    f"{topic}-{audience}": f"{topic.capitalize()} {text}"
    for topic in ("diabetes", "asthma", "back pain")
    for audience, text in {
        "children": "in children: what parents and schools should know, with games that teach it.",
        "doctors": "treatment guideline for clinicians: dosage tables, contraindications, evidence grades.",
        "history": "in the nineteenth century: how physicians of the time explained and treated it.",
        "costs": "and what it costs health insurers a year, by country.",
    }.items()
}
QUERY = "diabetes"
INSTRUCTIONS = ("Only guidelines written for clinicians.", "For a lesson on nineteenth century medicine.")
AGAIN = {f"{id}-again": f"{text} (second edition)" for id, text in PASSAGES.items()}
YEARS = {id: {"year": 1850 if id.endswith("history") else 2020 + len(id) % 4} for id in PASSAGES}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(
    url: str, body: dict[str, Any] | None = None, method: str | None = None, **headers: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), dict(error.headers)


def found(api: str, query: str, **more: Any) -> list[str]:
    status, answer, _ = ask(f"{api}/v1/search", {"query": query, **more})
    assert status == 200, answer
    return [hit["id"] for hit in answer["hits"]]


def values(api: str, metric: str) -> set[float]:
    """Those of a metric, over all replicas."""
    with urllib.request.urlopen(f"{api}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return {float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{metric}{{")}


def until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Answered(NamedTuple):
    status: int
    retry_after: str | None
    body: dict[str, Any]


@contextmanager
def asked_all_the_time(api: str, clients: int = 4) -> Iterator[list[Answered]]:
    """Searches from several connections, one after another, while the block runs: what was answered until now."""
    answers: list[Answered] = []
    ended = threading.Event()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        while not ended.is_set():
            query = f"{list(PASSAGES.values())[number % len(PASSAGES)]} {len(answers)}"
            async with session.post(f"{api}/v1/search", json={"query": query, "top_k": 5}) as answer:
                body = await answer.json() if answer.content_type == "application/json" else {}
                answers.append(Answered(answer.status, answer.headers.get("Retry-After"), body))
                if answer.status != 200:
                    await asyncio.sleep(0.1)

    async def everybody() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            await asyncio.gather(*(client(session, number) for number in range(clients)))

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, everybody())
        try:
            yield answers
        finally:
            ended.set()
        running.result()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def index(root: Path, minilm: str) -> str:
    return str(publish_index(root / "one", minilm, PASSAGES, metadata=YEARS, types={"year": "integer"}))


@pytest.fixture(scope="module")
def settings(index: str) -> ServeSettings:
    return ServeSettings(
        index=index,
        port=free_port(),
        model_name="minilm",
        request_timeout_s=8,
        max_body_mib=4,
        runtime="torch",
        wait=False,
    )


@pytest.fixture(scope="module")
def api(settings: ServeSettings, ray_cluster: None) -> Iterator[str]:
    # As a job that was stopped in a hurry leaves it: Serve without an application, holding the port.
    serve.start(http_options={"host": settings.host, "port": settings.port})
    with serving(settings) as url:
        yield url
    distributed.stop()  # what it was replaced by


@pytest.mark.ray
def test_the_api_takes_over_the_port_that_a_stopped_job_left_listening(api: str, settings: ServeSettings) -> None:
    assert api == f"http://127.0.0.1:{settings.port}"
    assert ask(f"{api}/readyz")[0] == 200


@pytest.mark.ray
def test_hits_over_http_are_those_of_the_index_offline(api: str, index: str, minilm: str) -> None:
    encoder = InstructionEncoder.from_pretrained(minilm)
    offline = Index.open(index, encoder.fingerprint())
    firsts = []
    for instruction in INSTRUCTIONS:
        status, answer, _ = ask(f"{api}/v1/search", {"query": QUERY, "instruction": instruction, "top_k": 5})
        assert status == 200
        expected = offline.search(encoder.encode_queries([QUERY], [instruction]), 5)[0]
        assert [(hit["id"], hit["text"]) for hit in answer["hits"]] == [(hit.id, hit.text) for hit in expected]
        assert [hit["metadata"] for hit in answer["hits"]] == [YEARS[hit.id] for hit in expected]
        np.testing.assert_allclose([hit["score"] for hit in answer["hits"]], [hit.score for hit in expected], atol=1e-5)
        assert (answer["index_version"], answer["model"]) == (offline.version, "minilm")
        assert answer["timings"]["encode_ms"] > 0
        assert answer["timings"]["search_ms"] > 0
        firsts.append(answer["hits"][0]["id"])
    assert firsts == ["diabetes-doctors", "diabetes-history"]
    both = ask(f"{api}/v1/search", {"query": [QUERY] * 2, "instruction": list(INSTRUCTIONS), "top_k": 1})[1]
    assert [result["hits"][0]["id"] for result in both["results"]] == firsts
    assert found(api, QUERY, filter={"year": {"lt": 1900}}) == [
        hit.id for hit in offline.search(encoder.encode_queries([QUERY], [None]), 12)[0] if hit.metadata["year"] < 1900
    ]


@pytest.mark.ray
def test_embeddings_over_http_are_those_of_the_encoder(api: str, minilm: str) -> None:
    client = openai.OpenAI(base_url=f"{api}/v1", api_key="none needed", max_retries=0)
    encoder = InstructionEncoder.from_pretrained(minilm)
    texts = list(PASSAGES.values())

    def embed(inputs: Any, **extra: Any) -> np.ndarray:
        answer = client.embeddings.create(input=inputs, model="minilm", extra_body=extra)
        return np.array([item.embedding for item in answer.data])

    np.testing.assert_allclose(embed(texts), encoder.encode_passages(texts), atol=1e-5)
    queries = encoder.encode_queries(texts[:2], [INSTRUCTIONS[0]] * 2)
    np.testing.assert_allclose(embed(texts[:2], instruction=INSTRUCTIONS[0]), queries, atol=1e-5)
    for special in (True, False):  # a token array stands for its text, with or without special tokens
        tokens = encoder.tokenizer(texts[0], add_special_tokens=special)["input_ids"]
        np.testing.assert_allclose(embed(tokens), encoder.encode_passages(texts[:1]), atol=1e-5)


@pytest.mark.ray
def test_sixty_four_clients_at_once_all_get_their_own_answer(api: str, minilm: str) -> None:
    texts = [f"{text} {i}" for i, text in enumerate(list(PASSAGES.values()) * 6)][:64]

    def embed(text: str) -> list[float]:
        for _ in range(20):
            status, answer, headers = ask(f"{api}/v1/embeddings", {"input": text, "model": "minilm"})
            if status != 429:  # a slow machine may need more than 2 s for 64 texts
                break
            time.sleep(float(headers["retry-after"]))
        assert status == 200
        vector: list[float] = answer["data"][0]["embedding"]
        return vector

    with ThreadPoolExecutor(64) as clients:
        together = np.array(list(clients.map(embed, texts)))
    np.testing.assert_allclose(together, InstructionEncoder.from_pretrained(minilm).encode_passages(texts), atol=1e-5)


@pytest.mark.ray
def test_a_document_is_found_once_it_is_put_and_not_once_it_is_deleted(api: str) -> None:
    text = "The Kalmar Union joined Denmark, Norway and Sweden under one crown in 1397."
    document = {"id": "history/kalmar", "text": text, "metadata": {"year": 1397}}
    before = ask(f"{api}/v1/search", {"query": "Kalmar Union"})[1]["sequence"]
    status, answer, _ = ask(f"{api}/v1/documents", {"documents": [document]}, "PUT")
    assert status == 200, answer
    assert answer["sequence"] > before
    until(lambda: found(api, "Kalmar Union", top_k=1) == ["history/kalmar"], 10)
    assert found(api, "Kalmar Union", filter={"year": {"gt": 1900}})[0] != "history/kalmar"
    kept = ask(f"{api}/v1/documents/history/kalmar")[1]
    assert (kept["id"], kept["text"], kept["metadata"]) == (document["id"], text, {"year": 1397})
    assert ask(f"{api}/v1/search", {"query": "Kalmar Union"})[1]["sequence"] >= answer["sequence"]
    assert ask(f"{api}/v1/documents/history/kalmar", method="DELETE")[0] == 200
    until(lambda: "history/kalmar" not in found(api, "Kalmar Union"), 10)
    assert ask(f"{api}/v1/documents/history/kalmar")[0] == 404


@pytest.mark.ray
def test_a_damaged_log_of_changes_is_seen_from_outside_and_stops_changes_but_no_search(api: str, index: str) -> None:
    document = {"id": "damaged", "text": "A change that is damaged on disk.", "metadata": {"year": 2000}}
    assert ask(f"{api}/v1/documents", {"documents": [document]}, "PUT")[0] == 200
    last = max(Index.open(index).changes.glob("*.arrow"))
    damaged = last.with_name(f"{int(last.stem) + 1:012d}.arrow")
    damaged.write_bytes(last.read_bytes()[:-1])
    try:
        until(lambda: ask(f"{api}/readyz")[0] == 503, 10)
        for answer in (ask(f"{api}/readyz"), ask(f"{api}/v1/documents/damaged", method="DELETE")):
            assert (answer[0], answer[1]["error"]["code"]) == (503, "changes_stuck")
            assert f"{damaged.name} is corrupted" in answer[1]["error"]["message"]
            assert str(damaged.parent) not in answer[1]["error"]["message"]
        assert found(api, QUERY, top_k=1, instruction=INSTRUCTIONS[0]) == ["diabetes-doctors"]
        until(lambda: values(api, "infembed_shard_stuck") == values(api, "infembed_shard_lag") == {1.0}, 10)
        assert values(api, "infembed_log_sequence") == {int(damaged.stem)}
    finally:
        damaged.write_bytes(last.read_bytes())
    until(lambda: ask(f"{api}/readyz")[0] == 200, 10)
    assert ask(f"{api}/v1/documents/damaged", method="DELETE")[0] == 200
    until(lambda: values(api, "infembed_shard_stuck") == values(api, "infembed_shard_lag") == {0.0}, 10)


@pytest.mark.ray
def test_a_body_larger_than_the_limit_is_refused_by_the_proxy(api: str) -> None:
    connection = http.client.HTTPConnection(api.partition("//")[2], timeout=60)
    connection.request("PUT", "/v1/documents", body=(bytes(2**20) for _ in range(5)), encode_chunked=True)
    answer = connection.getresponse()
    assert (answer.status, json.load(answer)["error"]["code"]) == (413, "body_too_large")
    assert "nosniff" not in answer.headers.values()  # so it is no replica's answer


@pytest.mark.ray
def test_refusals_health_and_metrics_cross_ray_as_http(api: str) -> None:
    status, answer, headers = ask(f"{api}/v1/embeddings", {"input": "x", "model": "gpt-4"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer, _ = ask(f"{api}/v1/embeddings", {"input": [30522], "model": "minilm"})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert ask(f"{api}/v1/search", {"query": "x", "filter": {"yaer": 1}})[0] == 400
    assert ask(f"{api}/healthz")[:2] == ask(f"{api}/readyz")[:2]
    models = ask(f"{api}/v1/models")[1]["data"]
    assert [(m["id"], m["dimension"], m["passages"]) for m in models] == [("minilm", 384, len(PASSAGES))]
    _, _, headers = ask(f"{api}/healthz", **{"X-Request-ID": "mine-1"})
    assert headers["x-request-id"] == "mine-1"

    def metrics() -> str:
        with urllib.request.urlopen(f"{api}/metrics", timeout=60) as page:
            return str(page.read().decode())

    until(lambda: "infembed_http_requests_total{" in metrics() and metrics().count("infembed_shard_documents{") == 2)


@pytest.mark.ray
def test_the_same_index_and_settings_are_not_served_twice(
    api: str, settings: ServeSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    before = ask(f"{api}/v1/models")[1]
    run(settings)
    assert capsys.readouterr().out == (f"serve: nothing to do: same index and settings, already served at {api}\n")
    assert ask(f"{api}/v1/models")[1] == before


@pytest.mark.ray
def test_another_port_is_refused_while_serve_is_up(api: str, settings: ServeSettings) -> None:
    elsewhere = settings.model_copy(update={"port": free_port()})
    with (
        pytest.raises(InputError, match=r"Serve runs on this cluster already and listens at 127\.0\.0\.1"),
        serving(elsewhere),
    ):
        pass
    assert ask(f"{api}/readyz")[0] == 200  # the refusal took nothing down


@pytest.mark.ray
def test_a_replacement_that_cannot_serve_leaves_the_last_good_one(
    api: str, settings: ServeSettings, root: Path, minilm: str
) -> None:
    broken = publish_index(root / "broken", minilm, {"only": "One passage."}, shards=1)
    new = settings.model_copy(update={"index": str(broken)})
    plan = Plan.of(new)
    before, applications = ask(f"{api}/v1/models")[1], set(serve.status().applications)
    vectors = broken / "shard-00000" / "passages.arrow"
    content = vectors.read_bytes()
    vectors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match=r"passages\.arrow is corrupted"):
        run(new)
    with pytest.raises(InputError, match=r"passages\.arrow is corrupted"):
        distributed._deploy(plan)  # it broke after it was looked at
    vectors.unlink()
    with pytest.raises(InputError, match=r"passages\.arrow is missing"):
        run(new)
    encoder = InstructionEncoder.from_pretrained(minilm)
    next(encoder.backbone.parameters()).data.mul_(1.01)
    encoder.save_pretrained(root / "other")
    with pytest.raises(InputError, match="built by another encoder"):
        run(settings.model_copy(update={"model": str(root / "other")}))
    assert ask(f"{api}/v1/models")[1] == before
    assert found(api, QUERY, top_k=1, instruction=INSTRUCTIONS[0]) == ["diabetes-doctors"]
    until(lambda: set(serve.status().applications) == applications)


@pytest.mark.ray
def test_a_flip_of_the_index_under_load_mixes_no_answer_and_fails_none(
    api: str, settings: ServeSettings, root: Path, minilm: str
) -> None:
    other = publish_index(root / "two", minilm, AGAIN, shards=3, types={"year": "integer"})
    encoders = {name for name in serve.status().applications if "-encoder-" in name}
    with asked_all_the_time(api) as answers:
        until(lambda: len(answers) > 20)
        run(settings.model_copy(update={"index": str(other), "model_name": "minilm-2"}))
        until(lambda: any(answer.body["index_version"] == other.name for answer in answers[-8:]))
    assert Counter(answer.status for answer in answers) == {200: len(answers)}
    expected = {(Path(settings.index).name, "minilm", False), (other.name, "minilm-2", True)}
    for answer in answers:
        ids = {hit["id"].endswith("-again") for hit in answer.body["hits"]}
        assert len(ids) == 1, "hits of two versions in one answer"
        assert (answer.body["index_version"], answer.body["model"], ids.pop()) in expected
    assert {answer.body["index_version"] for answer in answers} == {version for version, _, _ in expected}
    applications = serve.status().applications
    assert {name for name in applications if "-encoder-" in name} == encoders  # it was not started again
    assert len([name for name in applications if "-index-" in name]) == 1


def replica(deployment: str) -> dict[str, Any]:
    """A replica of a deployment, as Serve tells of it."""
    for application in _get_global_client().get_serve_details()["applications"].values():
        if deployment in application["deployments"]:
            found: dict[str, Any] = application["deployments"][deployment]["replicas"][0]
            return found
    raise LookupError(deployment)


@pytest.mark.ray
def test_the_loss_of_every_kind_of_replica_costs_no_answer(api: str) -> None:
    with asked_all_the_time(api) as answers:
        until(lambda: len(answers) > 20)
        ray.kill(ray.get_actor(replica(INGRESS)["actor_name"], namespace="serve"))
        time.sleep(0.5)
        os.kill(replica("shard-00001")["pid"], signal.SIGKILL)
        time.sleep(0.5)
        os.kill(replica(ENCODER)["pid"], signal.SIGKILL)
        so_far = len(answers)
        until(lambda: len(answers) > so_far + 50)
    statuses = Counter(answer.status for answer in answers)
    assert set(statuses) <= {200, 429, 503}, statuses
    assert all(answer.retry_after for answer in answers if answer.status != 200)
    until(lambda: ask(f"{api}/readyz")[0] == 200)


@pytest.fixture(scope="module")
def config(settings: ServeSettings, root: Path) -> dict[str, Any]:
    file = root / "serve.yaml"
    run(settings.model_copy(update={"config_file": str(file), "model_name": "from-a-file"}))
    written: dict[str, Any] = yaml.safe_load(file.read_text())
    return written


def test_the_config_file_is_one_of_rays_and_builds_the_applications(config: dict[str, Any], index: str) -> None:
    schema = ServeDeploySchema.model_validate(config)
    assert [application.route_prefix for application in schema.applications] == [None, None, "/"]
    for application in schema.applications:
        builder = import_attr(application.import_path)
        built = build_app(
            call_user_app_builder_with_args_if_necessary(builder, application.args), name=application.name
        )
        names = {deployment.name for deployment in built.deployments}
        assert {deployment.name for deployment in application.deployments} <= names
        if "-index-" in application.name:
            assert names == {facts.name for facts in Index.open(index).facts.shards}


def test_the_config_file_of_an_upgrade_keeps_what_is_still_asked_until_it_is_written_again(
    settings: ServeSettings, index: str, root: Path, tmp_path: Path, minilm: str
) -> None:
    file = tmp_path / "serve.yaml"
    other = publish_index(root / "two", minilm, AGAIN, shards=3, types={"year": "integer"})
    named = []
    for path in (index, str(other), str(other)):
        run(settings.model_copy(update={"index": path, "config_file": str(file)}))
        named.append({application["name"] for application in yaml.safe_load(file.read_text())["applications"]})
    assert named[0] < named[1]
    assert named[2] < named[1]
    assert named[0] & named[2] == {"infembed", *(name for name in named[0] if "-encoder-" in name)}
    file.write_text("applications: []")
    with pytest.raises(InputError, match="is there and is none of `infembed serve`"):
        run(settings.model_copy(update={"config_file": str(file)}))


@pytest.mark.ray
@pytest.mark.slow
def test_what_the_config_file_deploys_answers(api: str, config: dict[str, Any]) -> None:
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
    until(lambda: ask(f"{api}/v1/models")[1].get("data", [{}])[0].get("id") == "from-a-file", 120)
    until(lambda: ask(f"{api}/readyz")[0] == 200)
    assert found(api, QUERY, top_k=1, instruction=INSTRUCTIONS[0]) == ["diabetes-doctors"]


def test_bad_input_is_refused_before_anything_starts(
    index: str, minilm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(message: str, **changes: Any) -> None:
        with pytest.raises(InputError, match=message) as refusal:
            run(ServeSettings.of({"index": index, "port": free_port(), **changes}))
        assert "\n" not in str(refusal.value)

    refuse("index=nowhere: no such file or directory", index="nowhere")
    refuse(r"model=./nowhere: no such model directory", model="./nowhere")
    refuse("writable=true: index=s3://bucket/index is in an object store, .* writable=false", index="s3://bucket/index")
    encoder = InstructionEncoder.from_pretrained(minilm)
    next(encoder.backbone.parameters()).data.mul_(1.01)
    encoder.save_pretrained(tmp_path / "other")
    refuse(rf"built by another encoder \({Index.open(index).facts.encoder}", model=str(tmp_path / "other"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        refuse(f"port={port}: cannot be listened on .* set another port", port=port)
    refuse("wait=false: there is no cluster to leave it on", wait=False)
    monkeypatch.delenv("INFEMBED_API_KEYS", raising=False)
    refuse(r"host=0\.0\.0\.0: open to other machines without API keys", host="0.0.0.0")
    monkeypatch.setenv("INFEMBED_API_KEYS", "key1,,key2")
    refuse("holds an empty key")


@pytest.mark.ray
def test_every_node_copies_its_own_shards_from_an_object_store(
    index: str, minilm: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Folder.of(f"{bucket}/served", "index")
    for file in output_files(Path(index)):
        store.upload(file, f"{Path(index).name}/{file.relative_to(index).as_posix()}")
    store.write("latest", Path(index).name)
    monkeypatch.setenv(SCRATCH, str(tmp_path / "driver"))
    plan = Plan.of(ServeSettings(index=store.uri, model=minilm, writable=False, runtime="torch"))
    assert copied(tmp_path / "driver") == {"manifest.json"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
    try:
        for number in range(2):  # a node has room for one shard, and directories of its own
            own = {SCRATCH: str(tmp_path / f"node-{number}")}
            cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, env_vars=own)
        ray.init(cluster.address, log_to_driver=False)
        shards = [ray.remote(num_cpus=1)(ShardSearch).remote(plan.index, number) for number in range(2)]
        for id, text in PASSAGES.items():
            assert ray.get(shards[shard_of(id, 2)].document.remote(id)).text == text
        other = plan.index.model_copy(update={"version": "another"})
        for shard in shards:
            ray.kill(shard)
        with pytest.raises(ray.exceptions.RayActorError, match=r"InputError: index=.* start `serve` again"):
            ray.get(ray.remote(num_cpus=1)(ShardSearch).remote(other, 0).ready.remote())
    finally:
        ray.shutdown()
        cluster.shutdown()
    parts = [copied(tmp_path / f"node-{number}") for number in range(2)]
    assert sorted(parts, key=sorted) == [{"manifest.json", "shard-00000"}, {"manifest.json", "shard-00001"}]


def copied(scratch: Path) -> set[str]:
    """What was copied of an index from an object store."""
    (copy,) = (path for path in scratch.glob("inputs/*/*") if path.is_dir())
    return {path.name for path in copy.iterdir()}


def test_shards_on_gpus_need_a_faiss_for_them(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    with pytest.raises(InputError, match="gpus_per_shard: this FAISS runs on CPUs only; pip uninstall -y faiss-cpu"):
        Plan.of(ServeSettings.of({"index": index, "gpus_per_shard": 1}))


@pytest.mark.parametrize(
    ("cpus", "changes", "refusal"),
    [
        ([2], {}, None),
        ([2], {"cpus_per_encoder": 2}, "cpus_per_encoder=2: .* the cluster has 2, its largest node 2"),
        ([8], {"encoder_replicas": 8}, "cpus_per_encoder=1: 8 replicas of it, and 8.3 CPU for all"),
        ([2, 2], {"cpus_per_encoder": 3}, "its largest node 2"),
        ([2], {"shard_replicas": 20}, "cpus_per_shard=0.1: 40 replicas"),
        ([8], {"gpus_per_encoder": 1}, "gpus_per_encoder=1: .* the cluster has 0"),
    ],
)
def test_what_the_cluster_can_never_hold_is_refused_at_once(
    cpus: list[float], changes: dict[str, Any], refusal: str | None, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"Alive": True, "Labels": {}, "Resources": {"CPU": float(n)}} for n in cpus]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    plan = Plan.of(ServeSettings.of({"index": index, **changes}).model_copy(update={"gpus_per_encoder": 0.0}))
    plan = replace(plan, settings=plan.settings.model_copy(update=changes))
    if refusal is None:
        distributed.require_resources(plan)
        return
    with pytest.raises(InputError, match=refusal) as caught:
        distributed.require_resources(plan)
    assert "\n" not in str(caught.value)
    for node in nodes:
        node["Labels"] = {"ray.io/node-group": "workers"}  # of which there may come more
    distributed.require_resources(plan)


def test_it_is_told_what_is_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def status(application: ApplicationStatus, deployment: DeploymentStatus, message: str) -> ServeStatus:
        trigger = DeploymentStatusTrigger.CONFIG_UPDATE_STARTED
        encoder = DeploymentStatusOverview(deployment, trigger, {ReplicaState.STARTING: 2}, message)
        shard = DeploymentStatusOverview(DeploymentStatus.HEALTHY, trigger, {ReplicaState.RUNNING: 1}, "")
        overview = ApplicationStatusOverview(application, "", 0.0, {"encoder": encoder, "shard-00000": shard})
        return ServeStatus(proxies={}, applications={"app": overview})

    starting = status(ApplicationStatus.DEPLOYING, DeploymentStatus.UPDATING, "no room for\n2 replicas")
    running = status(ApplicationStatus.RUNNING, DeploymentStatus.HEALTHY, "")
    statuses = iter([starting] * 3 + [running])
    monkeypatch.setattr(serve, "status", lambda: next(statuses))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "memory": 1e9})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 0.5})
    monkeypatch.setattr(distributed, "TELL_S", 0.05)
    distributed._wait_for("app")
    line = "serve: waiting for app: encoder (2 starting): no room for 2 replicas; free: 0.5 of 4 CPU"
    assert set(capsys.readouterr().out.splitlines()) == {line}


def test_a_free_port_is_accepted_even_just_after_use() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every server does
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # leaves the port in TIME_WAIT
        with pytest.raises(InputError):
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)


def test_an_api_whose_cluster_is_unknown_or_dead_is_not_replaced(
    index: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("INFEMBED_SCRATCH", str(tmp_path))
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray was started"))

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"deployment": "of another cluster"}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as api:
        threading.Thread(target=api.serve_forever, daemon=True).start()
        port = api.server_port
        settings = ServeSettings(index=index, port=port, runtime="torch")
        with pytest.raises(InputError, match=f"port={port}: another cluster's API"):
            run(settings)
        (tmp_path / f"serve-{port}.address").write_text(f"127.0.0.1:{free_port()} token")
        with pytest.raises(InputError, match=f"port={port}: another cluster's API"):
            run(settings)
        api.shutdown()


def test_the_welcome_names_the_playground_and_the_reference(settings: ServeSettings) -> None:
    url = f"http://127.0.0.1:{settings.port}"
    assert f"playground: {url}/ " in Plan.of(settings).welcome()
    assert f"reference: {url}/docs\n" in Plan.of(settings).welcome()


@pytest.mark.ray
def test_the_command_serves_with_keys_of_its_environment_is_upgraded_by_a_second_one_and_interrupted(
    index: str, root: Path, minilm: str
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "infembed_ray.cli", "serve", f"port={port}", "runtime=torch"]
    command += ["cpus_per_shard=0.1", "request_timeout_s=5"]
    environment = {**os.environ, "INFEMBED_API_KEYS": "key-one,key-two"}
    environment.pop("RAY_ADDRESS", None)
    server = subprocess.Popen(
        [*command, f"index={index}"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        lines = []
        for line in server.stdout or ():
            lines.append(line)
            if "Ctrl-C" in line:
                break
        url = f"http://127.0.0.1:{port}"
        assert any(url in line for line in lines), "".join(lines)
        body = {"query": QUERY, "top_k": 1}
        assert ask(f"{url}/v1/search", body)[0] == 401
        assert ask(f"{url}/v1/search", body, Authorization="Bearer key-two")[0] == 200
        other = publish_index(root / "upgrade", minilm, AGAIN)
        second = subprocess.run(
            [*command, f"index={other}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert second.returncode == 0, second.stderr
        assert "upgraded the API that was running here" in second.stdout
        answer = ask(f"{url}/v1/search", body, Authorization="Bearer key-two")[1]
        assert answer["index_version"] == other.name
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.wait()

    def free() -> bool:
        try:
            require_free_port("127.0.0.1", port)
        except InputError:
            return False
        return True

    until(free, 10)
