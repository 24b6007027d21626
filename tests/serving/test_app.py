from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from infembed_ray.serving import schema
from infembed_ray.serving.app import Limits, create_app
from infembed_ray.serving.auth import ApiKeys
from infembed_ray.serving.engine import BatchingEngine, DeadlineExceeded, EmptySequence
from tests.serving.debug import CARD, DIMENSION, PASSAGES, VOCABULARY, DebugService, debug_embed, listening

JSON = {"Content-Type": "application/json"}


def make_app(service: DebugService | None = None, keys: tuple[str, ...] = (), limits: Limits | None = None) -> FastAPI:
    service = service or DebugService()
    return create_app(service, lambda: "fingerprint", ApiKeys(keys), limits or Limits(), registry=service.registry)


def client_of(app: FastAPI, **options: Any) -> TestClient:
    return TestClient(app, base_url="http://localhost", **options)


@pytest.fixture(scope="module")
def client() -> TestClient:
    """For tests that change nothing."""
    return client_of(make_app())


def vector(text: str) -> np.ndarray:
    return debug_embed([list(text.encode())])[0]


# --------------------------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize(
    ("inputs", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c", "ab"], ["ab", "c", "ab"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_all_four_forms_of_input(client: TestClient, inputs: Any, texts: list[str]) -> None:
    answer = client.post("/v1/embeddings", json={"input": inputs, "model": "debug"})
    assert answer.status_code == 200
    body = answer.json()
    assert (body["object"], body["model"]) == ("list", "debug")
    assert [(item["object"], item["index"]) for item in body["data"]] == [("embedding", i) for i in range(len(texts))]
    np.testing.assert_allclose([item["embedding"] for item in body["data"]], [vector(t) for t in texts], rtol=1e-6)
    length = sum(len(t) for t in texts)
    assert body["usage"] == {"prompt_tokens": length, "total_tokens": length}


def test_base64_is_the_same_numbers(client: TestClient) -> None:
    body = {"input": ["ab", "c"], "model": "debug", "encoding_format": "base64"}
    data = client.post("/v1/embeddings", json=body).json()["data"]
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in data]
    np.testing.assert_array_equal(decoded, [vector("ab"), vector("c")])


def test_fewer_dimensions_are_unit_vectors_again(client: TestClient) -> None:
    data = client.post("/v1/embeddings", json={"input": "ab", "model": "debug", "dimensions": 4}).json()["data"]
    short = np.array(data[0]["embedding"])
    np.testing.assert_allclose(short, vector("ab")[:4] / np.linalg.norm(vector("ab")[:4]), rtol=1e-6)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "ab"),
        ({"input_type": "passage"}, "ab"),
        ({"input_type": "query"}, "query: None ab"),
        ({"instruction": "I"}, "query: I ab"),
        ({"instruction": "I", "input_type": "query"}, "query: I ab"),
    ],
)
def test_an_instruction_makes_a_query_and_nothing_makes_a_passage(
    client: TestClient, extra: dict[str, str], text: str
) -> None:
    data = client.post("/v1/embeddings", json={"input": "ab", "model": "debug", **extra}).json()["data"]
    np.testing.assert_allclose(data[0]["embedding"], vector(text), rtol=1e-6)


# ------------------------------------------------------------------------------------------------------- search


def ranking(query: str, instruction: str | None) -> list[str]:
    """Ids of all passages, best first, from the vectors alone."""
    scores = [vector(f"query: {instruction} {query}") @ vector(passage.text) for passage in PASSAGES]
    return [PASSAGES[i].id for i in np.argsort(scores)[::-1]]


def test_search_ranks_the_passages_under_the_instruction(client: TestClient) -> None:
    answer = client.post("/v1/search", json={"query": "q", "instruction": "I", "top_k": 2})
    assert answer.status_code == 200
    body = answer.json()
    assert [hit["id"] for hit in body["hits"]] == ranking("q", "I")[:2]
    assert set(body["hits"][0]) == {"id", "score", "text", "metadata"}
    del body["hits"]
    assert body == {
        "object": "search_results",
        "index_version": "v1",
        "sequence": 0,
        "model": "debug",
        "timings": {"encode_ms": 1.0, "search_ms": 2.0},
        "partial": False,
        "missing_shards": [],
    }
    plain = client.post("/v1/search", json={"query": "q", "instruction": ""}).json()["hits"]
    assert [hit["id"] for hit in plain] == ranking("q", None)


