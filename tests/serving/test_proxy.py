from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Receive, Scope, Send

from infembed_ray.serving.body import BodyReader
from infembed_ray.serving.proxy import ATTEMPTS, AnotherReplica, middlewares
from infembed_ray.serving.throttle import Throttle

OURS = {"X-Content-Type-Options": "nosniff"}


class Proxy:
    """Serve's proxy: each attempt as it is told, the last one for all that follow."""

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
    """A replica died: Serve's proxy answers nothing at all, and its web server a bare 500."""


def failed(body: bytes) -> None:
    raise OSError("no route to the replica")


def echo(body: bytes) -> JSONResponse:
    return JSONResponse({"asked": body.decode()}, headers=OURS)


def ask(proxy: Proxy, path: str = "/v1/search", body: bytes = b"q" * 100_000) -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(BodyReader(AnotherReplica(proxy), max_body_mib=1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(path, content=body)

    return asyncio.run(request())


def test_a_request_whose_replica_is_lost_is_made_again_with_the_same_body() -> None:
    proxy = Proxy(lost, failed, echo)
    answer = ask(proxy)
    assert (answer.status_code, answer.json()) == (200, {"asked": "q" * 100_000})
    assert proxy.bodies == [b"q" * 100_000] * 3


def test_after_some_attempts_the_client_is_told_when_to_come_back() -> None:
    proxy = Proxy(lost)
    answer = ask(proxy)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert int(answer.headers["retry-after"]) >= 1
    assert len(proxy.bodies) == ATTEMPTS


@pytest.mark.parametrize("status", [200, 400, 429, 500, 503])
def test_the_apis_own_answers_pass_as_they_are(status: int) -> None:
    proxy = Proxy(lambda _: PlainTextResponse("its own", status, OURS))
    answer = ask(proxy)
    assert (answer.status_code, answer.text, len(proxy.bodies)) == (status, "its own", 1)


@pytest.mark.parametrize(
    ("theirs", "ours", "code"),
    [(404, 503, "not_ready"), (429, 429, "queue_full"), (503, 503, "replica_lost"), (500, 503, "replica_lost")],
)
def test_serves_own_refusals_get_the_shape_of_the_apis_and_a_time_to_come_back(
    theirs: int, ours: int, code: str
) -> None:
    proxy = Proxy(lambda _: PlainTextResponse("Request dropped due to backpressure", theirs))
    answer = ask(proxy)
    assert (answer.status_code, answer.json()["error"]["code"]) == (ours, code)
    assert int(answer.headers["retry-after"]) >= 1
    assert len(proxy.bodies) == 1


def test_serves_own_paths_are_its_own() -> None:
    answer = ask(Proxy(lambda _: PlainTextResponse("success", 404)), "/-/healthz")
    assert (answer.status_code, answer.text) == (404, "success")


def test_a_body_is_read_before_admission_and_admission_is_decided_before_a_replica_is_asked() -> None:
    assert [middleware.cls for middleware in middlewares()] == [AnotherReplica, Throttle, BodyReader]  # innermost first
