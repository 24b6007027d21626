from __future__ import annotations

import asyncio
import http.client
import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.serving.http import body
from infembed_ray.serving.routing import proxy
from infembed_ray.serving.routing.admission import MAX_LIMIT
from tests.serving.debug import listening

CHUNK = b"x" * 2**16


class Replica:
    """A replica that answers with the size of the body and the request id."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        size = len(await Request(scope, receive).body())
        id = Request(scope).headers.get("x-request-id")
        await JSONResponse({"size": size, "id": id}, headers={"X-Content-Type-Options": "nosniff"})(
            scope, receive, send
        )


@pytest.fixture
def replica() -> Replica:
    return Replica()


@pytest.fixture
def edge(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the replica behind the proxy's middleware, with bodies of up to 1 MiB."""
    monkeypatch.setenv(body.LIMIT_VARIABLE, "1")
    app: Any = replica
    for middleware in proxy.middlewares():  # in the order in which Serve applies them
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return app


@pytest.fixture
def port(edge: Any) -> Iterator[int]:
    with listening(edge) as url:
        yield int(url.rpartition(":")[2])


async def ask(app: ASGIApp, *chunks: bytes, ends: bool = True, path: str = "/v1/search", **headers: str) -> int | None:
    """Send a body in chunks and return the status; with `ends=False` the body stays incomplete."""
    left = list(chunks)
    statuses = []

    async def receive() -> Message:
        if left:
            chunk = left.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(left) or not ends}
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": sent}, receive, send)
    return statuses[0] if statuses else None


def test_slow_uploads_take_no_place_in_the_concurrency_limit(edge: Any) -> None:
    async def scenario() -> None:
        slow = [asyncio.ensure_future(ask(edge, b"{", ends=False)) for _ in range(MAX_LIMIT + 12)]
        await asyncio.sleep(0.1)
        searches = await asyncio.wait_for(asyncio.gather(*(ask(edge, b"q") for _ in range(32))), 10)
        assert Counter(searches) == {200: 32}
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    asyncio.run(scenario())


def test_an_incomplete_body_is_rejected_after_the_time_out(
    edge: Any, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(body, "LINGER_S", 0.05)
    assert asyncio.run(asyncio.wait_for(ask(edge, b"{", ends=False), 10)) == 408
    assert replica.asked == 0


def test_the_memory_of_all_bodies_is_bounded_and_small_bodies_always_pass(
    edge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        megabyte = [CHUNK] * 15
        slow = [asyncio.ensure_future(ask(edge, *megabyte, ends=False)) for _ in range(body.MAX_BODIES_IN_MEMORY + 2)]
        await asyncio.sleep(0.2)
        assert await ask(edge, *megabyte) == 429
        assert await ask(edge, b"q" * body.SMALL_BYTES) == 200
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert await ask(edge, *megabyte) == 200  # what was held is free again

    asyncio.run(scenario())


def test_a_content_length_above_the_limit_is_rejected_before_reading(edge: Any, replica: Replica) -> None:
    async def scenario() -> None:
        assert await ask(edge, ends=False, **{"content-length": str(2**20 + 1)}) == 413
        assert await ask(edge, b"q", **{"content-length": "1"}) == 200

    asyncio.run(scenario())
    assert replica.asked == 1


def uploaded(port: int, chunks: int) -> http.client.HTTPResponse:
    """The answer to a body of 64 KiB chunks without a Content-Length, sent as fast as it goes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/v1/search", body=(CHUNK for _ in range(chunks)), encode_chunked=True)
    return connection.getresponse()


def test_a_large_chunked_upload_is_rejected_without_using_memory(port: int) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    assert uploaded(port, 16).status == 200  # 1 MiB, just fits
    before = resident()
    answer = uploaded(port, 800)  # 50 MiB
    assert (answer.status, answer.headers["connection"]) == (413, "close")
    assert b'"body_too_large"' in answer.read()
    assert resident() - before < 20 * 2**20


@pytest.mark.parametrize("sent", ["mine-1", "not an id", "x" * 200])
def test_a_malformed_request_id_is_removed(edge: Any, sent: str, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /v1/search HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n"
            b"X-Request-Id: " + sent.encode() + b"\r\n\r\nq"
        )
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert (sent.encode() in answer) == (sent == "mine-1"), answer