@pytest.mark.parametrize(
    ("instruction", "each"),
    [("I", ["I", "I"]), (["I", None], ["I", None]), (["", "J"], [None, "J"]), (None, [None, None])],
)
def test_several_queries_are_answered_in_their_order(client: TestClient, instruction: Any, each: list[Any]) -> None:
    body = client.post("/v1/search", json={"query": ["a", "b"], "instruction": instruction}).json()
    assert "hits" not in body
    found = [[hit["id"] for hit in result["hits"]] for result in body["results"]]
    assert found == [ranking(query, i) for query, i in zip(["a", "b"], each, strict=True)]
    one = client.post("/v1/search", json={"query": ["a"]}).json()
    assert len(one["results"]) == 1


def test_a_filter_lets_through_what_it_says_with_the_metadata_in_the_hits(client: TestClient) -> None:
    condition = {"year": {"gte": 2021, "lt": 2024}, "language": "en"}
    hits = client.post("/v1/search", json={"query": "q", "filter": condition}).json()["hits"]
    assert {hit["id"]: hit["metadata"] for hit in hits} == {
        "p1": {"year": 2021, "language": "en"},
        "p3": {"year": 2023, "language": "en"},
    }


def test_a_partial_answer_must_be_asked_for_and_is_marked() -> None:
    service = DebugService()
    service.missing_shards = ["shard-1"]
    client = client_of(make_app(service))
    refusal = client.post("/v1/search", json={"query": "q"})
    assert refused(refusal, 503)["code"] == "replica_lost"
    assert refusal.headers["retry-after"] == "1"
    answer = client.post("/v1/search", json={"query": "q", "allow_partial": True}).json()
    assert (answer["partial"], answer["missing_shards"]) == (True, ["shard-1"])


# ---------------------------------------------------------------------------------------------------- documents


@pytest.fixture(scope="module")
def over_http() -> Iterator[httpx2.Client]:
    with listening(make_app()) as url, httpx2.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize("id", ["new", "a/b", "/a//b/", "ü ?#%2F", "a\nb\0", "..", "."])
def test_a_document_is_put_read_replaced_and_deleted_under_any_id(over_http: httpx2.Client, id: str) -> None:
    client = over_http
    sequence = client.post("/v1/search", json={"query": "q"}).json()["sequence"]
    path = "/v1/documents/" + "".join(f"%{byte:02X}" for byte in id.encode())
    metadata = {"year": 2021, "rating": 4, "draft": False, "day": "2021-05-31", "language": None}
    answer = client.put("/v1/documents", json={"documents": [{"id": id, "text": "t", "metadata": metadata}]})
    assert answer.json() == {"object": "documents.put", "count": 1, "sequence": sequence + 1}
    assert client.get(path).json() == {"object": "document", "id": id, "text": "t", "metadata": metadata}
    client.put("/v1/documents", json={"documents": [{"id": id, "text": "u"}, {"id": "other", "text": "o"}]})
    assert client.get(path).json() == {"object": "document", "id": id, "text": "u", "metadata": {}}
    found = client.post("/v1/search", json={"query": "q"}).json()
    assert found["sequence"] == sequence + 2
    assert {"id": id, "text": "u", "metadata": {}}.items() <= next(h for h in found["hits"] if h["id"] == id).items()
    assert client.delete(path).json() == {"object": "documents.deleted", "count": 1, "sequence": sequence + 3}
    assert refused(client.get(path), 404)["code"] == "document_not_found"


