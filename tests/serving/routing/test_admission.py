from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from infembed_ray.serving.http.errors import key_rate_limited
from infembed_ray.serving.routing import admission as module
from infembed_ray.serving.routing.admission import MAX_LIMIT, MIN_LIMIT, RECOVERY_S, AdmissionControl
from tests.support.waiting import wait_until_async


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


def test_under_steady_overload_most_rejections_are_early_and_the_service_stays_busy() -> None:
    async def scenario() -> None:
        service = Service(room=20)
        admission = AdmissionControl(service)
        await storm(admission, clients=400, requests=20)  # until the limit has come down
        service.asked = service.rejected = service.most = 0
        statuses = await storm(admission, clients=400, requests=60)
        assert statuses[200] == service.asked - service.rejected
        assert statuses[429] > 10 * service.rejected
        assert service.rejected < 0.1 * service.asked
        assert service.most == service.room

    asyncio.run(scenario())


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that the limits read."""
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", lambda: clock.now)
    return clock


def test_the_limit_recovers_with_time_without_requests(clock: Clock) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [200, 400, 408, 413, 500, 503, 504])
def test_only_429_counts_as_overload(clock: Clock, status: int) -> None:
    async def scenario() -> None:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await asyncio.sleep(0.001)
            await JSONResponse({}, status)(scope, receive, send)

        assert await storm(AdmissionControl(answer), clients=MAX_LIMIT, requests=3) == {status: 3 * MAX_LIMIT}

    asyncio.run(scenario())


def test_one_late_rejection_brings_the_limit_down_to_the_requests_in_flight(clock: Clock) -> None:
    async def scenario() -> None:
        service = Service(room=50)
        admission = AdmissionControl(service)
        for _ in range(2):
            assert await storm(admission, clients=200, requests=1) == {200: 50, 429: 150}
        assert service.rejected == 1
        assert service.asked == 101

    asyncio.run(scenario())


def test_the_limit_never_falls_below_its_minimum() -> None:
    async def scenario() -> None:
        service = Service(room=0)
        admission = AdmissionControl(service)
        await storm(admission, clients=50, requests=20)
        service.room = 100
        assert await storm(admission, clients=MIN_LIMIT, requests=3) == {200: 3 * MIN_LIMIT}

    asyncio.run(scenario())


def test_other_paths_have_no_limit() -> None:
    async def scenario() -> None:
        service = Service(room=0)
        admission = AdmissionControl(service)
        await storm(admission, clients=50, requests=10)
        service.room, service.asked = 1000, 0
        assert await storm(admission, clients=50, requests=2, path="/healthz") == {200: 100}

    asyncio.run(scenario())


def test_a_rejection_has_retry_after() -> None:
    async def rejected() -> httpx.Response:
        go = asyncio.Event()

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            await go.wait()
            await JSONResponse({})(scope, receive, send)

        transport = httpx.ASGITransport(AdmissionControl(slow))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            asked = [
                asyncio.ensure_future(client.post("/v1/search", content=b"q" * 1000)) for _ in range(MAX_LIMIT + 1)
            ]
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            go.set()
            await asyncio.gather(*asked)
        (answer,) = (task.result() for task in done)
        return answer

    answer = asyncio.run(rejected())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert answer.json()["error"]["code"] == "queue_full"


def test_requests_in_flight_are_bounded_though_none_is_rejected_late() -> None:
    async def scenario() -> None:
        go = asyncio.Event()

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            await go.wait()
            await JSONResponse({})(scope, receive, send)

        transport = httpx.ASGITransport(AdmissionControl(slow))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            asked = [asyncio.ensure_future(client.post("/v1/search")) for _ in range(MAX_LIMIT + 50)]
            await wait_until_async(lambda: sum(task.done() for task in asked) >= 50)
            await asyncio.wait(asked, timeout=0.1)
            assert [task.result().status_code for task in asked if task.done()] == [429] * 50
            go.set()
            assert Counter(answer.status_code for answer in await asyncio.gather(*asked))[200] == MAX_LIMIT
            assert (await client.post("/v1/search")).status_code == 200

    asyncio.run(scenario())


def test_each_path_has_its_own_limit() -> None:
    async def scenario() -> None:
        async def no_room_for_embeddings(scope: Scope, receive: Receive, send: Send) -> None:
            await asyncio.sleep(0.001)
            await JSONResponse({}, 200 if scope["path"] == "/v1/search" else 429)(scope, receive, send)

        admission = AdmissionControl(no_room_for_embeddings)
        await storm(admission, clients=60, requests=20, path="/v1/embeddings")
        assert await storm(admission, clients=60, requests=5) == {200: 300}

    asyncio.run(scenario())


def test_clients_that_do_not_read_their_answers_take_no_place() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_the_rate_limit_of_a_key_is_no_overload() -> None:
    async def scenario() -> None:
        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            await key_rate_limited(1.0, 1.0).response()(scope, receive, send)

        admission = AdmissionControl(limited)
        statuses = await storm(admission, clients=MAX_LIMIT, requests=4)
        assert statuses == {429: 4 * MAX_LIMIT}
        assert admission._limits["/v1/search"].limit == MAX_LIMIT

    asyncio.run(scenario())


def test_collections_share_the_limits_of_the_default_one() -> None:
    async def scenario() -> None:
        service = Service(room=0)
        admission = AdmissionControl(service)
        await storm(admission, clients=MAX_LIMIT, requests=4, path="/v1/collections/news/search")
        assert admission._limits["/v1/search"].limit < MAX_LIMIT / 2
        assert admission._limits["/v1/documents"].limit == MAX_LIMIT
        asked = service.asked
        await storm(admission, clients=4, requests=1, path="/v1/collections/news/documents/search")  # an id
        assert service.asked == asked + 4
        assert set(admission._limits) == {"/v1/search", "/v1/embeddings", "/v1/documents"}

    asyncio.run(scenario())
