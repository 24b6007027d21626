"""Releases of several collections over real shards in this process, and their metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from infembed_ray.config.serving import ServeSettings
from infembed_ray.serving import served
from infembed_ray.serving.release import ReleaseSpec
from infembed_ray.serving.routing import blue_green
from infembed_ray.serving.served import Served, ServedMetrics
from infembed_ray.serving.service import Document, Query, Search
from tests.serving.routing.test_blue_green import PASSAGES, World

SETTINGS = ServeSettings(index="", query_cache_mib=1)


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, World]:
    """Application of an index -> its shards; their deployments are found by name, as those of Serve are."""
    made = {name: World(tmp_path / name) for name in ("index-a", "index-b")}
    shards = {world.spec.index.application: world.shards for world in made.values()}
    encoders = {"e": made["index-a"].encoder, "other": made["index-b"].encoder}

    def named(deployment: str, application: str) -> Any:
        if application in shards:
            return shards[application][int(deployment.removeprefix("s"))]
        return encoders[application.split("-")[2]]

    monkeypatch.setattr(blue_green, "STATE_MAX_AGE_S", 0.0)
    monkeypatch.setattr(served, "RemoteDeployment", SimpleNamespace(named=named))
    return made


def release(worlds: dict[str, World], encoder: str = "e") -> ReleaseSpec:
    default, news = (world.spec for world in worlds.values())
    news = news.model_copy(update={"encoder": news.encoder.model_copy(update={"fingerprint": encoder})})
    return ReleaseSpec(api="a", collections={"news": news, "index": default})


def opened(spec: ReleaseSpec) -> Served:
    metrics: Any = None
    return Served.open(spec, SETTINGS, metrics)


def search(text: str, **more: Any) -> Search:
    return Search([Query(text, "I")], 1, **more)


def test_a_document_of_one_collection_is_not_found_in_another_though_they_share_the_query_cache(
    worlds: dict[str, World],
) -> None:
    async def scenario() -> None:
        both = opened(release(worlds)).releases
        index, news = both["index"], both["news"]
        text = "I q"
        sequence = await news.put([Document("new", text)])
        assert worlds["index-a"].encoder.calls == [1]  # of the document
        found = {name: await one.search(search("q")) for name, one in both.items()}
        assert worlds["index-a"].encoder.calls == [1, 1]  # one query, encoded once for both
        assert [hit.id for hit in found["news"].results[0]] == ["new"]
        assert found["index"].results[0][0].id in PASSAGES
        assert (found["news"].sequence, found["index"].sequence) == (sequence, 0)
        assert await index.document("new") is None
        assert await news.document("new") is not None
        assert await index.changed_documents() == 0
        assert await news.changed_documents() > 0
        await index.delete(["p1"])  # the log of the other collection
        assert await news.document("p1") is not None
        assert await index.document("p1") is None

    asyncio.run(scenario())


def test_collections_of_two_encoders_have_a_cache_each(worlds: dict[str, World]) -> None:
    async def scenario() -> None:
        now = opened(release(worlds, encoder="other"))
        assert len(now.encoders) == 2
        for one in now.releases.values():
            await one.search(search("q"))
            await one.search(search("q"))
        assert [world.encoder.calls for world in worlds.values()] == [[1], [1]]

    asyncio.run(scenario())


def test_readiness_and_faults_are_those_of_one_collection(worlds: dict[str, World]) -> None:
    async def scenario() -> None:
        now = opened(release(worlds)).releases
        worlds["index-b"].shards[1].silent = True
        assert [await one.ready() for one in now.values()] == [True, False]
        worlds["index-b"].shards[1].silent = False
        await now["news"].put([Document("p0", "text")])
        (segment,) = (Path(str(now["news"].spec.changes))).glob("*.arrow")
        segment.write_bytes(segment.read_bytes()[:-1])
        assert await now["index"].fault() is None
        assert "corrupted" in str(await now["news"].fault())

    asyncio.run(scenario())


def test_metrics_show_what_the_query_caches_save_and_which_series_are_of_which_collection(
    worlds: dict[str, World],
) -> None:
    registry = CollectorRegistry()
    now: list[Served] = []
    registry.register(ServedMetrics(lambda: now[0] if now else None))
    value = registry.get_sample_value
    assert value("infembed_query_cache_hits_total") is None  # no release yet

    async def scenario() -> None:
        now.append(opened(release(worlds, encoder="other")))
        for name in ("index", "news", "news", "news"):
            await now[0].releases[name].search(search("q"))

    asyncio.run(scenario())
    assert value("infembed_query_cache_hits_total") == 2
    assert value("infembed_query_cache_misses_total") == 2
    assert value("infembed_query_cache_bytes") == sum(e.query_cache.bytes for e in now[0].encoders.values()) > 0
    for collection, index in (("index", "index-a"), ("news", "index-b")):
        labels = {"collection": collection, "release": now[0].fingerprint, "index_version": "v1"}
        labels["application"] = worlds[index].spec.index.application
        assert value("infembed_collection_info", labels) == 1