def test_documents_are_deleted_together_and_those_that_are_not_there_are_no_mistake() -> None:
    client = client_of(make_app())
    answer = client.request("DELETE", "/v1/documents", json={"ids": ["p0", "p1", "p0", "nothing"]})
    assert answer.json() == {"object": "documents.deleted", "count": 3, "sequence": 1}
    found = client.post("/v1/search", json={"query": "q"}).json()
    assert {hit["id"] for hit in found["hits"]} == {"p2", "p3", "p4"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"id": "", "text": "t"}, "documents.0.id: String should have at least 1 character"),
        ({"id": "x" * 1001, "text": "t"}, "documents.0.id: String should have at most 1000 characters"),
        ({"id": 1, "text": "t"}, "documents.0.id: Input should be a valid string"),
        ({"id": "a"}, "documents.0.text: Field required"),
        ({"id": "a", "text": " "}, "documents.0.text: must not be empty"),
        ({"id": "a", "text": "x" * (schema.MAX_CHARACTERS + 1)}, "documents.0.text: String should have at most 100000"),
        ({"id": "a", "text": "t", "title": "x"}, "documents.0.title: no such field"),
        (
            {"id": "a", "text": "t", "metadata": {"yeer": 1}},
            "documents.0.metadata: no field 'yeer'; the index has year",
        ),
        ({"id": "a", "text": "t", "metadata": {"year": "2021"}}, "documents.0.metadata.year: must be a whole number"),
        ({"id": "a", "text": "t", "metadata": {"year": True}}, "documents.0.metadata.year: must be a whole number"),
        ({"id": "a", "text": "t", "metadata": {"year": 2**63}}, "documents.0.metadata.year: must be a whole number"),
        ({"id": "a", "text": "t", "metadata": {"year": 10**400}}, "documents.0.metadata.year: must be a whole number"),
        ({"id": "a", "text": "t", "metadata": {"rating": float("nan")}}, "metadata.rating: must be a finite number"),
        ({"id": "a", "text": "t", "metadata": {"rating": float("inf")}}, "metadata.rating: must be a finite number"),
        ({"id": "a", "text": "t", "metadata": {"draft": 0}}, "documents.0.metadata.draft: must be true or false"),
        ({"id": "a", "text": "t", "metadata": {"day": "31.5.2021"}}, "documents.0.metadata.day: must be a date as in"),
        ({"id": "a", "text": "t", "metadata": {"language": ["en"]}}, "documents.0.metadata.language: must be a string"),
        ({"id": "a", "text": "t", "metadata": []}, "documents.0.metadata: Input should be an object"),
    ],
)
def test_a_document_that_does_not_suit_the_index_changes_nothing(document: Any, message: str) -> None:
    service = DebugService()
    body = json.dumps({"documents": [document, {"id": "fine", "text": "t"}]})
    error = refused(client_of(make_app(service)).put("/v1/documents", content=body, headers=JSON), 400)
    assert message in error["message"]
    assert error["param"] == "documents"
    assert service.sequence == 0


@pytest.mark.parametrize(
    ("method", "body", "message"),
    [
        ("PUT", {"documents": []}, "at least 1 item"),
        ("PUT", {"documents": [{"id": "a", "text": "t"}] * 2}, "the id 'a' is there twice"),
        ("PUT", {"documents": [{"id": str(i), "text": "t"} for i in range(1001)]}, "at most 1000 items"),
        ("DELETE", {"ids": []}, "at least 1 item"),
        ("DELETE", {"ids": ["a"] * 1001}, "at most 1000 items"),
        ("DELETE", {}, "Field required"),
    ],
)
def test_changes_have_limits(client: TestClient, method: str, body: Any, message: str) -> None:
    assert message in refused(client.request(method, "/v1/documents", json=body), 400)["message"]


@pytest.mark.parametrize("id", ["", "x" * 1001])
def test_no_document_has_such_an_id(client: TestClient, id: str) -> None:
    assert refused(client.get(f"/v1/documents/{id}"), 400)["param"] == "id"


def test_a_read_only_service_refuses_changes_and_still_reads() -> None:
    service = DebugService(card=CARD.model_copy(update={"writable": False}))
    client = client_of(make_app(service))
    for answer in (
        client.put("/v1/documents", json={"documents": [{"id": "a", "text": "t"}]}),
        client.request("DELETE", "/v1/documents", json={"ids": ["p0"]}),
        client.delete("/v1/documents/p0"),
    ):
        assert refused(answer, 403)["code"] == "read_only"
    assert client.get("/v1/documents/p0").json()["text"] == "passage 0"


# ------------------------------------------------------------------------------------------------------- errors


