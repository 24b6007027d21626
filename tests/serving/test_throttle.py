from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from infembed_ray.serving.throttle import FEW_UNDER_WAY, Throttle


class Service:
    """Takes so many requests a second and refuses the others."""

    def __init__(self, per_second: float) -> None:
        self.now = 0.0
        self.asked = 0
        self._per_second = per_second
        self._room = 0.0
        self._at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        self._room = min(3.0, self._room + (self.now - self._at) * self._per_second)
        self._at = self.now
        taken = self._room >= 1
        self._room -= taken
        await JSONResponse({}, 200 if taken else 429)(scope, receive, send)


def answers(
    service: Service, throttle: Throttle, rate: float, seconds: float, path: str = "/v1/search"
) -> Counter[int]:
    async def asked() -> Counter[int]:
        statuses: Counter[int] = Counter()
        transport = httpx.ASGITransport(throttle)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for _ in range(round(rate * seconds)):
                service.now += 1 / rate
                answer = await client.post(path)
                statuses[answer.status_code] += 1
        return statuses

    return asyncio.run(asked())


@pytest.fixture
def service() -> Service:
    return Service(per_second=20)


@pytest.fixture
def throttle(service: Service) -> Throttle:
    return Throttle(service, clock=lambda: service.now, draw=random.Random(0).random)


def test_under_overload_most_is_refused_before_it_is_asked_and_no_room_is_left_unused(
    service: Service, throttle: Throttle
) -> None:
    statuses = answers(service, throttle, rate=100, seconds=10)
    assert statuses[200] >= 0.95 * 200
    assert service.asked < 0.45 * 1000
    assert sum(statuses.values()) == 1000


def test_it_is_soon_forgotten(service: Service, throttle: Throttle) -> None:
    answers(service, throttle, rate=100, seconds=5)
    answers(service, throttle, rate=10, seconds=5)
    assert answers(service, throttle, rate=10, seconds=10) == {200: 100}


def test_what_costs_nothing_is_always_asked(service: Service, throttle: Throttle) -> None:
    answers(service, throttle, rate=100, seconds=5)
    asked = service.asked
    answers(service, throttle, rate=100, seconds=5, path="/healthz")
    assert service.asked == asked + 500


def test_a_refusal_says_when_to_come_back() -> None:
    async def refused() -> httpx.Response:
        transport = httpx.ASGITransport(Throttle(Service(0), draw=lambda: 0.0))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for _ in range(20):
                answer = await client.post("/v1/search", content=b"q" * 1000)
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
            asked = [asyncio.ensure_future(client.post("/v1/search")) for _ in range(FEW_UNDER_WAY + 50)]
            await asyncio.wait(asked, timeout=0.5)
            assert [task.result().status_code for task in asked if task.done()] == [429] * 50
            go.set()
            assert Counter(answer.status_code for answer in await asyncio.gather(*asked))[200] == FEW_UNDER_WAY
            assert (await client.post("/v1/search")).status_code == 200

    asyncio.run(scenario())
