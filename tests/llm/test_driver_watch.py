import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from infembed_ray.config.llm import Endpoint, Limits
from infembed_ray.llm import client as client_module
from infembed_ray.llm.chat import RunFailure
from infembed_ray.llm.client import ChatClient, DriverWatch
from infembed_ray.llm.journal import Journal, has_writer, segments
from infembed_ray.llm.ledger import Grant, LeaseReport, Ledger, RateLimiter
from infembed_ray.llm.prices import PriceTable
from tests.support.chat import passage_request
from tests.support.stand_in_llm import StandIn, stand_in

pytestmark = [pytest.mark.integration, pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd")]


@pytest.mark.parametrize(("drain_s", "answered"), [(30.0, 4), (0.1, 0)], ids=["answered in time", "too slow"])
def test_after_the_driver_dies_an_actor_journals_the_requests_in_flight_and_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drain_s: float, answered: int
) -> None:
    monkeypatch.setattr(client_module, "DRAIN_S", drain_s)

    async def live(server: StandIn) -> list[object]:
        ledger, exited = Ledger(Limits()), asyncio.get_running_loop().create_future()

        async def exchange(report: LeaseReport) -> Grant:
            return ledger.exchange(report)

        limiter = RateLimiter(Limits(), 4, exchange, interval_s=0.02)
        journal = Journal(tmp_path)
        client = ChatClient(Endpoint(base_url=server.url, api_key_env=None), journal, limiter, PriceTable("", {}))
        driver = subprocess.Popen(["sleep", "60"])
        watcher = DriverWatch(driver.pid, limiter, client, journal, exited.set_result)
        watcher.watch()
        asking = [asyncio.create_task(client.complete(passage_request(f"query {number}"))) for number in range(9)]
        while ledger.stats().in_flight < 4:  # the others wait
            await asyncio.sleep(0.02)
        driver.kill()
        while not watcher.died:
            await asyncio.sleep(0.02)
        if answered:
            await asyncio.to_thread(server.release)
        await exited
        assert [has_writer(path) for path in segments([tmp_path])] == [True]
        driver.wait()
        return await asyncio.gather(*asking, return_exceptions=True)

    with stand_in() as server:
        server.hold()
        ended = asyncio.run(live(server))
        assert len(server.log()) <= 4
    failed = [each for each in ended if isinstance(each, RunFailure)]
    assert len(failed) == 9 - answered
    assert {str(each) for each in failed} == {"the driver was killed"}
    assert len(Journal(tmp_path)) == answered
