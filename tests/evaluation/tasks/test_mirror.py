"""Mirrors are fetched from a hub over HTTP and detect files that have changed."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import huggingface_hub.constants
import pytest

from infembed_ray.cli.main import main
from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import catalogue, mirror, own, registry
from infembed_ray.storage.object_store import SCRATCH
from tests.evaluation import published
from tests.support.hub import COMMIT, Hub, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

CORE17 = published.FOLLOWIR["core17"]
SCIFACT = "mteb/scifact"


@pytest.fixture(scope="module")
def hub_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    for write in (published.followir_like, published.mair_like, published.bright_like):
        write(root)
    published.beir_like(root / SCIFACT)
    files = [("corpus", "corpus", "corpus.jsonl"), ("queries", "queries", "queries.jsonl")]
    files += [("default", split, f"qrels/{split}.tsv") for split in ("dev", "test")]
    published.write_card(root / SCIFACT, files)
    return root


@pytest.fixture
def hub(hub_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(hub_root) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # it was read when it was imported
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_a_fetched_task_loads_from_the_mirror_and_records_its_commit(hub: Hub, tmp_path: Path) -> None:
    mirror.fetch(tmp_path, ["followir/core17"])

    task = catalogue.load("followir/core17", str(tmp_path))

    assert task.about["repositories"] == {CORE17: registry.TASKS["followir/core17"].sources[0].revision}
    assert len(task.corpus) == len(published.DOCUMENTS)
    assert mirror.verify(tmp_path, ["followir/core17"]) == []


def test_without_a_mirror_a_task_is_fetched_once(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    task = catalogue.load("bright/biology")
    assert len(hub.downloads) == 3
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

    assert catalogue.load("bright/biology").queries == task.queries
    with pytest.raises(InputError, match=r"tasks=bright/leetcode: data is not set.*infembed data fetch <directory>"):
        catalogue.load("bright/leetcode")


def test_a_data_set_of_the_hub_is_a_task_by_its_name(hub: Hub, tmp_path: Path) -> None:
    task, dev = catalogue.load(SCIFACT), catalogue.load(f"{SCIFACT}/dev")

    assert len(hub.downloads) == len(set(hub.downloads)) == 5
    assert [query.id for query in task.queries] == ["q0", "q1", "q2", "q3"]
    assert [query.id for query in dev.queries] == ["q4", "q5"]
    assert [figure.name for figure in task.figures] == list(own.MEASURES)
    assert task.about["repositories"] == {SCIFACT: COMMIT}
    mirror.fetch(tmp_path / "mirror", [SCIFACT])
    assert catalogue.load(SCIFACT, str(tmp_path / "mirror")).qrels == task.qrels
    assert mirror.verify(tmp_path / "mirror", [SCIFACT]) == []


def test_a_followir_like_repository_of_the_hub_gets_p_mrr(hub: Hub) -> None:
    task, known = catalogue.load(CORE17), catalogue.load("followir/core17")

    assert task.figures[0].name == "p-MRR"
    assert (task.changes, task.queries, task.candidates) == (known.changes, known.queries, known.candidates)


def test_a_name_that_is_neither_here_nor_on_the_hub_is_rejected(hub: Hub) -> None:
    with pytest.raises(InputError, match=r"tasks=corpora/acme: no such directory, .*RepositoryNotFoundError"):
        catalogue.load("corpora/acme")


def test_the_commit_in_the_catalogue_is_requested(hub: Hub, tmp_path: Path) -> None:
    mirror.fetch(tmp_path, ["followir/core17"])

    assert hub.revisions == {registry.TASKS["followir/core17"].sources[0].revision}


def test_a_repository_without_a_pinned_commit_keeps_that_of_the_mirror(hub: Hub, tmp_path: Path) -> None:
    mirror.fetch(tmp_path, ["mair/dd-15"])
    assert hub.revisions == {"main"}

    mirror.fetch(tmp_path, ["mair/dd-16"])

    assert hub.revisions == {"main", COMMIT}


def test_only_the_files_that_a_task_reads_are_fetched(hub: Hub, tmp_path: Path) -> None:
    mirror.fetch(tmp_path, ["bright/biology", "mair/dd-15"])

    assert sorted(hub.downloads) == [
        "MAIR-Bench/MAIR-Docs/DD_2015/docs.jsonl",
        "MAIR-Bench/MAIR-Docs/README.md",
        "MAIR-Bench/MAIR-Queries/DD_2015/queries.jsonl",
        "MAIR-Bench/MAIR-Queries/README.md",
        "mteb/BRIGHT/README.md",
        "mteb/BRIGHT/documents/biology-00000-of-00001.parquet",
        "mteb/BRIGHT/examples/biology-00000-of-00001.parquet",
    ]


def test_present_files_are_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    mirror.fetch(tmp_path, ["bright/biology"])
    hub.downloads.clear()

    mirror.fetch(tmp_path, ["bright/biology", "bright/leetcode"])

    assert sorted(hub.downloads) == [
        "mteb/BRIGHT/documents/leetcode-00000-of-00001.parquet",
        "mteb/BRIGHT/examples/leetcode-00000-of-00001.parquet",
    ]
    assert mirror.verify(tmp_path, ["bright/biology", "bright/leetcode"]) == []


def test_an_interrupted_fetch_continues_and_is_known_as_incomplete(hub: Hub, tmp_path: Path) -> None:
    hub.refused = "qrel_diff-00000-of-00001.parquet"
    with pytest.raises(InputError, match="the same command continues"):
        mirror.fetch(tmp_path, ["followir/core17"])
    with pytest.raises(InputError, match=r"qrel_diff-00000-of-00001.parquet is missing; .*infembed data fetch"):
        catalogue.load("followir/core17", str(tmp_path))
    before, hub.refused = list(hub.downloads), None

    mirror.fetch(tmp_path, ["followir/core17"])

    again = set(hub.downloads[len(before) :]) & set(before)
    assert before
    assert not again
    assert mirror.verify(tmp_path, ["followir/core17"]) == []


def test_a_download_with_another_sha256_than_the_hub_lists_is_rejected(hub: Hub, tmp_path: Path) -> None:
    hub.swapped = "corpus-00000-of-00001.parquet"

    with pytest.raises(
        InputError, match=r"corpus-00000-of-00001.parquet was downloaded, but is damaged: its SHA-256 is not"
    ):
        mirror.fetch(tmp_path, ["followir/core17"])

    assert not (tmp_path / CORE17 / "corpus" / "corpus-00000-of-00001.parquet").exists()


@pytest.mark.parametrize("file", ["corpus/corpus-00000-of-00001.parquet", "README.md"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_verify_names_a_damaged_file_and_fetch_replaces_it(hub: Hub, tmp_path: Path, file: str, damage: str) -> None:
    mirror.fetch(tmp_path, ["followir/core17"])
    path = tmp_path / CORE17 / file
    whole = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] + (bytes([whole[-1] ^ 1]) if damage == "flipped" else b""))

    faults = mirror.verify(tmp_path)

    what = {
        "flipped": "its SHA-256 is not",
        "truncated": f"{len(whole) - 1} bytes, not {len(whole)}",
        "deleted": "missing",
    }
    assert len(faults) == 1
    assert faults[0].startswith(f"{CORE17}/{file}: ")
    assert what[damage] in faults[0]
    mirror.fetch(tmp_path, ["followir/core17"])
    assert path.read_bytes() == whole
    assert mirror.verify(tmp_path) == []


def test_verify_names_a_task_that_was_never_fetched(hub: Hub, tmp_path: Path) -> None:
    mirror.fetch(tmp_path, ["bright/biology"])

    faults = mirror.verify(tmp_path, ["bright/biology", "bright/leetcode"])

    assert faults == [
        f"tasks=bright/leetcode: no file of documents/leetcode in {tmp_path / published.BRIGHT}; fetch it on a "
        f"machine with internet: infembed data fetch {tmp_path} bright/leetcode"
    ]


def test_verify_names_a_repository_at_another_commit_than_the_catalogue(hub: Hub, tmp_path: Path) -> None:
    mirror.fetch(tmp_path, ["followir/core17"])
    pinned = registry.TASKS["followir/core17"].sources[0].revision
    manifest = tmp_path / "mirror.json"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace(str(pinned), COMMIT), encoding="utf-8")

    assert mirror.verify(tmp_path, ["followir"])[-1:] == [f"{CORE17}: has commit {COMMIT}, not {pinned}"]


@pytest.mark.parametrize(
    ("manifest", "message"),
    [('{"format": 2}', "has format 2, not 1"), ("{", "is damaged"), ('{"format": 1}', "is damaged")],
)
def test_an_unreadable_manifest_is_rejected(tmp_path: Path, manifest: str, message: str) -> None:
    (tmp_path / "mirror.json").write_text(manifest, encoding="utf-8")

    with pytest.raises(InputError, match=message):
        mirror.verify(tmp_path)


def test_a_repository_missing_from_the_hub_is_named(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"mteb/InstructIR-mteb cannot be downloaded \(RepositoryNotFoundError.*HF_ENDPOINT"
    ):
        mirror.fetch(tmp_path, ["instructir"])


def test_an_unreachable_hub_is_reported_in_one_line(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

    with pytest.raises(InputError, match="cannot be downloaded") as error:
        mirror.fetch(tmp_path, ["followir/core17"])

    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([], "tasks is empty"),
        (["followir/robust05"], "did you mean followir/robust04"),
        (["."], "is not on the hub; only data sets of the hub are fetched"),
    ],
)
def test_invalid_tasks_are_rejected_before_the_hub_is_asked(
    hub: Hub, tmp_path: Path, tasks: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        mirror.fetch(tmp_path, tasks)

    assert not hub.revisions


def test_a_directory_without_a_manifest_cannot_be_verified(tmp_path: Path) -> None:
    published.instructir_like(tmp_path)

    with pytest.raises(InputError, match=r"no mirror.json"):
        mirror.verify(tmp_path)


def test_a_second_fetch_to_a_mirror_waits_for_the_first(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / ".mirror.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        fetching = Thread(target=mirror.fetch, args=(tmp_path, ["bright/biology"]))
        fetching.start()
        printed: list[str] = []
        wait_until(lambda: printed.append(capsys.readouterr().out) or "another process" in "".join(printed))
        assert not hub.downloads
    fetching.join()

    assert mirror.verify(tmp_path, ["bright/biology"]) == []


def test_the_commands_fetch_and_verify(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    fetch = [sys.executable, "-m", "infembed_ray.cli", "data", "fetch", str(tmp_path), "bright/biology"]
    assert subprocess.run(fetch, env=environment, check=False).returncode == 0
    assert main(["data", "verify", str(tmp_path), "bright/biology"]) == 0
    manifest = json.loads((tmp_path / "mirror.json").read_text(encoding="utf-8"))
    assert manifest["repositories"][published.BRIGHT]["files"].keys() == {
        "README.md",
        "documents/biology-00000-of-00001.parquet",
        "examples/biology-00000-of-00001.parquet",
    }

    (tmp_path / published.BRIGHT / "examples" / "biology-00000-of-00001.parquet").unlink()

    capsys.readouterr()
    assert main(["data", "verify", str(tmp_path)]) == 1
    assert "examples/biology-00000-of-00001.parquet: missing" in capsys.readouterr().out
