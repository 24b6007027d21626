"""The proxy's middleware: bodies, admission, and errors of Serve."""

import asyncio
import http.client
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.serving import edge as module
from infembed_ray.serving.edge import (
    LIMITED_PATHS,
    MAX_LIMIT,
    MIN_LIMIT,
    RECOVERY_S,
    AdmissionControl,
    ApiErrors,
    middlewares,
)
from infembed_ray.serving.http.errors import key_rate_limited
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
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 2**20)
    app: Any = replica
    for middleware in middlewares():  # in the order in which Serve applies them
        app = middleware.cls(app)
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


async def test_slow_uploads_take_no_place_in_the_concurrency_limit(edge: Any) -> None:
    slow = [asyncio.ensure_future(ask(edge, b"{", ends=False)) for _ in range(MAX_LIMIT + 12)]
    await asyncio.sleep(0.1)
    searches = await asyncio.wait_for(asyncio.gather(*(ask(edge, b"q") for _ in range(32))), 10)
    assert Counter(searches) == {200: 32}
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


def test_an_incomplete_body_is_rejected_after_the_time_out(
    edge: Any, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "LINGER_S", 0.05)
    assert asyncio.run(asyncio.wait_for(ask(edge, b"{", ends=False), 10)) == 408
    assert replica.asked == 0


async def test_the_memory_of_all_bodies_is_bounded_and_small_bodies_always_pass(
    edge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    megabyte = [CHUNK] * 15
    slow = [asyncio.ensure_future(ask(edge, *megabyte, ends=False)) for _ in range(module.MAX_BODIES_IN_MEMORY + 2)]
    await asyncio.sleep(0.2)
    assert await ask(edge, *megabyte) == 429
    assert await ask(edge, b"q" * module.SMALL_BYTES) == 200
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert await ask(edge, *megabyte) == 200  # what was held is free again


@pytest.mark.integration
async def test_a_content_length_above_the_limit_is_rejected_before_reading(edge: Any, replica: Replica) -> None:
    assert await ask(edge, ends=False, **{"content-length": str(2**20 + 1)}) == 413
    assert await ask(edge, b"q", **{"content-length": "1"}) == 200
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


# ------------------------------------------------------------------------------------------------------- admission


class Service:
    """Serves `room` requests at a time, 20 ms each, and rejects the others with 429."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.asked = self.rejected = self.in_flight = self.most = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        if self.in_flight >= self.room:
            self.rejected += 1
            return await JSONResponse({}, 429)(scope, receive, send)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0.02)
        self.in_flight -= 1
        await JSONResponse({})(scope, receive, send)


async def storm(admission: AdmissionControl, clients: int, requests: int, path: str = "/v1/search") -> Counter[int]:
    """Return the statuses of clients that each repeat a request without waiting."""
    statuses: Counter[int] = Counter()

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses[message["status"]] += 1

    async def ask() -> None:
        for _ in range(requests):
            await admission({"type": "http", "path": path}, receive, send)
            await asyncio.sleep(0.005)

    await asyncio.gather(*(ask() for _ in range(clients)))
    return statuses


async def test_under_steady_overload_most_rejections_are_early_and_the_service_stays_busy() -> None:
    service = Service(room=20)
    admission = AdmissionControl(service)
    await storm(admission, clients=400, requests=20)  # until the limit has come down
    service.asked = service.rejected = service.most = 0
    statuses = await storm(admission, clients=400, requests=60)
    assert statuses[200] == service.asked - service.rejected
    assert statuses[429] > 10 * service.rejected
    assert service.rejected < 0.1 * service.asked
    assert service.most == service.room


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that the limits read."""
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", lambda: clock.now)
    return clock


async def test_the_limit_recovers_with_time_without_requests(clock: Clock) -> None:
    service = Service(room=0)
    admission = AdmissionControl(service)
    await storm(admission, clients=MAX_LIMIT, requests=3)
    service.room = MAX_LIMIT
    rejected = (await storm(admission, clients=MAX_LIMIT, requests=1))[429]
    assert rejected == MAX_LIMIT - MIN_LIMIT
    clock.now += RECOVERY_S / 2
    assert (await storm(admission, clients=32, requests=1)) == {200: 32}
    clock.now += RECOVERY_S / 2
    assert (await storm(admission, clients=MAX_LIMIT, requests=1)) == {200: MAX_LIMIT}


@pytest.mark.parametrize("status", [200, 400, 408, 413, 500, 503, 504])
async def test_only_429_counts_as_overload(clock: Clock, status: int) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.001)
        await JSONResponse({}, status)(scope, receive, send)

    assert await storm(AdmissionControl(answer), clients=MAX_LIMIT, requests=3) == {status: 3 * MAX_LIMIT}


