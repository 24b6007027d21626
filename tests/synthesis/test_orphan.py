import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from infembed_ray.config import Endpoint, Limits
from infembed_ray.synthesis import orphan
from infembed_ray.synthesis.chat import RunFailure
from infembed_ray.synthesis.client import ChatClient
from infembed_ray.synthesis.journal import Journal, has_writer, segments
from infembed_ray.synthesis.limits import Gate, Grant, Lease, Ledger, Report, resources
from infembed_ray.synthesis.orphan import Orphan
from infembed_ray.synthesis.prices import PriceTable
from tests.stand_in_llm import stand_in
from tests.synthesis.exchanges import passage_request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd")


@pytest.mark.parametrize(("drain_s", "answered"), [(30.0, 4), (0.1, 0)], ids=["answered in time", "too slow"])
def test_an_orphan_sends_nothing_more_journals_what_is_in_flight_and_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drain_s: float, answered: int
) -> None:
    monkeypatch.setattr(orphan, "DRAIN_S", drain_s)

    async def live(url: str) -> list[object]:
        ledger, exited = Ledger(Limits(), 4), asyncio.get_running_loop().create_future()

        async def exchange(report: Report) -> Grant:
            return ledger.exchange(report)

        gate = Gate(Lease("the only one", resources(Limits()), 4), exchange, interval_s=0.02)
        journal = Journal(tmp_path)
        client = ChatClient([Endpoint(base_url=url, api_key_env=None)], journal, gate, PriceTable("", {}))
        driver = subprocess.Popen(["sleep", "60"])
        Orphan(driver.pid, gate, client, journal, exited.set_result).watch()
        asking = [asyncio.create_task(client.complete(passage_request(f"query {number}"))) for number in range(9)]
        await asyncio.sleep(0.5)  # four are in flight, the others wait
        driver.kill()
        await exited
        assert [has_writer(path) for path in segments([tmp_path])] == [True]
        driver.wait()
        return await asyncio.gather(*asking, return_exceptions=True)

    with stand_in(latency_s=1.5) as server:
        ended = asyncio.run(live(server.url))
        assert len(server.log()) <= 4
    failed = [each for each in ended if isinstance(each, RunFailure)]
    assert len(failed) == 9 - answered
    assert {str(each) for each in failed} == {"the driver was killed"}
    assert len(Journal(tmp_path)) == answered
