from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import openai
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from infembed_ray.serving import schema
from infembed_ray.serving.app import create_app
from infembed_ray.serving.auth import ApiKeys
from infembed_ray.serving.engine import BatchingEngine, EmptySequence
from tests.serving.debug import DIMENSION, VOCABULARY, DebugService, debug_embed

MODEL = schema.Model(
    id="debug", created=1, dimension=DIMENSION, encoder="e", index_version="v1", passages=5, vocabulary=VOCABULARY
)


def make_app(service: DebugService | None = None, keys: tuple[str, ...] = ()) -> FastAPI:
    return create_app(service or DebugService(), MODEL, "fingerprint", ApiKeys(keys))


@pytest.fixture
def client() -> TestClient:
    return TestClient(make_app())


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


def test_search(client: TestClient) -> None:
    answer = client.post("/v1/search", json={"query": "q", "instruction": "I", "top_k": 2})
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "search_results",
        "hits": [{"id": "p0", "score": 1.0, "text": "I q"}, {"id": "p1", "score": 0.9, "text": "I q"}],
        "index_version": "v1",
        "model": "debug",
        "timings": {"encode_ms": 1.0, "search_ms": 2.0},
    }
    assert len(client.post("/v1/search", json={"query": "q"}).json()["hits"]) == 5


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
        ({"input": "\ud800"}, "input", "unicode"),
        ({"dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"dimensions": DIMENSION + 1}, "dimensions", "the model has 16"),
        ({"dimensions": "4"}, "dimensions", "valid integer"),
        ({"encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input_type": "document"}, "input_type", "'query' or 'passage'"),
        ({"instruction": "I", "input_type": "passage"}, None, "instruction belongs to a query"),
        ({"instructions": "I"}, "instructions", "no such field"),
        ({"model": None}, "model", "valid string"),
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
        ({"query": "q", "top_k": 0}, "top_k"),
        ({"query": "q", "top_k": 1001}, "top_k"),
        ({"query": 1}, "query"),
    ],
)
def test_a_bad_search_request_is_told_what_is_wrong_where(client: TestClient, body: dict[str, Any], param: str) -> None:
    assert refused(client.post("/v1/search", json=body), 400)["param"] == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"input": NaN, "model": "debug"}', b"null"])
def test_a_body_that_is_no_request_is_refused(client: TestClient, body: bytes) -> None:
    refused(client.post("/v1/embeddings", content=body, headers={"Content-Type": "application/json"}), 400)


def test_a_body_sent_as_a_form_is_told_about_the_header(client: TestClient) -> None:
    form = client.post(
        "/v1/search", content=b'{"query": "q"}', headers={"Content-Type": "application/x-www-form-urlencoded"}
    )
    assert "Content-Type: application/json" in refused(form, 400)["message"]


