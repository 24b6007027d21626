"""The API on a real Ray Serve, over real HTTP, with a real small encoder: upgraded, extended and broken under load."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import ray
from ray import serve
from ray.serve.context import _get_global_client

from infembed_ray.client import Client
from infembed_ray.config.serving import RerankSettings, ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.formats import Question
from infembed_ray.modeling.late_interaction import LateInteraction
from infembed_ray.retrieval.index import Index
from infembed_ray.serving import deployments, distributed, startup
from infembed_ray.serving.distributed import run, serving
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.release import APPLICATION, RERANKER
from infembed_ray.serving.service import Document
from infembed_ray.serving.supervisor import switch_to
from tests.serving.commands import command_line, environment, is_free, serve_command
from tests.serving.http_client import ask, found, under_load, values
from tests.serving.indexes import AGAIN, PASSAGES, YEARS, publish_index
from tests.serving.releases import replica
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

NEWS = {f"news-{id}": f"News: {text}" for id, text in PASSAGES.items()}
RERANK = RerankSettings(kind="late_interaction", budget_ms=7000)
QUERY = "diabetes"
INSTRUCTIONS = ("Only guidelines written for clinicians.", "For a lesson on nineteenth century medicine.")


@pytest.fixture(scope="module")
def api(settings: ServeSettings, ray_cluster: None) -> Iterator[str]:
    # As a killed job leaves it: Serve listens on the port, and the API has no release.
    distributed._start_serve(plan := Plan.resolve(settings))
    switch_to(plan.api, None)
    with serving(settings) as url:
        assert url == f"http://127.0.0.1:{settings.port}"  # it takes over the port
        assert ask(f"{url}/readyz")[0] == 200
        yield url
    distributed.stop()  # the release that replaced it


def rerankers() -> list[str]:
    return [name for name in serve.status().applications if "-reranker-" in name]


def replicas() -> dict[str, set[str]]:
    """Return the ids of the running replicas of each application."""
    return {
        name: {
            details["replica_id"]
            for deployment in application["deployments"].values()
            for details in deployment["replicas"]
            if details["state"] == "RUNNING"
        }
        for name, application in _get_global_client().get_serve_details()["applications"].items()
    }


@pytest.mark.ray
def test_hits_over_http_equal_those_of_the_index_offline(api: str, index: str, minilm: str) -> None:
    encoder = InstructionEncoder.from_pretrained(minilm)
    offline = Index.open(index, encoder.fingerprint())
    firsts = []
    unmoved = InstructionEncoder.from_pretrained(minilm)
    unmoved.exclusion_weight = 0.0
    excluding = "For clinicians; no dosage tables."
    for instruction in (*INSTRUCTIONS, excluding):
        status, answer, _ = ask(f"{api}/v1/search", {"query": QUERY, "instruction": instruction, "top_k": 5})
        assert status == 200
        expected = offline.search(encoder.encode_queries([QUERY], [instruction]), 5)[0]
        assert [(hit["id"], hit["text"]) for hit in answer["hits"]] == [(hit.id, hit.text) for hit in expected]
        assert [hit["metadata"] for hit in answer["hits"]] == [YEARS[hit.id] for hit in expected]
        np.testing.assert_allclose([hit["score"] for hit in answer["hits"]], [hit.score for hit in expected], atol=1e-5)
        assert (answer["index_version"], answer["model"]) == (offline.version, Path(minilm).name)
        assert answer["timings"]["encode_ms"] > 0
        assert answer["timings"]["search_ms"] > 0
        firsts.append(answer["hits"][0]["id"])
    assert firsts[:2] == ["diabetes-doctors", "diabetes-history"]
    assert np.abs(encoder.encode_queries(QUERY, excluding) - unmoved.encode_queries(QUERY, excluding)).max() > 0.01
    assert found(api, QUERY, filter={"year": {"lt": 1900}}) == [
        hit.id for hit in offline.search(encoder.encode_queries([QUERY], [None]), 12)[0] if hit.metadata["year"] < 1900
    ]


@pytest.mark.ray
def test_embeddings_over_http_equal_those_of_the_encoder(api: str, minilm: str) -> None:
    client = openai.OpenAI(base_url=f"{api}/v1", api_key="none needed", max_retries=0)
    encoder = InstructionEncoder.from_pretrained(minilm)
    texts = list(PASSAGES.values())

    def embed(inputs: Any, **extra: Any) -> np.ndarray:
        answer = client.embeddings.create(input=inputs, model=Path(minilm).name, extra_body=extra)
        return np.array([item.embedding for item in answer.data])

    np.testing.assert_allclose(embed(texts), encoder.encode_passages(texts), atol=1e-5)
    queries = encoder.encode_queries(texts[:2], [INSTRUCTIONS[0]] * 2)
    np.testing.assert_allclose(embed(texts[:2], instruction=INSTRUCTIONS[0]), queries, atol=1e-5)


@pytest.mark.ray
def test_a_damaged_write_ahead_log_is_reported_and_stops_changes_but_no_search(api: str, index: str) -> None:
    document = {"id": "damaged", "text": "A change that is damaged on disk.", "metadata": {"year": 2000}}
    assert ask(f"{api}/v1/documents", {"documents": [document]}, "PUT")[0] == 200
    last = max(Index.open(index).changes.glob("*.arrow"))
    damaged = last.with_name(f"{int(last.stem) + 1:012d}.arrow")
    damaged.write_bytes(last.read_bytes()[:-1])
    try:
        wait_until(lambda: ask(f"{api}/readyz")[0] == 503)
        wait_until(lambda: ask(f"{api}/v1/documents", {"ids": ["damaged"]}, "DELETE")[0] == 503)
        for answer in (ask(f"{api}/readyz"), ask(f"{api}/v1/documents", {"ids": ["damaged"]}, "DELETE")):
            assert (answer[0], answer[1]["error"]["code"]) == (503, "changes_stuck")
            assert f"{damaged.name} is corrupted" in answer[1]["error"]["message"]
            assert str(damaged.parent) not in answer[1]["error"]["message"]
        assert found(api, QUERY, top_k=1, instruction=INSTRUCTIONS[0]) == ["diabetes-doctors"]
        wait_until(lambda: 1.0 in values(api, "infembed_shard_stuck") & values(api, "infembed_shard_lag"))
        assert values(api, "infembed_log_sequence") == {int(damaged.stem)}
    finally:
        damaged.write_bytes(last.read_bytes())
    wait_until(lambda: ask(f"{api}/readyz")[0] == 200)
    wait_until(lambda: ask(f"{api}/v1/documents", {"ids": ["damaged"]}, "DELETE")[0] == 200)
    wait_until(lambda: values(api, "infembed_shard_stuck") == values(api, "infembed_shard_lag") == {0.0})


@pytest.mark.ray
def test_the_proxy_rejects_a_body_above_the_limit(api: str) -> None:
    connection = http.client.HTTPConnection(api.partition("//")[2], timeout=60)
    connection.request("PUT", "/v1/documents", body=(bytes(2**20) for _ in range(9)), encode_chunked=True)
    answer = connection.getresponse()
    assert (answer.status, json.load(answer)["error"]["code"]) == (413, "body_too_large")
    assert "nosniff" not in answer.headers.values()  # so no replica answered
    padded = json.dumps({"query": QUERY}).ljust(4 * 2**20 - 1)
    connection.request("POST", "/v1/search", body=padded, headers={"Content-Type": "application/json"})
    assert connection.getresponse().status == 200  # though gRPC's own limit is 4 MiB with headers


@pytest.mark.ray
def test_errors_health_and_metrics_over_http(api: str, minilm: str) -> None:
    assert ask(f"{api}/v1/search", {"query": "x", "filter": {"yaer": 1}})[0] == 400
    models = ask(f"{api}/v1/models")[1]["data"]
    assert [(m["id"], m["dimension"], m["passages"]) for m in models] == [(Path(minilm).name, 384, len(PASSAGES))]
    _, _, headers = ask(f"{api}/healthz", **{"X-Request-ID": "mine-1"})
    assert headers["x-request-id"] == "mine-1"

    def metrics() -> str:
        with urllib.request.urlopen(f"{api}/metrics", timeout=60) as page:
            return str(page.read().decode())

    wait_until(
        lambda: "infembed_http_requests_total{" in metrics() and metrics().count("infembed_shard_documents{") == 2
    )


@pytest.mark.ray
def test_the_same_index_and_settings_are_not_served_twice(
    api: str, settings: ServeSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    before = ask(f"{api}/v1/models")[1]
    run(settings)
    assert capsys.readouterr().out == (f"serve: nothing to do: same index and settings, already served at {api}\n")
    assert ask(f"{api}/v1/models")[1] == before


@pytest.mark.ray
def test_another_port_is_rejected_while_serve_runs(api: str, settings: ServeSettings) -> None:
    elsewhere = settings.model_copy(update={"port": free_port()})
    with (
        pytest.raises(InputError, match=r"Serve already runs on this cluster and listens at 127\.0\.0\.1"),
        serving(elsewhere),
    ):
        pass
    assert ask(f"{api}/readyz")[0] == 200  # the API still runs


@pytest.mark.ray
def test_a_failed_upgrade_keeps_the_current_release(api: str, settings: ServeSettings, root: Path, minilm: str) -> None:
    broken = publish_index(root / "broken", minilm, {"only": "One passage."}, shards=1)
    new = settings.model_copy(update={"index": str(broken)})
    before, applications = ask(f"{api}/v1/models")[1], set(serve.status().applications)
    vectors = broken / "shard-00000" / "passages.arrow"
    content = vectors.read_bytes()
    vectors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match=r"passages\.arrow is corrupted"):
        run(new)
    assert ask(f"{api}/v1/models")[1] == before
    assert found(api, QUERY, top_k=1, instruction=INSTRUCTIONS[0]) == ["diabetes-doctors"]
    wait_until(lambda: set(serve.status().applications) == applications, 120)  # the supervisor deletes what is unused


@pytest.fixture(scope="module")
def extended(settings: ServeSettings, root: Path, minilm: str) -> ServeSettings:
    """The same index with a collection beside it, and a reranker."""
    news = publish_index(root / "news", minilm, NEWS, shards=1)
    return settings.model_copy(update={"collections": {"news": str(news)}, "rerank": RERANK})


@pytest.fixture(scope="module")
def newer(extended: ServeSettings, root: Path, minilm: str) -> ServeSettings:
    """The same with another version of the collection."""
    news = publish_index(root / "newer", minilm, AGAIN, shards=1)
    return extended.model_copy(update={"collections": {"news": str(news)}})


@pytest.mark.ray
def test_each_collection_answers_from_its_own_index_and_documents(api: str, extended: ServeSettings) -> None:
    run(extended)
    news = f"{api}/v1/collections/news"
    wait_until(lambda: ask(f"{news}/search", {"query": QUERY})[0] == 200)
    assert set(found(api, QUERY, top_k=100)) == set(PASSAGES)
    assert set(found(api, QUERY, "/v1/collections/index", top_k=100)) == set(PASSAGES)
    assert set(found(api, QUERY, "/v1/collections/news", top_k=100)) == set(NEWS)
    text = "The Kalmar Union joined Denmark, Norway and Sweden under one crown in 1397."
    status, answer, _ = ask(f"{news}/documents", {"documents": [{"id": "history/kalmar", "text": text}]}, "PUT")
    assert status == 200, answer
    fresh = {"top_k": 1, "min_sequence": answer["sequence"]}
    assert found(api, "Kalmar Union", "/v1/collections/news", **fresh) == ["history/kalmar"]
    assert "history/kalmar" not in found(api, "Kalmar Union", top_k=100)
    assert ask(f"{api}/v1/documents/history/kalmar")[0] == 404
    assert ask(f"{news}/documents/history/kalmar")[1]["text"] == text
    assert ask(f"{news}/documents", {"ids": ["history/kalmar"]}, "DELETE")[0] == 200
    assert ask(f"{api}/v1/collections/law/search", {"query": "x"})[1]["error"]["message"] == (
        "there is no collection 'law'; there are index, news"
    )


@pytest.mark.ray
def test_an_upgrade_under_load_fails_no_request_mixes_no_answer_and_restarts_no_other_part(
    api: str, extended: ServeSettings, newer: ServeSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(newer.collections["news"])
    before, release = replicas(), Plan.resolve(extended).release
    with under_load(api, 2) as plain, under_load(api, 2, "/v1/collections/news/search") as of_news:
        wait_until(lambda: min(len(plain), len(of_news)) > 20)
        run(newer)
        wait_until(lambda: any(answer.body["index_version"] == other.name for answer in of_news[-4:]))
    for answers in (plain, of_news):
        assert Counter(answer.status for answer in answers) == {200: len(answers)}
    assert {answer.body["index_version"] for answer in plain} == {Path(extended.index).name}
    assert {hit["id"] for answer in plain for hit in answer.body["hits"]} <= set(PASSAGES)
    versions = {Path(extended.collections["news"]).name: set(NEWS), other.name: set(AGAIN)}
    assert {answer.body["index_version"] for answer in of_news} == set(versions)
    for answer in of_news:  # each of one version alone
        assert {hit["id"] for hit in answer.body["hits"]} <= versions[answer.body["index_version"]]
    after = replicas()
    for same in (release.default.index.application, *release.encoders, *rerankers(), APPLICATION):
        assert before[same] == after[same] != set()
    unused = release.collections["news"].index.application
    wait_until(lambda: unused not in serve.status().applications, 120)
    assert f"from index {Path(extended.index).name}, news {other.name}" in capsys.readouterr().out


@pytest.mark.ray
def test_searches_are_reranked_and_go_on_without_a_lost_reranker(
    api: str, newer: ServeSettings, index: str, minilm: str
) -> None:
    encoder = InstructionEncoder.from_pretrained(minilm)
    query = encoder.encode_queries([QUERY], [INSTRUCTIONS[0]])
    retrieved = Index.open(index, encoder.fingerprint()).search(query, 12)[0]
    asked = Question(QUERY, INSTRUCTIONS[0])
    scores = LateInteraction(encoder).score([(asked, hit.text) for hit in retrieved])
    by_scores = [retrieved[place].id for place in (-scores).argsort(kind="stable")]
    by_cosine = [hit.id for hit in retrieved]
    assert by_scores != by_cosine

    def search(**more: Any) -> dict[str, Any]:
        body = {"query": QUERY, "instruction": INSTRUCTIONS[0], "top_k": 12, **more}
        status, answer, _ = ask(f"{api}/v1/search", body)
        assert status == 200, answer
        return {**answer, "ids": [hit["id"] for hit in answer["hits"]]}

    run(newer)  # nothing to do if the tests before have run
    answer = search()
    assert answer["ids"] == by_scores
    assert {hit["id"]: hit["rerank_score"] for hit in answer["hits"]} == pytest.approx(
        {hit.id: float(score) for hit, score in zip(retrieved, scores, strict=True)}, abs=1e-4
    )
    assert search(rerank=False)["ids"] == by_cosine
    asked = {"query": QUERY, "instruction": INSTRUCTIONS[0], "documents": [hit.text for hit in retrieved], "top_n": 5}
    status, given, _ = ask(f"{api}/v1/rerank", asked)
    assert status == 200, given
    assert [retrieved[result["index"]].id for result in given["results"]] == by_scores[:5]
    assert given["results"][0]["relevance_score"] == pytest.approx(float(scores.max()), abs=1e-4)
    assert ask(f"{api}/v1/models")[1]["data"][0]["reranker"]

    os.kill(replica(RERANKER)["pid"], signal.SIGKILL)
    lost = search()  # answered, whatever the reranker does
    assert lost["ids"] == (by_cosine if lost["notes"] else by_scores)
    assert ask(f"{api}/readyz")[0] == 200
    wait_until(lambda: search()["ids"] == by_scores, 120)  # Serve starts another one
    wait_until(lambda: max(values(api, "infembed_rerank_searches_total"), default=0) >= 2, 30)
    wait_until(lambda: max(values(api, "infembed_reranker_texts_total"), default=0) >= 1, 30)


@pytest.mark.ray
def test_long_passages_are_found_by_their_best_chunk_and_changed_whole(
    api: str, newer: ServeSettings, root: Path, minilm: str
) -> None:
    encoder, texts = InstructionEncoder.from_pretrained(minilm), list(PASSAGES.values())
    rows = [{"id": f"l{n}", "text": " ".join(texts[n : n + n % 5 + 2]), "year": 2000 + n} for n in range(8)]
    options: dict[str, Any] = {"metadata": {"year": "integer"}, "lexical": True, "chunk_tokens": 32, "chunk_overlap": 4}
    index = Index.build(rows, encoder, root / "long", shards=2, **options)
    run(newer.model_copy(update={"collections": {**newer.collections, "long": str(index.path)}}))
    with Client(api) as client:
        on = {"collection": "long", "rerank": False}
        wait_until(lambda: "long" in {one.name for one in client.collections()}, 60)
        query = encoder.encode_queries(QUERY, INSTRUCTIONS[0])

        def check(**asked: Any) -> None:
            (expected,) = index.search(query, 5, asked.get("filter"))
            hits = client.search(QUERY, INSTRUCTIONS[0], top_k=5, **asked, **on).hits
            assert [(hit.id, hit.text, hit.chunk) for hit in hits] == [(h.id, h.text, h.chunk) for h in expected]
            np.testing.assert_allclose([hit.score for hit in hits], [hit.score for hit in expected], atol=1e-5)

        check()
        check(filter={"year": {"gte": 2004}})
        assert {hit.id for hit in client.search(QUERY, top_k=10, **on).hits} == {row["id"] for row in rows}
        put = Document("l1", " ".join([*texts[8:], texts[1]]), {"year": 2020})
        sequence = client.put([put, Document("short", "Diabetes.", {})], collection="long")
        answer = client.search(texts[1], top_k=3, min_sequence=sequence, **on)
        explained = client.search(QUERY, INSTRUCTIONS[0], top_k=5, explain=True, **on)
        first = answer.hits[0]
        assert (first.id, first.text) == ("l1", put.text)
        assert first.chunk is not None
        assert first.chunk.text == put.text[first.chunk.start : first.chunk.end]
        assert first.chunk.start > 0
        assert answer.sequence == sequence
        assert client.document("l1", collection="long") == put
        check()
        assert explained.explanation is not None
        np.testing.assert_allclose(
            [one.score for one in explained.explanation.passages[:5]], [hit.score for hit in explained.hits], atol=1e-5
        )
        words = client.search("nineteenth century physicians", top_k=10, hybrid=0.5, **on).hits
        assert len({hit.id for hit in words}) == len(words) == len(rows) + 1
        assert "century" in words[0].chunk.text
        reranked = client.search(QUERY, INSTRUCTIONS[0], top_k=5, collection="long", rerank=True)
        assert not reranked.notes
        scores = LateInteraction(encoder).score(
            [(Question(QUERY, INSTRUCTIONS[0]), hit.chunk.text) for hit in reranked.hits]
        )
        np.testing.assert_allclose([hit.rerank_score for hit in reranked.hits], scores, atol=1e-4)
        sequence = client.delete(["l1", "l2"], collection="long")
        left = client.search(QUERY, top_k=10, min_sequence=sequence, **on).hits
        assert {hit.id for hit in left} == {row["id"] for row in rows} - {"l1", "l2"} | {"short"}
        assert client.document("l2", collection="long") is None
        assert next(one for one in client.collections() if one.name == "long").model.chunk_tokens == 32


@pytest.mark.ray
@pytest.mark.slow
def test_the_command_serves_with_keys_and_is_upgraded_by_a_second_command(index: str, root: Path, minilm: str) -> None:
    port, options = free_port(), ["cpus_per_shard=0.1", "request_timeout_s=5"]
    keys = {"INFEMBED_API_KEYS": "key-one,key-two"}
    with serve_command(port, f"index={index}", *options, **keys) as (server, lines):
        url = f"http://127.0.0.1:{port}"
        assert any(url in line for line in lines), "".join(lines)
        body = {"query": QUERY, "top_k": 1}
        assert ask(f"{url}/v1/search", body)[0] == 401
        assert ask(f"{url}/v1/search", body, Authorization="Bearer key-two")[0] == 200
        other = publish_index(root / "upgrade", minilm, AGAIN)
        command = command_line(port, f"index={other}", *options)
        second = subprocess.run(command, env=environment(**keys), capture_output=True, text=True, timeout=300)
        assert second.returncode == 0, second.stderr
        assert "upgraded the running API" in second.stdout
        answer = ask(f"{url}/v1/search", body, Authorization="Bearer key-two")[1]
        assert answer["index_version"] == other.name
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
        assert [line for line in lines if not line.startswith(("serve: ", "  playground: "))] == []
        assert max(map(len, lines)) < 200
    wait_until(lambda: is_free(port), 10)


@pytest.mark.ray
def test_a_worker_imports_the_modules_before_it_becomes_a_replica(ray_cluster: None) -> None:
    def imported() -> bool:
        return set(startup.MODULES) <= set(sys.modules)

    environment = deployments.environment(startup.import_modules, 1.0)
    assert ray.get(ray.remote(imported).options(runtime_env={"env_vars": environment}).remote())
    assert not ray.get(ray.remote(imported).remote())


# ---------------------------------------------------------------------------------------------- without a cluster


def test_an_api_of_an_unknown_or_dead_cluster_is_not_replaced(
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
        settings = ServeSettings(index=index, port=port)
        with pytest.raises(InputError, match=f"port={port}: another cluster's API"):
            run(settings)
        (tmp_path / f"serve-{port}.address").write_text(f"127.0.0.1:{free_port()} token")
        with pytest.raises(InputError, match=f"port={port}: another cluster's API"):
            run(settings)
        api.shutdown()
