"""The supervisor's steps, one at a time; `test_deployed` runs it in Serve."""

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from infembed_ray.config.retrieval import CompactSettings
from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError, StartError
from infembed_ray.serving import supervisor
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.release import ApiArguments, Probe, ReleaseSpec
from infembed_ray.serving.replicas import Ingress
from infembed_ray.serving.service import ReplicaLost
from infembed_ray.serving.supervisor import Supervisor
from tests.serving.indexes import AGAIN, PASSAGES, publish_index
from tests.serving.routing.test_blue_green import World

PROBES = [Probe(query="q", relevant=["p1"])]
ARGUMENTS = ApiArguments(locked=False, settings=ServeSettings(index=""))


@pytest.fixture
def releases(tmp_path: Path) -> tuple[ReleaseSpec, ReleaseSpec]:
    spec = World(tmp_path).spec
    settings = ServeSettings(index="milvus+http://127.0.0.1:1/a")  # which names no directory
    current = ReleaseSpec(settings=settings, api="a", collections={"index": spec})
    return current, current.model_copy(update={"api": "b", "probes": PROBES})


class Api:
    """What the supervisor sees of Serve and of the ingress, and what it does to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, served: ReleaseSpec, compact_at: int | None = 10) -> None:
        self.served = self.wanted = served
        self.changed: dict[str, float] = {}
        self.applications = dict.fromkeys(served.parts, "RUNNING")
        self.started: list[ReleaseSpec] = []
        self.fault: Exception | None = None
        self.arguments = ApiArguments(locked=False, settings=ServeSettings(index="", compact_at=compact_at))
        monkeypatch.setattr(supervisor, "RemoteDeployment", SimpleNamespace(named=lambda *names: self.ingress))
        monkeypatch.setattr(supervisor, "_start", self.start)
        monkeypatch.setattr(supervisor, "switch_to", self.switch_to)
        monkeypatch.setattr(supervisor, "switch", lambda arguments, new, current: self.switch_to(arguments, new))
        monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=self.applications))
        monkeypatch.setattr(supervisor.ray_compat, "delete_application", self.applications.pop)
        monkeypatch.setattr(supervisor, "require_room", lambda new, current: None)
        monkeypatch.setattr(supervisor, "named_release", Task(supervisor.named_release))
        self.supervisor = Supervisor(self.arguments)

    async def ingress(self, method: str) -> Any:
        return self.changed if method == "changed_documents" else (self.served, self.wanted)

    def start(self, current: ReleaseSpec | None, new: ReleaseSpec) -> None:
        self.started.append(new)
        if self.fault:
            raise self.fault
        self.applications |= dict.fromkeys(new.parts, "RUNNING")

    def switch_to(self, arguments: ApiArguments, new: ReleaseSpec) -> None:
        self.served = self.wanted = new
        self.changed = {}

    def look(self) -> None:
        asyncio.run(self.supervisor.look())


class Task:
    """Calls the function of a remote task in this process."""

    def __init__(self, task: Any) -> None:
        self.function = task._function

    async def remote(self, *arguments: Any) -> Any:
        return self.function(*arguments)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compare no rankings; give the fingerprints of the releases whose rankings would be, of which those of `api` w are worse."""
    made: list[str] = []

    async def compare(self: Supervisor, current: ReleaseSpec, new: ReleaseSpec) -> None:
        made.append(new.fingerprint)
        await asyncio.sleep(0.01)
        if new.api == "worse":
            raise StartError("worse")

    monkeypatch.setattr(Supervisor, "_compare", compare)
    return made


async def test_all_who_ask_get_one_verdict_and_a_worse_release_is_taken_back(
    releases: tuple[ReleaseSpec, ReleaseSpec], monkeypatch: pytest.MonkeyPatch, compared: list[str]
) -> None:
    current, new = releases[0], releases[1].model_copy(update={"api": "worse"})
    api = Api(monkeypatch, current)
    api.wanted = new  # as a config file asks
    asked = (api.supervisor.admit(current, new) for _ in range(3))
    faults = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(fault) for fault in faults] == ["worse"] * 3
    assert (compared, api.wanted) == ([new.fingerprint], current)
    with pytest.raises(StartError, match="worse"):  # asked again, it is probed again
        await api.supervisor.admit(current, new)
    assert len(compared) == 2


async def test_a_good_release_is_probed_once_and_one_without_probes_never(
    releases: tuple[ReleaseSpec, ReleaseSpec], monkeypatch: pytest.MonkeyPatch, compared: list[str]
) -> None:
    current, new = releases
    api = Api(monkeypatch, current)
    for pair in ((current, new), (current, new), (new, current), (None, current)):
        await api.supervisor.admit(*pair)
    assert (compared, api.served) == ([new.fingerprint], current)
    await api.supervisor.admit(None, new)  # a new ingress replica asks while another one serves
    assert len(compared) == 2