async def test_clients_that_do_not_read_their_answers_take_no_place() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({})(scope, receive, send)

    async def never(message: Message) -> None:
        await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    admission = AdmissionControl(answer)
    stuck = [
        asyncio.ensure_future(admission({"type": "http", "path": "/v1/search"}, receive, never))
        for _ in range(2 * MAX_LIMIT)
    ]
    await asyncio.sleep(0)
    assert await storm(admission, clients=MAX_LIMIT, requests=1) == {200: MAX_LIMIT}
    for one in stuck:
        one.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
    assert await storm(admission, clients=MAX_LIMIT, requests=1) == {200: MAX_LIMIT}


async def test_the_rate_limit_of_a_key_is_no_overload() -> None:
    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        await key_rate_limited(1.0, 1.0).response()(scope, receive, send)

    admission = AdmissionControl(limited)
    statuses = await storm(admission, clients=MAX_LIMIT, requests=4)
    assert statuses == {429: 4 * MAX_LIMIT}
    assert admission._limits["/v1/search"].limit == MAX_LIMIT


async def test_collections_share_the_limits_of_the_default_one() -> None:
    service = Service(room=0)
    admission = AdmissionControl(service)
    await storm(admission, clients=MAX_LIMIT, requests=4, path="/v1/collections/news/search")
    assert admission._limits["/v1/search"].limit < MAX_LIMIT / 2
    assert admission._limits["/v1/documents"].limit == MAX_LIMIT
    asked = service.asked
    await storm(admission, clients=4, requests=1, path="/v1/collections/news/documents/search")  # an id
    assert service.asked == asked + 4
    assert set(admission._limits) == set(LIMITED_PATHS)


# --------------------------------------------------------------------------------------------------- errors of Serve

OURS = {"X-Content-Type-Options": "nosniff"}


def asked(answer: Callable[[], Any], path: str = "/v1/search") -> httpx.Response:
    """Return what a client gets for an answer of Serve's proxy; None: no answer."""

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        if (response := answer()) is not None:
            await response(scope, receive, send)

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(ApiErrors(proxy))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(path, content=b"q")

    return asyncio.run(request())


def failed() -> None:
    raise OSError("no route to the replica")


def of_serve(status: int) -> Callable[[], PlainTextResponse]:
    return lambda: PlainTextResponse("Request dropped due to backpressure", status)


@pytest.mark.parametrize(
    ("answered", "status", "code"),
    [
        (lambda: None, 503, "replica_lost"),  # its ingress is lost
        (failed, 503, "replica_lost"),
        (of_serve(404), 503, "not_ready"),
        (of_serve(429), 429, "queue_full"),
        (of_serve(503), 503, "replica_lost"),
        (of_serve(500), 503, "replica_lost"),
    ],
)
def test_errors_of_serve_get_the_apis_shape_and_retry_after(answered: Any, status: int, code: str) -> None:
    answer = asked(answered)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 503])
def test_answers_of_the_api_and_paths_of_serve_pass_unchanged(status: int) -> None:
    answers = (asked(lambda: PlainTextResponse("its own", status, OURS)), asked(of_serve(status), "/-/healthz"))
    assert [answer.status_code for answer in answers] == [status, status]
    assert [answer.text for answer in answers] == ["its own", "Request dropped due to backpressure"]
