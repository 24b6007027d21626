from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from infembed_ray.serving import throttle as module
from infembed_ray.serving.throttle import FEWEST, MOST, RECOVERY_S, Throttle


class Service:
    """Has room for so many requests at a time, which take a while, and refuses the others."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.asked = self.refused = self.under_way = self.most = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        if self.under_way >= self.room:
            self.refused += 1
            return await JSONResponse({}, 429)(scope, receive, send)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.02)
        self.under_way -= 1
        await JSONResponse({})(scope, receive, send)


async def storm(throttle: Throttle, clients: int, requests: int, path: str = "/v1/search") -> Counter[int]:
    """What so many clients get that each ask again at once, whatever they were told."""
    statuses: Counter[int] = Counter()

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses[message["status"]] += 1

    async def ask() -> None:
        for _ in range(requests):
            await throttle({"type": "http", "path": path}, receive, send)
            await asyncio.sleep(0.005)

    await asyncio.gather(*(ask() for _ in range(clients)))
    return statuses


def test_steady_overload_is_rejected_here_and_the_service_is_kept_busy() -> None:
    async def scenario() -> None:
        service = Service(room=20)
        throttle = Throttle(service)
        await storm(throttle, clients=400, requests=20)  # until the limit has come down
        service.asked = service.refused = service.most = 0
        statuses = await storm(throttle, clients=400, requests=60)
        assert statuses[200] == service.asked - service.refused
        assert statuses[429] > 10 * service.refused
        assert service.refused < 0.1 * service.asked
        assert service.most == service.room

    asyncio.run(scenario())


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that limits see."""
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", lambda: clock.now)
    return clock


def test_the_limit_recovers_with_time_though_no_request_comes(clock: Clock) -> None:
    async def scenario() -> None:
        service = Service(room=0)
        throttle = Throttle(service)
        await storm(throttle, clients=MOST, requests=3)
        service.room = MOST
        rejected = (await storm(throttle, clients=MOST, requests=1))[429]
        assert rejected == MOST - FEWEST
        clock.now += RECOVERY_S / 2
        assert (await storm(throttle, clients=32, requests=1)) == {200: 32}
        clock.now += RECOVERY_S / 2
        assert (await storm(throttle, clients=MOST, requests=1)) == {200: MOST}

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [200, 400, 408, 413, 500, 503, 504])
def test_only_429_counts_as_overload(clock: Clock, status: int) -> None:
    async def scenario() -> None:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await asyncio.sleep(0.001)
            await JSONResponse({}, status)(scope, receive, send)

        assert await storm(Throttle(answer), clients=MOST, requests=3) == {status: 3 * MOST}

    asyncio.run(scenario())


def test_one_late_rejection_brings_the_limit_down_to_the_requests_in_flight(clock: Clock) -> None:
    async def scenario() -> None:
        service = Service(room=50)
        throttle = Throttle(service)
        for _ in range(2):
            assert await storm(throttle, clients=200, requests=1) == {200: 50, 429: 150}
        assert service.refused == 1
        assert service.asked == 101

    asyncio.run(scenario())


def test_few_at_a_time_are_never_refused_at_the_door() -> None:
    async def scenario() -> None:
        service = Service(room=0)
        throttle = Throttle(service)
        await storm(throttle, clients=50, requests=20)
        service.room = 100
        assert await storm(throttle, clients=FEWEST, requests=3) == {200: 3 * FEWEST}

    asyncio.run(scenario())


def test_what_costs_nothing_is_always_asked() -> None:
    async def scenario() -> None:
        service = Service(room=0)
        throttle = Throttle(service)
        await storm(throttle, clients=50, requests=10)
        service.room, service.asked = 1000, 0
        assert await storm(throttle, clients=50, requests=2, path="/healthz") == {200: 100}

    asyncio.run(scenario())


def test_a_refusal_says_when_to_come_back() -> None:
    async def refused() -> httpx.Response:
        go = asyncio.Event()

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            await go.wait()
            await JSONResponse({})(scope, receive, send)

        transport = httpx.ASGITransport(Throttle(slow))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            asked = [asyncio.ensure_future(client.post("/v1/search", content=b"q" * 1000)) for _ in range(MOST + 1)]
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            go.set()
            await asyncio.gather(*asked)
        (answer,) = (task.result() for task in done)
        return answer

    answer = asyncio.run(refused())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert answer.json()["error"]["code"] == "queue_full"


def test_what_is_not_answered_yet_is_not_added_to_without_bound() -> None:
    async def scenario() -> None:
        go = asyncio.Event()

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            await go.wait()
            await JSONResponse({})(scope, receive, send)

        transport = httpx.ASGITransport(Throttle(slow))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            asked = [asyncio.ensure_future(client.post("/v1/search")) for _ in range(MOST + 50)]
            await asyncio.wait(asked, timeout=0.5)
            assert [task.result().status_code for task in asked if task.done()] == [429] * 50
            go.set()
            assert Counter(answer.status_code for answer in await asyncio.gather(*asked))[200] == MOST
            assert (await client.post("/v1/search")).status_code == 200

    asyncio.run(scenario())


def test_refusals_of_one_kind_do_not_shut_the_door_to_another() -> None:
    async def scenario() -> None:
        async def no_room_for_embeddings(scope: Scope, receive: Receive, send: Send) -> None:
            await asyncio.sleep(0.001)
            await JSONResponse({}, 200 if scope["path"] == "/v1/search" else 429)(scope, receive, send)

        throttle = Throttle(no_room_for_embeddings)
        await storm(throttle, clients=60, requests=20, path="/v1/embeddings")
        assert await storm(throttle, clients=60, requests=5) == {200: 300}

    asyncio.run(scenario())


def test_clients_that_do_not_read_their_answers_keep_nobody_out() -> None:
    async def scenario() -> None:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await JSONResponse({})(scope, receive, send)

        async def never(message: Message) -> None:
            await asyncio.Event().wait()

        async def receive() -> Message:
            return {"type": "http.request", "body": b""}

        throttle = Throttle(answer)
        deaf = [
            asyncio.ensure_future(throttle({"type": "http", "path": "/v1/search"}, receive, never))
            for _ in range(2 * MOST)
        ]
        await asyncio.sleep(0)
        assert await storm(throttle, clients=MOST, requests=1) == {200: MOST}
        for one in deaf:
            one.cancel()
        await asyncio.gather(*deaf, return_exceptions=True)
        assert await storm(throttle, clients=MOST, requests=1) == {200: MOST}

    asyncio.run(scenario())