def test_a_model_that_is_not_served_is_not_found(client: TestClient) -> None:
    for path, body in (("embeddings", {"input": "x"}), ("search", {"query": "x"})):
        error = refused(client.post(f"/v1/{path}", json={**body, "model": "gpt-4"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["message"] == "the model 'gpt-4' is not served here, 'debug' is"
    content = b'{"query": "x", "model": "\\ud800"}'  # a lone surrogate: JSON can say it, UTF-8 cannot
    refused(client.post("/v1/search", content=content, headers={"Content-Type": "application/json"}), 404)


def test_unknown_paths_and_methods_have_the_shape_too(client: TestClient) -> None:
    refused(client.get("/v1/nothing"), 404)
    answer = client.get("/v1/search")
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_a_full_queue_says_when_to_come_back() -> None:
    entered, release = threading.Event(), threading.Event()

    def slow(sequences: list[list[int]]) -> np.ndarray:
        entered.set()
        assert release.wait(30)
        return debug_embed(sequences)

    service = DebugService(BatchingEngine(slow, max_queue=1))
    with TestClient(make_app(service)) as client:
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

    client = TestClient(make_app(DebugService(BatchingEngine(broken))), raise_server_exceptions=False)
    body = {"input": "confidential", "model": "debug"}
    answer = client.post("/v1/embeddings", json=body, headers={"X-Request-ID": "r-17"})
    error = refused(answer, 500)
    assert (error["type"], error["message"]) == ("server_error", "internal error; the server's log has it")
    assert "r-17" in caplog.text
    assert "device-side assert" in caplog.text
    assert "confidential" not in caplog.text


def test_input_without_tokens_is_the_clients_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    service = DebugService()

    async def empty(*_: Any) -> Any:
        raise EmptySequence("input 0 has no tokens")

    monkeypatch.setattr(service, "embed", empty)
    error = refused(TestClient(make_app(service)).post("/v1/embeddings", json={"input": [1], "model": "debug"}), 400)
    assert (error["message"], error["param"]) == ("input 0 has no tokens: give text", "input")


# ------------------------------------------------------------------------------------------- health, models, keys


def test_health_readiness_and_models() -> None:
    service = DebugService()
    client = TestClient(make_app(service))
    assert client.get("/healthz").json() == {"status": "ok", "deployment": "fingerprint"}
    assert client.get("/readyz").status_code == 200
    service.is_ready = False
    assert refused(client.get("/readyz"), 503)["code"] == "not_ready"
    assert client.get("/v1/models").json() == {"object": "list", "data": [MODEL.model_dump()]}
    assert client.get("/docs").status_code == 200


def test_with_keys_everything_but_health_and_docs_needs_one() -> None:
    client = TestClient(make_app(keys=("one", "two")))
    paths = client.get("/openapi.json").json()["paths"]
    for path in {*paths, "/v1/anything", "/anything", "//v1/models", "/v1/models/"} - {"/healthz", "/readyz"}:
        answer = client.get(path, headers={"Authorization": "Bearer wrong"})
        assert refused(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/healthz", "/readyz", "/docs", "/openapi.json"):
        assert client.get(path).status_code == 200
    assert client.get("/v1/models", headers={"Authorization": "Bearer two"}).status_code == 200


def test_the_api_describes_itself() -> None:
    paths = TestClient(make_app(keys=("one",))).get("/openapi.json").json()["paths"]
    assert set(paths) == {"/v1/embeddings", "/v1/search", "/v1/models", "/healthz", "/readyz"}
    assert paths["/v1/search"]["post"]["security"]


# ------------------------------------------------------------------------------------------------ openai's client


@pytest.fixture(scope="module")
def openai_client() -> Iterator[openai.OpenAI]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(keys=("sk-one",)), log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="sk-one", max_retries=0)
    server.should_exit = True
    thread.join(timeout=10)


def test_openai_client_embeds_one_and_many(openai_client: openai.OpenAI) -> None:
    one = openai_client.embeddings.create(input="ab", model="debug")
    np.testing.assert_allclose(one.data[0].embedding, vector("ab"), rtol=1e-6)
    assert one.usage.total_tokens == 2
    many = openai_client.embeddings.create(input=["ab", "c"], model="debug", encoding_format="float")
    np.testing.assert_allclose([d.embedding for d in many.data], [vector("ab"), vector("c")], rtol=1e-6)


def test_openai_client_asks_for_base64_dimensions_tokens_and_instructions(openai_client: openai.OpenAI) -> None:
    raw = openai_client.embeddings.create(input="ab", model="debug", encoding_format="base64")
    decoded = np.frombuffer(base64.b64decode(str(raw.data[0].embedding)), dtype="<f4")
    np.testing.assert_array_equal(decoded, vector("ab"))
    short = openai_client.embeddings.create(input=[97, 98], model="debug", dimensions=4)
    np.testing.assert_allclose(np.linalg.norm(short.data[0].embedding), 1, rtol=1e-6)
    assert len(short.data[0].embedding) == 4
    asked = openai_client.embeddings.create(input="ab", model="debug", extra_body={"instruction": "I"})
    np.testing.assert_allclose(asked.data[0].embedding, vector("query: I ab"), rtol=1e-6)


def test_openai_client_understands_our_refusals(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        openai_client.embeddings.create(input="ab", model="other")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        openai_client.embeddings.create(input="ab", model="debug", dimensions=99)
    assert bad.value.param == "dimensions"
    with pytest.raises(openai.AuthenticationError):
        openai_client.with_options(api_key="wrong").embeddings.create(input="ab", model="debug")
    assert [model.id for model in openai_client.models.list()] == ["debug"]