def refused(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"input": ""}, "input", "at least 1 character"),
        ({"input": " \n"}, "input", "must not be empty"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": ["a", ""]}, "input", "1: String should have at least 1 character"),
        ({"input": [[]]}, "input", "at least 1 item"),
        ({"input": [1.5]}, "input", "give a text, a list of texts"),
        ({"input": [1, "a"]}, "input", "valid integer"),
        ({"input": [True]}, "input", "give a text, a list of texts"),
        ({"input": [-1]}, "input", "greater than or equal to 0"),
        ({"input": [VOCABULARY]}, "input", "token id 256: the vocabulary of debug ends at 255"),
        ({"input": [10**30]}, "input", "the vocabulary of debug ends at 255"),
        ({"input": {"a": 1}}, "input", "give a text, a list of texts"),
        ({"input": None}, "input", "give a text, a list of texts"),
        ({"input": "x" * (schema.MAX_CHARACTERS + 1)}, "input", "at most 100000 characters"),
        ({"input": ["x"] * (schema.MAX_INPUTS + 1)}, "input", "at most 2048 items"),
        ({"dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"dimensions": DIMENSION + 1}, "dimensions", "the model has 16"),
        ({"dimensions": "4"}, "dimensions", "valid integer"),
        ({"encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input_type": "document"}, "input_type", "'query' or 'passage'"),
        ({"instruction": "I", "input_type": "passage"}, None, "instruction belongs to a query"),
        ({"instructions": "I"}, "instructions", "no such field"),
        ({"model": 1}, "model", "valid string"),
    ],
)
def test_a_bad_embeddings_request_is_told_what_is_wrong_where(
    client: TestClient, change: dict[str, Any], param: str | None, message: str
) -> None:
    body = json.dumps({"input": "ab", "model": "debug", **change})
    answer = client.post("/v1/embeddings", content=body, headers={"Content-Type": "application/json"})
    error = refused(answer, 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "query"),
        ({"query": ["x", ""]}, "query"),
        ({"query": "q", "top_k": 0}, "top_k"),
        ({"query": "q", "top_k": 1001}, "top_k"),
        ({"query": 1}, "query"),
        ({"query": []}, "query"),
        ({"query": ["x"] * 65}, "query"),
        ({"query": "q", "filter": {"yeer": 1}}, "filter"),
        ({"query": "q", "filter": {"year": {"gte": "x"}}}, "filter"),
        ({"query": "q", "filter": []}, "filter"),
        ({"query": "q", "allow_partial": 1}, "allow_partial"),
        ({"query": ["a", "b"], "instruction": ["I"]}, None),
        ({"query": "a", "instruction": ["I", "J"]}, None),
        ({"query": ["a"] * 64, "top_k": 1000}, None),
    ],
)
def test_a_bad_search_request_is_told_what_is_wrong_where(
    client: TestClient, body: dict[str, Any], param: str | None
) -> None:
    assert refused(client.post("/v1/search", json=body), 400)["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff",
        b"\xef\xbb\xbf{}",
        b'{"input": NaN, "model": "debug"}',
        b'{"input": "\\ud800", "model": "debug"}',
        b'{"input": [1e999], "model": "debug"}',
        b'{"input": [' + b"9" * 10_000 + b'], "model": "debug"}',
        b"[" * 100_000,
        b'{"input": ' + b"[" * 1000 + b"]" * 1000 + b', "model": "debug"}',
        b"{" + b",".join(b'"%d": 1' % i for i in range(5000)) + b"}",
        b'{"model": "debug", "input": "' + b"x" * 2**20 + b'"}',
        b'{"model": "debug", "input": "a", "\\u001b[31m' + b"x" * 100_000 + b'": 1}',
    ],
)
def test_a_body_that_is_no_request_is_refused_in_few_words(client: TestClient, body: bytes) -> None:
    error = refused(client.post("/v1/embeddings", content=body, headers=JSON), 400)
    assert len(error["message"]) < 520
    assert error["message"].isprintable()


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/jsonp"])
def test_a_body_sent_as_anything_but_json_is_told_about_the_header(client: TestClient, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = client.post("/v1/search", content=b'{"query": "q"}', headers=headers)
    assert "send the body as application/json" in refused(answer, 415)["message"]
    utf8 = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/search", content=b'{"query": "q"}', headers=utf8).status_code == 200


def test_a_body_over_the_limit_is_refused_whether_it_says_its_length_or_not() -> None:
    client = client_of(make_app(limits=Limits(max_body_mib=0.01)))
    body = json.dumps({"query": "q", "instruction": "x" * 20_000}).encode()
    read = 0

    def chunks() -> Iterator[bytes]:
        nonlocal read
        for start in range(0, len(body), 100):
            read += 100
            yield body[start : start + 100]

    for content in (body, chunks()):
        answer = client.post("/v1/search", content=content, headers=JSON)
        error = refused(answer, 413)
        assert (error["code"], answer.headers["connection"]) == ("body_too_large", "close")
        assert "0.01 MiB" in error["message"]
    small = json.dumps({"query": "q"}).encode()
    assert client.post("/v1/search", content=iter([small[:5], small[5:]]), headers=JSON).status_code == 200


def test_a_model_that_is_not_served_is_not_found(client: TestClient) -> None:
    for path, body in (("embeddings", {"input": "x"}), ("search", {"query": "x"})):
        error = refused(client.post(f"/v1/{path}", json={**body, "model": "gpt-4"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["message"] == "the model 'gpt-4' is not served here, 'debug' is"


def test_unknown_paths_and_methods_have_the_shape_too(client: TestClient) -> None:
    refused(client.get("/v1/nothing"), 404)
    refused(client.get("/v1/models/gpt-4"), 404)
    for method in ("GET", "OPTIONS", "PATCH", "NONSENSE"):
        answer = client.request(method, "/v1/search")
        refused(answer, 405)
        assert answer.headers["allow"] == "POST"
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_a_full_queue_says_when_to_come_back() -> None:
    entered, release = threading.Event(), threading.Event()

    def slow(sequences: list[list[int]]) -> np.ndarray:
        entered.set()
        assert release.wait(30)
        return debug_embed(sequences)

    service = DebugService(BatchingEngine(slow, max_queue=1))
    with client_of(make_app(service)) as client:
        ask = partial(client.post, "/v1/embeddings", json={"input": "x", "model": "debug"})
        with ThreadPoolExecutor(2) as others:
            in_the_model = others.submit(ask)
            assert entered.wait(30)
            waiting = others.submit(ask)
            while not service.engine.waiting:
                time.sleep(0.001)
            full = ask()
            release.set()
    error = refused(full, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert int(full.headers["retry-after"]) >= 1
    assert (in_the_model.result().status_code, waiting.result().status_code) == (200, 200)


def test_a_failure_inside_tells_the_client_nothing_but_that(caplog: pytest.LogCaptureFixture) -> None:
    def broken(sequences: list[list[int]]) -> np.ndarray:
        raise RuntimeError("device-side assert")

    client = client_of(make_app(DebugService(BatchingEngine(broken))), raise_server_exceptions=True)
    body = {"input": "confidential", "model": "debug"}
    answer = client.post("/v1/embeddings", json=body, headers={"X-Request-ID": "r-17"})
    error = refused(answer, 500)
    assert (error["type"], error["message"]) == ("server_error", "internal error; the server's log has it")
    assert "r-17" in caplog.text
    assert "device-side assert" in caplog.text
    assert "confidential" not in caplog.text


def test_what_takes_too_long_is_cancelled_and_answered_504() -> None:
    service = DebugService()
    release = threading.Event()

    def slow(sequences: list[list[int]]) -> np.ndarray:
        assert release.wait(30)
        return debug_embed(sequences)

    service.engine = BatchingEngine(slow)
    client = client_of(make_app(service, limits=Limits(request_timeout_s=0.05)))
    answer = client.post("/v1/search", json={"query": "q"})
    release.set()
    assert refused(answer, 504)["code"] == "deadline_exceeded"
    assert answer.headers["retry-after"] == "1"
    assert service.engine.waiting == 0


def test_of_a_deadline_in_the_service_the_requests_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    service = DebugService()

    async def late(*_: Any) -> Any:
        raise DeadlineExceeded(2.351)  # what was left when a part of the service was asked

    monkeypatch.setattr(service, "embed", late)
    answer = client_of(make_app(service)).post("/v1/embeddings", json={"input": "x", "model": "debug"})
    assert refused(answer, 504)["message"] == "not answered within 30 s; try again in 1 s"


def test_input_without_tokens_is_the_clients_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    service = DebugService()

    async def empty(*_: Any) -> Any:
        raise EmptySequence("input 0 has no tokens")

    monkeypatch.setattr(service, "embed", empty)
    error = refused(client_of(make_app(service)).post("/v1/embeddings", json={"input": [1], "model": "debug"}), 400)
    assert (error["message"], error["param"]) == ("input 0 has no tokens: give text", "input")


# ------------------------------------------------------------------------------------------- health, models, keys


def test_health_readiness_and_models() -> None:
    service = DebugService()
    client = client_of(make_app(service))
    assert client.get("/healthz").json() == {"status": "ok", "deployment": "fingerprint"}
    assert client.get("/readyz").status_code == 200
    service.is_ready = False
    assert refused(client.get("/readyz"), 503)["code"] == "not_ready"
    assert client.get("/v1/models").json() == {"object": "list", "data": [CARD.model_dump()]}
    assert client.get("/v1/models/debug").json() == CARD.model_dump()
    service.card = CARD.model_copy(update={"index_version": "v2"})
    assert client.get("/v1/models/debug").json()["index_version"] == "v2"


@settings(max_examples=20, deadline=None)
@given(
    queries=st.lists(st.text(min_size=1, max_size=5).filter(str.strip), min_size=1, max_size=4),
    instruction=st.none() | st.text(max_size=5),
    top_k=st.integers(1, 6),
)
def test_a_batch_of_queries_is_answered_as_each_alone(
    client: TestClient, queries: list[str], instruction: str | None, top_k: int
) -> None:
    common = {"instruction": instruction, "top_k": top_k}
    together = client.post("/v1/search", json={"query": queries, **common}).json()["results"]
    alone = [client.post("/v1/search", json={"query": query, **common}).json()["hits"] for query in queries]
    assert [[h["id"] for h in result["hits"]] for result in together] == [[h["id"] for h in hits] for hits in alone]
