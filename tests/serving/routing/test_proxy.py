from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Receive, Scope, Send

from infembed_ray.serving.http.body import BodyReader
from infembed_ray.serving.routing.admission import AdmissionControl
from infembed_ray.serving.routing.proxy import MAX_ATTEMPTS, Retry, middlewares

OURS = {"X-Content-Type-Options": "nosniff"}


class Proxy:
    """Serve's proxy: answers with one of `attempts` after the other, and repeats the last."""

    def __init__(self, *attempts: Callable[[bytes], Any]) -> None:
        self.attempts = list(attempts)
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        self.bodies.append(body)
        answer = self.attempts.pop(0) if len(self.attempts) > 1 else self.attempts[0]
        response = answer(body)
        if response is not None:
            await response(scope, receive, send)


def lost(body: bytes) -> None:
    """A replica died: Serve's proxy sends no answer, and its web server a bare 500."""


def failed(body: bytes) -> None:
    raise OSError("no route to the replica")


def echo(body: bytes) -> JSONResponse:
    return JSONResponse({"asked": body.decode()}, headers=OURS)


def ask(proxy: Proxy, path: str = "/v1/search", body: bytes = b"q" * 100_000) -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(BodyReader(Retry(proxy), max_body_mib=1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(path, content=body)

    return asyncio.run(request())


def test_a_request_whose_replica_is_lost_is_retried_with_the_same_body() -> None:
    proxy = Proxy(lost, failed, echo)
    answer = ask(proxy)
    assert (answer.status_code, answer.json()) == (200, {"asked": "q" * 100_000})
    assert proxy.bodies == [b"q" * 100_000] * 3


def test_after_the_last_attempt_the_client_gets_503_with_retry_after() -> None:
    proxy = Proxy(lost)
    answer = ask(proxy)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert int(answer.headers["retry-after"]) >= 1
    assert len(proxy.bodies) == MAX_ATTEMPTS


@pytest.mark.parametrize("status", [200, 400, 429, 500, 503])
def test_answers_of_the_api_pass_unchanged(status: int) -> None:
    proxy = Proxy(lambda _: PlainTextResponse("its own", status, OURS))
    answer = ask(proxy)
    assert (answer.status_code, answer.text, len(proxy.bodies)) == (status, "its own", 1)


@pytest.mark.parametrize(
    ("theirs", "ours", "code"),
    [(404, 503, "not_ready"), (429, 429, "queue_full"), (503, 503, "replica_lost"), (500, 503, "replica_lost")],
)
def test_errors_of_serve_get_the_apis_shape_and_retry_after(theirs: int, ours: int, code: str) -> None:
    proxy = Proxy(lambda _: PlainTextResponse("Request dropped due to backpressure", theirs))
    answer = ask(proxy)
    assert (answer.status_code, answer.json()["error"]["code"]) == (ours, code)
    assert int(answer.headers["retry-after"]) >= 1
    assert len(proxy.bodies) == 1


def test_paths_of_serve_pass_unchanged() -> None:
    answer = ask(Proxy(lambda _: PlainTextResponse("success", 404)), "/-/healthz")
    assert (answer.status_code, answer.text) == (404, "success")


def test_the_body_is_read_before_admission_and_admission_comes_before_retries() -> None:
    assert [middleware.cls for middleware in middlewares()] == [Retry, AdmissionControl, BodyReader]  # innermost first