@pytest.mark.parametrize("fault", [None, "worse"])
async def test_an_ingress_replica_switches_only_to_a_release_that_is_admitted(
    fault: str | None, releases: tuple[ReleaseSpec, ReleaseSpec], caplog: pytest.LogCaptureFixture
) -> None:
    replica: Any = Ingress.__mro__[1]  # without Serve's wrapper
    ingress = replica(ARGUMENTS, None)
    current, new = releases
    asked: list[Any] = []
    answers = [ReplicaLost(), StartError(fault) if fault else None]

    async def admit(method: str, *pair: ReleaseSpec | None) -> None:
        asked.append(pair)
        if error := ReplicaLost() if pair[0] is None else answers.pop(0):
            raise error

    ingress._supervisor = admit
    await ingress._switch_to(current, {})
    assert ingress._served == (current, {})  # all parts answer, so it needs no supervisor
    await ingress._switch_to(new, {})  # it waits for a supervisor that starts again
    assert asked[-2:] == [(current, new)] * 2
    assert ingress._served == (current if fault else new, {})
    assert ("the new release is not served: worse" in caplog.text) == (fault is not None)


def test_parts_that_no_release_uses_are_deleted_after_the_last_request(
    releases: tuple[ReleaseSpec, ReleaseSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    current = releases[0]
    api = Api(monkeypatch, current)
    api.applications |= {"infembed-index-old": "RUNNING", "infembed": "RUNNING", "of-others": "RUNNING"}
    before, now = set(api.applications), 0.0
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    api.look()
    now = 29.0
    api.look()
    assert set(api.applications) == before
    now = 30.0
    api.look()
    assert set(api.applications) == before - {"infembed-index-old"}


# --------------------------------------------------------------------------------------------- steps of its own


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, minilm: str) -> tuple[Path, dict[str, list[str]]]:
    """A directory, and the names of the two versions of each collection's index below it."""
    root, made = tmp_path_factory.mktemp("built"), {}
    for name in ("index", "news"):
        texts = ({"a": f"Of {name}.", **PASSAGES}, {"a": f"Of {name}.", **AGAIN})
        made[name] = [publish_index(root / name, minilm, text, shards=n).name for n, text in enumerate(texts, start=1)]
        (root / name / "index" / "latest").write_text(made[name][0])
    return root, made


@pytest.fixture
def places(tmp_path: Path, built: tuple[Path, dict[str, list[str]]]) -> dict[str, tuple[Path, Path]]:
    """Collection -> the first version of its index and the next one, which is the latest only once it is `published`."""
    root = shutil.copytree(built[0], tmp_path / "indexes")
    return {name: (root / name / "index" / one, root / name / "index" / two) for name, (one, two) in built[1].items()}


def published(place: Path, lineage: str | None = None) -> str:
    """Make a version the latest, perhaps as one that has the same log of changes as another; return its address."""
    if lineage:
        manifest = json.loads((place / "manifest.json").read_text())
        manifest["index"]["lineage"] = lineage
        (place / "manifest.json").write_text(json.dumps(manifest))
    (place.parent / "latest").write_text(place.name)
    return str(place)


class Compactions:
    """Compacts in place of the task: publishes the next version, or fails."""

    def __init__(self, places: dict[str, tuple[Path, Path]]) -> None:
        self.next = {str(first): following for first, following in places.values()}
        self.asked: list[CompactSettings] = []
        self.fault: Exception | None = None

    async def remote(self, settings: CompactSettings) -> str:
        self.asked.append(settings)
        if self.fault:
            raise self.fault
        return published(self.next[settings.index])


@pytest.fixture
def compactions(places: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> Compactions:
    made = Compactions(places)
    monkeypatch.setattr(supervisor, "compact_index", made)
    return made


@pytest.fixture(params=["directory", "version"])
def api(request: pytest.FixtureRequest, places: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> Api:
    """An API whose settings name the directories of the versions, or the versions."""
    named = {name: str(first.parent if request.param == "directory" else first) for name, (first, _) in places.items()}
    settings = ServeSettings(index=named["index"], collections={"news": named["news"]})
    return Api(monkeypatch, Plan.resolve(settings).release)


pytestmark = pytest.mark.integration


def test_the_collection_with_the_most_changes_is_compacted_and_the_others_stay_as_they_are(
    api: Api, places: dict[str, tuple[Path, Path]], compactions: Compactions
) -> None:
    before = api.served
    api.changed = {"index": 9.5, "news": 9.0}
    api.look()
    assert (compactions.asked, api.served) == ([], before)
    api.changed = {"index": 11, "news": 30.0}
    api.look()
    (asked,) = compactions.asked
    assert (asked.index, asked.keep_versions) == (str(places["news"][0]), 2)
    after, following = api.served.collections["news"], places["news"][1]
    assert (after.index.index, after.index.version, after.card.index_version) == (str(following), *[following.name] * 2)
    assert (len(after.shards), after.card.passages) == (2, 1 + len(AGAIN))
    assert after.encoder == before.default.encoder
    assert api.served.default.index == before.default.index
    assert api.served.fingerprint != before.fingerprint
    assert api.served.command == before.command  # which still ends it
    api.look()
    assert len(compactions.asked) == 1


def test_the_versions_that_a_config_file_names_are_kept(api: Api, compactions: Compactions) -> None:
    api.served = api.wanted = api.served.model_copy(update={"command": ""})
    api.changed = {"index": 11}
    api.look()
    assert compactions.asked[0].keep_versions is None


def test_a_failure_is_logged_and_keeps_neither_the_api_nor_the_others_from_going_on(
    api: Api, compactions: Compactions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, api.changed = api.served, {"index": 11, "news": 30.0}
    compactions.fault = InputError("recall_floor=0.95: too high")
    api.look()
    assert "the collection news is not compacted (recall_floor=0.95: too high)" in caplog.text
    assert api.served == before
    compactions.fault = None
    api.look()
    assert [Path(asked.index).parent.parent.name for asked in compactions.asked] == ["news", "index"]
    api.changed = {"news": 30.0}
    api.look()
    assert len(compactions.asked) == 2  # it waits for the time of its next attempt


def test_another_latest_version_is_followed_only_where_the_settings_name_its_directory(
    api: Api, places: dict[str, tuple[Path, Path]], compactions: Compactions, caplog: pytest.LogCaptureFixture
) -> None:
    before, follows = api.served, api.served.settings.index == str(places["index"][0].parent)
    published(places["index"][1])
    api.changed = {"index": 11}
    api.look()
    assert compactions.asked == []
    assert api.served.default.index.index == str(places["index"][follows])
    assert api.served.collections["news"] == before.collections["news"] or follows
    assert ("is the latest version, and has other documents" in caplog.text) != follows


def test_a_compaction_that_was_published_but_not_switched_to_is_taken(
    api: Api, places: dict[str, tuple[Path, Path]], compactions: Compactions
) -> None:
    first, following = places["index"]
    published(following, lineage=first.name)
    api.changed = {"index": 11}
    api.look()
    assert compactions.asked == []
    assert api.served.default.index.index == str(following)


def test_a_version_that_is_refused_is_tried_again_when_it_changes(
    api: Api, places: dict[str, tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    if api.served.settings.index == str(places["index"][0]):
        return  # a version is not followed
    before, api.fault = api.served, StartError("no room")
    published(places["index"][1])
    for _ in range(2):
        api.look()
    assert (len(api.started), api.served) == (1, before)
    assert f"{places['index'][1]} is not served (no room); next attempt in 600 s" in caplog.text
    api.fault = None
    published(places["news"][1])
    api.look()
    assert {name: spec.index.index for name, spec in api.served.collections.items()} == {
        name: str(following) for name, (_, following) in places.items()
    }


async def test_a_config_file_that_the_latest_version_has_overtaken_is_not_returned_to(
    api: Api, places: dict[str, tuple[Path, Path]]
) -> None:
    before = api.served
    follows = before.settings.index == str(places["index"][0].parent)
    published(places["index"][1])
    await api.supervisor.look()
    api.wanted = before  # as the file asks again
    if follows:
        with pytest.raises(StartError, match="is not the latest version"):
            await api.supervisor.admit(api.served, before)
        assert api.wanted == api.served
    else:
        await api.supervisor.admit(api.served, before)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("", ""),
        ("Deployment 'e' in application 'a' has 1 replicas that have taken more than 30s to initialize.\nSlow.", ""),
        (
            "Deployment 'e' in application 'a' has 1 replicas that have taken more than 30s to be scheduled. Resources "
            'required for each replica: {"CPU": 1.0}, total resources available: {"CPU": 0.7}. Use `ray status`.',
            'a process, or room, for a replica with {"CPU": 1.0}',
        ),
        (
            "It failed to start 1 times. Error:\nTraceback (most recent call last):\n  File\nOSError: no such shard\n",
            "it failed and starts again: OSError: no such shard",
        ),
    ],
)
def test_a_wait_is_explained_in_a_few_words_of_serves_message(message: str, reason: str) -> None:
    assert supervisor._reason(message) == reason
