import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from infembed_ray.serving.http.app import create_app
from infembed_ray.serving.http.auth import ApiKeys, new_key
from infembed_ray.serving.http.errors import KEY_LIMIT_HEADER
from infembed_ray.serving.http.middleware import HEADERS
from tests.serving.debug import DebugService
from tests.serving.http import clients
from tests.serving.http.clients import make_app

SEARCH = {"query": "confidential"}


def client_of(
    service: DebugService | None = None, keys: tuple[str, ...] = (), host: str = "localhost", **options: Any
) -> TestClient:
    service = service or DebugService()
    counted = {"metrics": service.metrics, "registry": service.registry}
    app = create_app(lambda: {"index": service}, lambda: "f", ApiKeys(keys), **counted, **options)
    return TestClient(app, base_url=f"http://{host}")


# -------------------------------------------------------------------------------------------------- keys, hosts


def test_with_keys_all_paths_but_health_and_pages_need_one() -> None:
    client = client_of(keys=("one", "two"))
    paths = client.get("/openapi.json").json()["paths"]
    for path in {*paths, "/v1/anything", "/anything", "//v1/models", "/v1/models/", "/healthz/"} - {
        "/healthz",
        "/readyz",
    }:
        answer = client.get(path, headers={"Authorization": "Bearer wrong"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/healthz", "/readyz", "/docs", "/openapi.json"):
        assert client.get(path).status_code == 200
    assert client.get("/v1/models", headers={"Authorization": "Bearer two"}).status_code == 200
    assert client.get("/metrics", headers={"Authorization": "Bearer two"}).status_code == 200


@pytest.mark.parametrize("scope", ["read", "write", "admin"])
def test_a_key_may_do_what_its_scope_says_and_nothing_else(tmp_path: Path, scope: str) -> None:
    key = new_key("a", tmp_path / "keys", scope)
    client = clients.client_of(make_app(keys=ApiKeys(file=tmp_path / "keys")))
    documents = {"documents": [{"id": "d", "text": "t"}]}
    requests: dict[tuple[str, str], Any] = {
        ("POST", "/v1/search"): SEARCH,
        ("POST", "/v1/embeddings"): {"input": "a"},
        ("GET", "/v1/models"): None,
        ("PUT", "/v1/documents"): documents,
        ("DELETE", "/v1/documents"): {"ids": ["d"]},
        ("GET", "/metrics"): None,
    }
    allowed = set()
    for (method, path), body in requests.items():
        answer = client.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})
        if answer.status_code == 200:
            allowed.add((method, path))
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")
            assert f"{method} {path}" in answer.json()["error"]["message"]
    of_scope = {"read": list(requests)[:3], "write": list(requests)[3:5], "admin": [("GET", "/metrics")]}
    assert allowed == set(of_scope[scope])


