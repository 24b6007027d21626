"""Automatic compaction with a stand-in API; `test_distributed` runs it on a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infembed_ray.config.retrieval import CompactSettings
from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.serving import auto_compaction
from infembed_ray.serving.auto_compaction import AutoCompaction
from infembed_ray.serving.plan import Plan
from infembed_ray.storage.steps import Step


class Api:
    """What the commands of a machine see of an API: which version it serves, and how many documents changed."""

    def __init__(self, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output = output
        self.changed = 0.0
        self.changed_others: dict[str, float] = {}
        self.compacted: list[CompactSettings] = []
        self.fault: Exception | None = None
        first = self.publish("one")
        self.served = first.name
        monkeypatch.setattr(auto_compaction, "served_fingerprint", lambda url: self.served)
        monkeypatch.setattr(Plan, "resolve", lambda settings: plan_of(settings))
        monkeypatch.setattr(auto_compaction, "LOOK_S", 0.0)
        self.automatic = AutoCompaction(
            plan_of(ServeSettings(index=str(first), compact_at=10)),
            lambda: {"index": self.changed, **self.changed_others},
            self.switch,
            self.compact,
        )

    def add_collections(self, *names: str) -> None:
        places = {name: str(self.publish(name, name)) for name in names}
        self.automatic.plan = plan_of(self.automatic.plan.settings.model_copy(update={"collections": places}))

    def publish(self, content: str, collection: str = "index") -> Path:
        output = str(self.output.with_name(collection))
        step = Step("index", ServeSettings(index=""), output, {}, {"content": content})
        with step.publish():
            pass
        return step.path

    def compact(self, settings: CompactSettings) -> str:
        self.compacted.append(settings)
        if self.fault is not None:
            raise self.fault
        return str(self.publish(f"compacted {len(self.compacted)}", Path(settings.index).parent.name))

    def switch(self, plan: Any) -> None:
        self.served = plan.release.fingerprint
        self.changed, self.changed_others = 0, {}

    def look_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not done():
            assert time.monotonic() < deadline
            self.automatic.look()
            time.sleep(0.01)


def plan_of(settings: ServeSettings) -> Any:
    indexes = {name: SimpleNamespace(index=place) for name, place in settings.indexes.items()}
    return SimpleNamespace(
        settings=settings,
        indexes=indexes,
        release=SimpleNamespace(
            fingerprint=Path(settings.index).name, by_name={name: SimpleNamespace(index=name) for name in indexes}
        ),
        url="http://127.0.0.1:1",
    )


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    return Api(tmp_path / "index", monkeypatch)


def test_the_api_switches_to_the_compacted_version_once_enough_documents_have_changed(api: Api) -> None:
    first = api.served
    api.changed = 9.5
    for _ in range(5):
        api.automatic.look()
    assert (api.compacted, api.served) == ([], first)
    api.changed = 10
    api.look_until(lambda: api.served != first)
    (asked,) = api.compacted
    assert (Path(asked.index).name, asked.keep_versions, asked.cpus_per_shard) == (first, 2, 0.1)
    assert api.automatic.plan.release.fingerprint == api.served
    second = api.served
    api.changed = 10
    api.look_until(lambda: api.served != second)
    assert Path(api.compacted[1].index).name == second


def test_a_failure_is_reported_and_tried_again_later(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto_compaction, "RETRY_S", 0.2)
    first, api.changed = api.served, 10
    api.fault = InputError("recall_floor=0.95: too high")
    api.look_until(lambda: len(api.compacted) == 2)
    assert "serve: the compaction failed (recall_floor=0.95: too high); the API goes on" in capsys.readouterr().out
    assert api.served == first
    api.fault = None
    api.look_until(lambda: api.served != first)


def test_a_failed_switch_leaves_the_api_as_it_is(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(plan: Any) -> None:
        raise RuntimeError("no resources")

    first, api.changed = api.served, 10
    monkeypatch.setattr(api.automatic, "_switch", fails)
    api.look_until(lambda: "the API was not switched" in capsys.readouterr().out)
    assert (api.served, api.automatic.plan.release.fingerprint) == (first, first)


def test_another_release_or_a_newer_latest_version_is_left_alone(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.changed = 10
    first, api.served = api.served, "that of another command"
    for _ in range(3):
        api.automatic.look()
    assert api.compacted == []
    api.served = first
    newer = api.publish("another corpus")
    for _ in range(3):
        api.automatic.look()
    assert api.compacted == []
    assert f"{newer.name} is the latest; run `infembed serve`" in capsys.readouterr().out


def test_null_turns_it_off(api: Api) -> None:
    api.changed = 1e9
    api.automatic.plan = plan_of(api.automatic.plan.settings.model_copy(update={"compact_at": None}))
    for _ in range(3):
        api.automatic.look()
    assert api.compacted == []


def test_the_collection_with_the_most_changes_is_compacted_and_the_others_stay_as_they_are(api: Api) -> None:
    api.add_collections("news", "law")
    before = api.automatic.plan.settings.indexes
    api.changed, api.changed_others = 11, {"news": 9.0, "law": 30.0}
    api.look_until(lambda: api.automatic.plan.settings.indexes != before)
    (asked,) = api.compacted
    assert asked.index == before["law"]
    after = api.automatic.plan.settings.indexes
    assert {name for name in before if after[name] != before[name]} == {"law"}
    assert Path(after["law"]).parent == Path(before["law"]).parent
    assert list(after) == ["index", "news", "law"]


def test_a_collection_whose_compaction_fails_does_not_keep_the_others_from_theirs(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    api.add_collections("news")
    api.publish("another corpus", "news")
    api.changed, api.changed_others = 11, {"news": 30.0}
    first = api.served
    api.look_until(lambda: api.served != first)
    assert [Path(asked.index).name for asked in api.compacted] == [first]
    assert "serve: the collection news: the API was not switched" in capsys.readouterr().out
