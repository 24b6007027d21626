"""The dataset card finds files, as in `datasets.load_dataset`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.evaluation.tasks.repository import Repository, configs, matching
from tests.evaluation import published
from tests.support.hub import serving


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mirror")
    published.followir_like(root)
    published.mair_like(root)
    return published.bright_like(root)


@pytest.mark.parametrize(
    "name", [published.FOLLOWIR["core17"], published.MAIR_QUERIES, published.MAIR_DOCS, published.BRIGHT]
)
def test_rows_equal_those_of_load_dataset(
    root: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    repository = Repository(root / name, "task", name)
    read = 0
    for config in repository.configs:
        for split in repository.configs[config]:
            theirs = datasets.load_dataset(str(root / name), config, split=split, cache_dir=str(tmp_path))
            assert list(repository.rows(config, split, ())) == theirs.to_list()
            read += len(theirs)
    assert read > 0


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("data/test-*", ["data/test-00000-of-00002.parquet", "data/test-00001-of-00002.parquet"]),
        ("data/test-00000*.parquet", ["data/test-00000-of-00002.parquet"]),
        ("*.jsonl", ["corpus.jsonl"]),
        ("**/*.jsonl", ["corpus.jsonl", "data/old/test-x.jsonl"]),
        ("./corpus.jsonl", ["corpus.jsonl"]),
        ("data/**", ["data/old/test-x.jsonl", "data/test-00000-of-00002.parquet", "data/test-00001-of-00002.parquet"]),
        ("train/*", []),
    ],
)
def test_one_star_stays_within_a_folder_and_two_cross_folders(pattern: str, matches: list[str]) -> None:
    names = ["corpus.jsonl", "data/test-00001-of-00002.parquet", "data/test-00000-of-00002.parquet"]

    assert matching([pattern], [*names, "data/old/test-x.jsonl"]) == matches


@pytest.mark.parametrize(
    ("data_files", "splits"),
    [
        ("data/*.jsonl", {"train": ["data/*.jsonl"]}),
        (["a.jsonl", "b.jsonl"], {"train": ["a.jsonl", "b.jsonl"]}),
        ([{"split": "test", "path": ["a.jsonl", "b.jsonl"]}], {"test": ["a.jsonl", "b.jsonl"]}),
        ([{"split": "x", "path": "x-*"}, {"split": "y", "path": "y-*"}], {"x": ["x-*"], "y": ["y-*"]}),
    ],
)
def test_all_forms_of_the_hubs_cards_are_read(data_files: object, splits: dict[str, list[str]]) -> None:
    card = f"---\nconfigs: {json.dumps([{'config_name': 'c', 'data_files': data_files}])}\n---\n# Title\n"

    assert configs(card, "card") == {"c": splits}


@pytest.mark.parametrize(
    "card", ["# No front matter\n", "---\nlicense: mit\n---\n", "---\nconfigs: [1]\n---\n", "---\n{\n---\n"]
)
def test_a_card_without_configurations_is_rejected(card: str) -> None:
    with pytest.raises(InputError, match=r"README\.md lists no `configs`"):
        configs(card, "README.md")


@pytest.mark.integration
def test_without_data_a_task_is_downloaded_to_the_cache_of_the_hubs_client(root: Path, tmp_path: Path) -> None:
    code = (
        "from infembed_ray.evaluation.tasks import catalogue; task = catalogue.load('bright/leetcode'); "
        "print(task.about['repositories'], len(task.queries))"
    )
    with serving(root) as hub:
        environment = {
            **os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"),
            "INFEMBED_SCRATCH": str(tmp_path / "scratch"),
        }  # fmt: skip
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
            )
        once = len(hub.downloads)

    revision = catalogue.TASKS["bright/leetcode"].revision
    assert done.stdout == f"{{'mteb/BRIGHT': '{revision}'}} 6\n"
    assert once == 3


def test_a_corpus_with_a_missing_part_is_not_read(root: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(root / published.BRIGHT, tmp_path / "BRIGHT")
    (copy / "documents" / "biology-00000-of-00001.parquet").rename(
        copy / "documents" / "biology-00001-of-00003.parquet"
    )

    with pytest.raises(InputError, match=r"has 1 of the 3 files of documents/biology; run `hf download x/y"):
        Repository(copy, "task", "x/y").files("documents", "biology")