def test_a_request_above_the_rate_of_its_key_is_told_when_to_come_back(tmp_path: Path) -> None:
    slow, fast = new_key("slow", tmp_path / "keys", rate=0.1), new_key("fast", tmp_path / "keys")
    client = clients.client_of(make_app(keys=ApiKeys(file=tmp_path / "keys")))

    def ask(key: str) -> Any:
        return client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})

    assert ask(slow).status_code == 200
    answer = ask(slow)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(answer.headers["retry-after"]) <= 10
    assert answer.headers[KEY_LIMIT_HEADER] == "0.1"
    assert all(ask(fast).status_code == 200 for _ in range(50))


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:80", "127.1.2.3", "[::1]", "[::1]:8000"])
def test_without_keys_requests_of_this_machine_are_answered(host: str) -> None:
    assert client_of().get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "10.0.0.1", "127.0.0.1.evil.example", "", "[", ":"]
)
def test_without_keys_a_foreign_host_name_is_rejected(host: str) -> None:
    """A page of evil.example whose name was made to lead to 127.0.0.1 must not reach the API through a browser."""
    answer = client_of().post("/v1/search", json=SEARCH, headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_host")


def test_the_body_of_a_request_without_a_key_is_not_read() -> None:
    def chunks() -> Any:
        raise AssertionError("read")
        yield b""

    client = client_of(keys=("one",))
    # The test client reads a body when the application asks for it, and not before.
    assert client.post("/v1/search", content=chunks(), headers={"Content-Type": "application/json"}).status_code == 401


# ---------------------------------------------------------------------------------------------- ids and headers


@pytest.mark.parametrize("id", ["r-17", "01:HX/z+a=._", "a" * 128])
def test_a_request_id_is_echoed(id: str) -> None:
    assert client_of().get("/healthz", headers={"X-Request-Id": id}).headers["x-request-id"] == id


@pytest.mark.parametrize("id", [None, "", "a b", "a" * 129, "<script>", "ü".encode()])
def test_a_request_without_a_valid_id_gets_a_new_one(id: Any) -> None:
    headers = {} if id is None else {"X-Request-Id": id}
    answers = [client_of().get("/healthz", headers=headers) for _ in range(2)]
    made = [answer.headers["x-request-id"] for answer in answers]
    assert all(re.fullmatch("[0-9a-f]{32}", id) for id in made)
    assert made[0] != made[1]


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/nothing", 404), ("/v1/search", 405)])
def test_every_answer_has_the_security_headers_and_none_of_cors(path: str, status: int) -> None:
    answer = client_of().get(path, headers={"Origin": "https://evil.example"})
    assert answer.status_code == status
    for name, value in HEADERS:
        assert answer.headers[name.decode()] == value.decode()
    assert not any(name.startswith("access-control") for name in answer.headers)


# ------------------------------------------------------------------------------------------------ faults, counts


def test_an_internal_error_is_logged_once_with_the_request_id_and_without_texts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = DebugService()

    async def broken(*_: Any) -> Any:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(service, "search", broken)
    monkeypatch.setattr(service, "document", broken)
    client = client_of(service, keys=("secret-key",))
    headers = {"X-Request-Id": "r-17", "Authorization": "Bearer secret-key"}
    for answer in (
        client.post("/v1/search", json=SEARCH, headers=headers),
        client.get("/v1/documents/confidential", headers=headers),
    ):
        assert answer.status_code == 500
        assert answer.json()["error"] == {
            "message": "internal error; the server's log has the details",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        assert answer.headers["x-request-id"] == "r-17"
    ours = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in ours] == [
        "POST /v1/search failed (request r-17)",
        "GET /v1/documents/{id:any} failed (request r-17)",
    ]
    assert "device-side assert" in caplog.text
    assert "confidential" not in caplog.text
    assert "secret-key" not in caplog.text


def asked(app: Any, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answer to a search whose body consists of these messages and then stops."""
    coming, sent = list(messages), []
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/search", "query_string": b"", "headers": headers}

    async def receive() -> dict[str, Any]:
        if not coming:
            await asyncio.sleep(60)
        return coming.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


def test_a_client_that_disconnects_within_its_body_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    service = DebugService()
    app = make_app(service)
    part = {"type": "http.request", "body": b'{"query', "more_body": True}
    assert asked(app, part, {"type": "http.disconnect"}) == []
    assert not caplog.records
    labels = {"route": "/v1/search", "status": "gone"}
    assert service.registry.get_sample_value("infembed_http_requests_total", labels) == 1
    assert service.registry.get_sample_value("infembed_http_in_flight") == 0


def test_an_incomplete_body_times_out() -> None:
    app = make_app(request_timeout_s=0.05)
    answer = asked(app, {"type": "http.request", "body": b'{"query', "more_body": True})
    assert answer[0]["status"] == 504


def test_rejected_requests_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    client = client_of()
    client.post("/v1/search", json={"query": "confidential", "top_k": "confidential", "confidential": 1})
    client.post("/v1/search", content=b'{"confidential', headers={"Content-Type": "application/json"})
    client.get("/confidential")
    assert "confidential" not in caplog.text


def test_requests_are_counted_by_route_and_not_by_path_or_method() -> None:
    service = DebugService()
    client = client_of(service)
    client.post("/v1/search", json=SEARCH)
    client.post("/v1/search", json={})
    for i in range(3):
        client.get(f"/v1/documents/{i}")
        client.request(f"METHOD{i}", f"/made/up/{i}")
    client.get("/healthz", headers={"Host": "evil.example"})
    counts = {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for metric in service.registry.collect()
        for sample in metric.samples
        if sample.name == "infembed_http_requests_total"
    }
    assert counts == {
        ("/v1/search", "200"): 1,
        ("/v1/search", "400"): 1,
        ("/v1/documents/{id:any}", "404"): 3,
        ("none", "404"): 3,
        ("none", "403"): 1,
    }
    assert service.registry.get_sample_value("infembed_http_request_seconds_count", {"route": "/v1/search"}) == 2
    assert service.registry.get_sample_value("infembed_http_in_flight") == 0
    metrics = client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert 'infembed_http_requests_total{route="/v1/search",status="200"} 1.0' in metrics.text
