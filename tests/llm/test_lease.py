import asyncio

import pytest

from infembed_ray.config.llm import Limits
from infembed_ray.llm.chat import RunFailure
from infembed_ray.llm.lease import Lease, RateLimiter
from infembed_ray.llm.rate_limits import REQUESTS, Grant, LeaseReport, Ledger


def test_a_lease_that_reports_twice_in_a_row_keeps_its_advance() -> None:
    now, bounds = 0.0, Limits(requests_per_minute=10**6)
    ledger = Ledger(bounds, 0.0, lambda: now)
    lease = Lease("a", (REQUESTS,), 8, clock=lambda: now)
    cost = {REQUESTS: 1.0}
    for _ in range(2):  # one stays in flight, so the lease is never idle
        lease.start(cost, lambda begun: None)
    lease.accept(ledger.exchange(lease.end_period()))
    lease.settle(cost, cost, now)
    sent = 0
    for _ in range(12):
        lease.accept(ledger.exchange(lease.end_period()))
        now += 0.3
        sent = 0
        while sent < 100 and lease.take(cost):
            lease.settle(cost, cost, now)
            sent += 1
    assert sent == 100
    lease.accept(ledger.exchange(lease.end_period()))
    assert lease.end_period().held[REQUESTS] >= 100


def test_a_failure_in_one_process_stops_all() -> None:
    async def run() -> None:
        ledger = Ledger(Limits())

        async def exchange(report: LeaseReport) -> Grant:
            await asyncio.sleep(0)
            return ledger.exchange(report)

        limiters = [RateLimiter(Limits(), 4, exchange, 0.01) for _ in range(2)]
        for limiter in limiters:
            await limiter.enter({})
        limiters[0].fail("the key is refused")
        with pytest.raises(RunFailure, match="the key is refused"):
            for _ in range(4):
                await asyncio.wait_for(limiters[1].enter({}), 5)
        for limiter in limiters:
            limiter.settle({}, {}, 0.0)
        await limiters[0].flush()

    asyncio.run(run())
