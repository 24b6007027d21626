"""Automatic compaction with a stand-in API over real published indexes; `test_distributed` runs it on a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from infembed_ray.config.retrieval import CompactSettings
from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.serving import compaction
from infembed_ray.serving.compaction import AutoCompaction
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.release import ReleaseSpec
from tests.serving.indexes import AGAIN, PASSAGES, publish_index

pytestmark = pytest.mark.integration


class Api:
    """What the supervisor sees of an API: the release that it serves, and how many documents changed."""

    def __init__(self, release: ReleaseSpec, next_versions: dict[str, Path], compact_at: int | None = 10) -> None:
        self.release = release
        self.changed: dict[str, float] = {}
        self.compacted: list[CompactSettings] = []
        self.fault: Exception | None = None
        self._next = next_versions
        self.automatic = AutoCompaction(compact_at, self.served, self.counts, self.compact, self.switch)

    async def served(self) -> ReleaseSpec:
        return self.release

    async def counts(self) -> dict[str, float]:
        return self.changed

    async def compact(self, settings: CompactSettings) -> str:
        self.compacted.append(settings)
        if self.fault is not None:
            raise self.fault
        return str(self._next[Path(settings.index).parent.parent.name])

    async def switch(self, current: ReleaseSpec, new: ReleaseSpec) -> None:
        assert current == self.release
        self.release = new
        self.changed = {}

    def look(self) -> None:
        asyncio.run(self.automatic.look())


@pytest.fixture(scope="module")
def places(root: Path, minilm: str) -> dict[str, tuple[Path, Path]]:
    """Collection -> the served version of its index and the next one, in another directory until it is published."""
    return {
        name: (
            publish_index(root / f"compaction-{name}", minilm, {"a": f"Of {name}.", **PASSAGES}, shards=1),
            publish_index(root / f"next-{name}", minilm, {"a": f"Of {name}.", **AGAIN}, shards=2),
        )
        for name in ("index", "news")
    }


@pytest.fixture
def api(places: dict[str, tuple[Path, Path]]) -> Api:
    settings = ServeSettings(index=str(places["index"][0]), collections={"news": str(places["news"][0])})
    return Api(Plan.resolve(settings).release, {f"compaction-{name}": place for name, (_, place) in places.items()})


def test_the_collection_with_the_most_changes_is_compacted_and_the_others_stay_as_they_are(
    api: Api, places: dict[str, tuple[Path, Path]]
) -> None:
    before = api.release
    api.changed = {"index": 9.5, "news": 9.0}
    api.look()
    assert (api.compacted, api.release) == ([], before)
    api.changed = {"index": 11, "news": 30.0}
    api.look()
    (asked,) = api.compacted
    assert (asked.index, asked.keep_versions) == (str(places["news"][0]), 2)
    after, following = api.release.collections["news"], places["news"][1]
    assert (after.index.index, after.index.version, after.card.index_version) == (str(following), *[following.name] * 2)
    assert (len(after.shards), after.card.passages) == (2, 1 + len(AGAIN))
    assert after.encoder == before.default.encoder
    assert api.release.default == before.default
    assert api.release.fingerprint != before.fingerprint
    assert api.release.command == before.command  # which still ends it


def test_the_versions_that_a_config_file_names_are_kept(api: Api) -> None:
    api.release = api.release.model_copy(update={"command": ""})
    api.changed = {"index": 11}
    api.look()
    assert api.compacted[0].keep_versions is None


def test_a_failure_is_logged_and_keeps_neither_the_api_nor_the_others_from_going_on(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, api.changed = api.release, {"index": 11, "news": 30.0}
    api.fault = InputError("recall_floor=0.95: too high")
    api.look()
    assert "the collection news is not compacted (recall_floor=0.95: too high)" in caplog.text
    assert api.release == before
    api.fault = None
    api.look()
    assert [Path(asked.index).parent.parent.name for asked in api.compacted] == ["compaction-news", "compaction-index"]
    monkeypatch.setattr(compaction, "RETRY_S", 0.0)
    api.fault, api.changed = InputError("again"), {"news": 30.0}
    api.look()
    assert len(api.compacted) == 2  # it waits for the time of its next attempt


def test_the_release_of_another_command_and_a_newer_latest_version_are_left_alone(
    api: Api, places: dict[str, tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    other = api.release.model_copy(update={"api": "other"})

    async def compact(settings: CompactSettings) -> str:
        api.release = other
        return str(places["index"][1])

    automatic = AutoCompaction(10, api.served, api.counts, compact, api.switch)
    api.changed = {"index": 11}
    asyncio.run(automatic.look())
    assert api.release == other
    assert "another release is served meanwhile" in caplog.text
    latest = places["index"][0].parent / "latest"
    name = latest.read_text()
    latest.write_text(places["index"][1].name)
    (latest.parent / places["index"][1].name).symlink_to(places["index"][1])
    try:
        api.look()
    finally:
        latest.write_text(name)
        (latest.parent / places["index"][1].name).unlink()
    assert api.compacted == []
    assert "is the latest; run `infembed serve`" in caplog.text


def test_null_turns_it_off(api: Api) -> None:
    off = Api(api.release, {}, compact_at=None)
    off.changed = {"index": 1e9}
    off.look()
    assert off.compacted == []
