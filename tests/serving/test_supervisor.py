"""The supervisor's verdict on a new release, and what an ingress replica makes of it; `test_probes` runs both on Ray Serve."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infembed_ray.config.serving import ServeSettings
from infembed_ray.serving import supervisor
from infembed_ray.serving.release import ApiArguments, Probe, ProbeSet, ReleaseSpec
from infembed_ray.serving.replicas import Ingress
from infembed_ray.serving.service import ReplicaLost
from infembed_ray.serving.supervisor import Supervisor
from tests.serving.routing.test_blue_green import World

PROBES = ProbeSet(probes=[Probe(query="q", relevant=["p1"])], max_ndcg_drop=1, max_p_mrr_drop=2)
ARGUMENTS = ApiArguments(locked=False, settings=ServeSettings(index=""))


@pytest.fixture
def releases(tmp_path: Path) -> tuple[ReleaseSpec, ReleaseSpec]:
    current = ReleaseSpec(api="a", collections={"index": World(tmp_path).spec})
    return current, current.model_copy(update={"api": "b", "probes": PROBES})


def supervised(monkeypatch: pytest.MonkeyPatch, fault: str | None) -> tuple[Supervisor, list[Any], list[Any]]:
    """Return a supervisor that finds this fault, its comparisons, and what it switched the API to."""
    monkeypatch.setattr(supervisor, "RemoteDeployment", SimpleNamespace(named=lambda *names: None))
    made = Supervisor(ARGUMENTS)
    compared: list[Any] = []
    switched: list[Any] = []

    async def compare(*pair: ReleaseSpec) -> str | None:
        compared.append(pair)
        await asyncio.sleep(0.01)
        return fault

    monkeypatch.setattr(made, "_compare", compare)
    monkeypatch.setattr(supervisor, "switch_to", lambda arguments, release: switched.append(release))
    return made, compared, switched


def test_all_who_ask_get_one_verdict_and_a_worse_release_is_taken_back(
    releases: tuple[ReleaseSpec, ReleaseSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, compared, switched = supervised(monkeypatch, "worse")

    async def ask(times: int) -> list[str | None]:
        return list(await asyncio.gather(*(made.verdict(*releases) for _ in range(times))))

    assert asyncio.run(ask(3)) == ["worse"] * 3
    assert compared == [releases]
    assert switched == [releases[0]]
    assert asyncio.run(ask(1)) == ["worse"]  # asked again, it is probed again
    assert len(compared) == 2


def test_a_good_release_and_one_without_probes_may_replace_the_current_one(
    releases: tuple[ReleaseSpec, ReleaseSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, compared, switched = supervised(monkeypatch, None)
    assert asyncio.run(made.verdict(*releases)) is None
    assert asyncio.run(made.verdict(releases[1], releases[0])) is None
    assert (len(compared), switched) == (1, [])


@pytest.mark.parametrize("fault", [None, "worse"])
def test_an_ingress_replica_switches_only_to_a_release_that_passes(
    fault: str | None, releases: tuple[ReleaseSpec, ReleaseSpec], caplog: pytest.LogCaptureFixture
) -> None:
    replica: Any = Ingress.__mro__[1]  # without Serve's wrapper
    ingress = replica(ARGUMENTS, None)
    current, new = (SimpleNamespace(spec=spec, releases={}) for spec in releases)
    answers = [ReplicaLost(), fault]  # it waits for a supervisor that starts again

    async def verdict(method: str, *pair: ReleaseSpec) -> str | None:
        assert (method, pair) == ("verdict", releases)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    ingress._supervisor = verdict
    asyncio.run(ingress._switch_to(current))
    assert (ingress._served, len(answers)) == (current, 2)  # the first release has nothing to compare with
    asyncio.run(ingress._switch_to(new))
    assert ingress._served == (current if fault else new)
    assert ("the new release is not served: worse" in caplog.text) == (fault is not None)
