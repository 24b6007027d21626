import json
import threading
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from starlette.testclient import TestClient

from infembed_ray.serving import schema
from infembed_ray.serving.encoder.batching import BatchingEngine, DeadlineExceeded, QueueFull
from infembed_ray.serving.service import NotApplied, ReplicaLost, Stuck, TooManyChanges
from tests.serving.debug import CARD, DIMENSION, DebugService, debug_embed
from tests.serving.http.clients import JSON, client_of, make_app, refused


@pytest.fixture(scope="module")
def client() -> TestClient:
    """A client for tests that change nothing."""
    return client_of(make_app())


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"input": ""}, "input", "at least 1 character"),
        ({"input": " \n"}, "input", "must not be empty"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": ["a", ""]}, "input", "1: String should have at least 1 character"),
        ({"input": [1, "a"]}, "input", "valid string"),
        ({"input": [[97, 98]]}, "input", "valid string"),
        ({"input": {"a": 1}}, "input", "valid string"),
        ({"input": None}, "input", "valid string"),
        ({"input": "x" * (schema.MAX_CHARACTERS + 1)}, "input", "at most 100000 characters"),
        ({"input": ["x"] * (schema.MAX_INPUTS + 1)}, "input", "at most 2048 items"),
        ({"dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"dimensions": DIMENSION + 1}, "dimensions", "the model has 16"),
        ({"dimensions": "4"}, "dimensions", "valid integer"),
        ({"encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input_type": "document"}, "input_type", "'query' or 'passage'"),
        ({"instruction": "I", "input_type": "passage"}, None, "an instruction applies to queries"),
        ({"instructions": "I"}, "instructions", "no such field"),
        ({"model": 1}, "model", "valid string"),
    ],
)
def test_an_invalid_embeddings_request_gets_the_field_and_the_reason(
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
        ({"query": []}, "query"),
        ({"query": "q", "filter": {"yeer": 1}}, "filter"),
        ({"query": "q", "filter": {"year": {"gte": "x"}}}, "filter"),
        ({"query": "q", "filter": []}, "filter"),
        ({"query": "q", "filter": json.loads('{"$or": [' * 50 + '{"year": 1}' + "]}" * 50)}, "filter"),
        ({"query": "q", "filter": {"$or": [{"year": 1}] * 1000}}, "filter"),
        ({"query": "q", "exclude": True}, "exclude"),  # a field of 0.3
        ({"query": "q", "hybrid": 1.5}, "hybrid"),
        ({"query": "q", "hybrid": True}, "hybrid"),
        ({"query": "q", "hybrid": 0.3}, "hybrid"),  # the index has no words
    ],
)
def test_an_invalid_search_request_gets_the_field_and_the_reason(
    client: TestClient, body: dict[str, Any], param: str | None
) -> None:
    assert refused(client.post("/v1/search", json=body), 400)["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
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
def test_a_malformed_body_gets_a_short_error(client: TestClient, body: bytes) -> None:
    error = refused(client.post("/v1/embeddings", content=body, headers=JSON), 400)
    assert len(error["message"]) < 520
    assert error["message"].isprintable()


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/jsonp"])
def test_another_content_type_is_rejected(client: TestClient, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = client.post("/v1/search", content=b'{"query": "q"}', headers=headers)
    assert "send the body as application/json" in refused(answer, 415)["message"]
    utf8 = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/search", content=b'{"query": "q"}', headers=utf8).status_code == 200


def test_a_model_that_is_not_served_is_not_found(client: TestClient) -> None:
    for path, body in (("embeddings", {"input": "x"}), ("search", {"query": "x"})):
        error = refused(client.post(f"/v1/{path}", json={**body, "model": "gpt-4"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["message"] == "the model 'gpt-4' is not served here; the served model is 'debug'"


def test_unknown_paths_and_methods_get_errors_in_openais_shape(client: TestClient) -> None:
    refused(client.get("/v1/nothing"), 404)
    for method in ("GET", "OPTIONS", "PATCH", "NONSENSE"):
        answer = client.request(method, "/v1/search")
        refused(answer, 405)
        assert answer.headers["allow"] == "POST"
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_a_request_that_times_out_is_cancelled_and_answered_504() -> None:
    service = DebugService()
    release = threading.Event()

    def slow(sequences: list[list[int]]) -> np.ndarray:
        assert release.wait(30)
        return debug_embed(sequences)

    service.engine = BatchingEngine(slow)
    client = client_of(make_app(service, request_timeout_s=0.05))
    answer = client.post("/v1/search", json={"query": "q"})
    release.set()
    assert refused(answer, 504)["code"] == "deadline_exceeded"
    assert answer.headers["retry-after"] == "1"
    assert service.engine.waiting == 0


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (QueueFull(1.5), 429, "queue_full", "2"),
        (ReplicaLost(), 503, "replica_lost", "1"),
        (Stuck("a segment is corrupted"), 503, "changes_stuck", "30"),
        (NotApplied(9, "shard-0", 2), 503, "changes_not_applied", "1"),
        (DeadlineExceeded(2.351), 504, "deadline_exceeded", "1"),  # what was left when a part of the service was asked
        (TooManyChanges(13, 9), 507, "too_many_changes", None),
    ],
)
def test_every_error_of_the_service_has_a_status_and_says_when_to_try_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str, retry_after: str | None
) -> None:
    service = DebugService()
    monkeypatch.setattr(service, "search", AsyncMock(side_effect=error))
    answer = client_of(make_app(service)).post("/v1/search", json={"query": "q"})
    assert refused(answer, status)["code"] == code
    assert answer.headers.get("retry-after") == retry_after
    if status == 504:
        assert refused(answer, 504)["message"] == "not answered within 30 s; try again in 1 s"


def test_health_and_models() -> None:
    service = DebugService()
    client = client_of(make_app(service))
    assert client.get("/healthz").json() == {"status": "ok", "deployment": "fingerprint"}
    assert client.get("/v1/models").json() == {"object": "list", "data": [CARD.model_dump()]}
    service.card = CARD.model_copy(update={"index_version": "v2"})
    assert client.get("/v1/models").json()["data"][0]["index_version"] == "v2"
