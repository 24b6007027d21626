"""The supervisor's verdict on a new release, and what an ingress replica makes of it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infembed_ray.config.retrieval import CompactSettings
from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.serving import supervisor
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.release import ApiArguments, Probe, ProbeSet, ReleaseSpec
from infembed_ray.serving.replicas import Ingress
from infembed_ray.serving.service import ReplicaLost
from infembed_ray.serving.supervisor import Supervisor
from tests.serving.indexes import AGAIN, PASSAGES, publish_index
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


async def test_all_who_ask_get_one_verdict_and_a_worse_release_is_taken_back(
    releases: tuple[ReleaseSpec, ReleaseSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, compared, switched = supervised(monkeypatch, "worse")
    assert await asyncio.gather(*(made.verdict(*releases) for _ in range(3))) == ["worse"] * 3
    assert compared == [releases]
    assert switched == [releases[0]]
    assert await made.verdict(*releases) == "worse"  # asked again, it is probed again
    assert len(compared) == 2


async def test_a_good_release_and_one_without_probes_may_replace_the_current_one(
    releases: tuple[ReleaseSpec, ReleaseSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, compared, switched = supervised(monkeypatch, None)
    assert await made.verdict(*releases) is None
    assert await made.verdict(releases[1], releases[0]) is None
    assert (len(compared), switched) == (1, [])


@pytest.mark.parametrize("fault", [None, "worse"])
async def test_an_ingress_replica_switches_only_to_a_release_that_passes(
    fault: str | None, releases: tuple[ReleaseSpec, ReleaseSpec], caplog: pytest.LogCaptureFixture
) -> None:
    replica: Any = Ingress.__mro__[1]  # without Serve's wrapper
    ingress = replica(ARGUMENTS, None)
    current, new = releases
    answers = [ReplicaLost(), fault]  # it waits for a supervisor that starts again

    async def verdict(method: str, *pair: ReleaseSpec) -> str | None:
        assert (method, pair) == ("verdict", releases)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    ingress._supervisor = verdict
    await ingress._switch_to(current, {})
    assert (ingress._served, len(answers)) == ((current, {}), 2)  # the first release has nothing to compare with
    await ingress._switch_to(new, {})
    assert ingress._served == (current if fault else new, {})
    assert ("the new release is not served: worse" in caplog.text) == (fault is not None)


# ----------------------------------------------------------------------------------------------------- compaction


class Api:
    """What the supervisor sees of an API: the release that it serves, and how many documents changed."""

    def __init__(self, release: ReleaseSpec, next_versions: dict[str, Path], compact_at: int | None = 10) -> None:
        self.release = release
        self.changed: dict[str, float] = {}
        self.compacted: list[CompactSettings] = []
        self.fault: Exception | None = None
        self._next = next_versions
        arguments = ApiArguments(locked=False, settings=ServeSettings(index="", compact_at=compact_at))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervisor, "RemoteDeployment", SimpleNamespace(named=lambda *names: self.ingress))
            self.supervisor = Supervisor(arguments)

    async def ingress(self, method: str) -> Any:
        return self.changed if method == "changed_documents" else (None, self.release)

    async def remote(self, settings: CompactSettings) -> str:
        """Compact an index, in place of the task."""
        self.compacted.append(settings)
        if self.fault is not None:
            raise self.fault
        return str(self._next[Path(settings.index).parent.parent.name])

    def roll_out(self, arguments: ApiArguments, new: ReleaseSpec, current: Any) -> None:
        assert current == (arguments, self.release)
        self.release = new
        self.changed = {}

    def look(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervisor, "compact_index", self)
            patch.setattr(supervisor, "roll_out", self.roll_out)
            asyncio.run(self.supervisor.compact_if_due())


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


@pytest.mark.integration
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
    monkeypatch.setattr(supervisor, "COMPACTION_RETRY_S", 0.0)
    api.fault, api.changed = InputError("again"), {"news": 30.0}
    api.look()
    assert len(api.compacted) == 2  # it waits for the time of its next attempt


def test_the_release_of_another_command_and_a_newer_latest_version_are_left_alone(
    api: Api, places: dict[str, tuple[Path, Path]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = api.release.model_copy(update={"api": "other"})

    async def remote(settings: CompactSettings) -> str:
        api.release = other
        return str(places["index"][1])

    monkeypatch.setattr(api, "remote", remote)
    api.changed = {"index": 11}
    api.look()
    assert api.release == other
    assert "another release is served meanwhile" in caplog.text
    latest = places["index"][0].parent / "latest"
    name = latest.read_text()
    latest.write_text(places["index"][1].name)
    (latest.parent / places["index"][1].name).symlink_to(places["index"][1])
    api.supervisor._not_before.clear()
    try:
        api.look()
    finally:
        latest.write_text(name)
        (latest.parent / places["index"][1].name).unlink()
    assert api.compacted == []
    assert "is the latest version" in caplog.text
