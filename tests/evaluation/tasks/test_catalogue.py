"""Tasks load by name, your own by path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import catalogue
from tests.evaluation import published


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("mirror")
    for write in (published.followir_like, published.mair_like, published.instructir_like):
        write(root)
    return str(published.bright_like(root, [entry.options["subset"] for entry in catalogue.BENCHMARKS["bright"].tasks]))


def test_every_default_task_loads_with_the_figures_that_tables_average(mirror: str) -> None:
    for benchmark in catalogue.BENCHMARKS.values():
        loaded = {entry.name: catalogue.load(entry.name, mirror) for entry in benchmark.tasks}
        for figures in benchmark.averages.values():
            for task, figure in ((task, figure) for task, figure in figures.items() if task in loaded):
                assert figure in {shown.name for shown in loaded[task].figures}
        assert [task.name for task in loaded.values()] == list(loaded)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folowir", "did you mean followir"),
        ("bright/leetcod", r"did you mean bright/leetcode\?.; for a directory of that name write ./bright/leetcod$"),
        (
            "acme",
            "no such task, and no such directory; valid: bright, followir, instructir, mair, OWNER/NAME of the hub",
        ),
        ("./corpora/acme", "no such task, and no such directory"),
    ],
)
def test_an_unknown_name_is_rejected_with_the_nearest(name: str, message: str) -> None:
    for use in (
        lambda: catalogue.expand([name]),
        lambda: catalogue.load(name, "mirror"),
        lambda: catalogue.files(name),
    ):
        with pytest.raises(InputError, match=f"tasks={name}: .*{message}"):
            use()


def test_a_task_whose_data_are_missing_says_which_command_fetches_them(tmp_path: Path) -> None:
    revision = catalogue.TASKS["bright/pony"].sources[0].revision
    command = f"hf download mteb/BRIGHT --repo-type dataset --revision {revision} --include README.md --include '*pony*' --local-dir "
    with pytest.raises(InputError, match=re.escape(f"{command}DIR/mteb/BRIGHT`, copy DIR, and set data=DIR")):
        catalogue.load("bright/pony")
    with pytest.raises(InputError, match=re.escape(f"{command}{tmp_path}/mteb/BRIGHT`")):
        catalogue.load("bright/pony", str(tmp_path))


def test_the_files_of_a_task_are_all_that_it_reads(mirror: str, tmp_path: Path) -> None:
    biology = {file.relative_to(mirror).as_posix() for file in catalogue.files("bright/biology", mirror)}
    own = published.beir_like(tmp_path / "own")

    assert biology == {
        "mteb/BRIGHT/README.md",
        "mteb/BRIGHT/documents/biology-00000-of-00001.parquet",
        "mteb/BRIGHT/examples/biology-00000-of-00001.parquet",
    }
    assert len(catalogue.files("followir/core17", mirror)) == 7
    assert catalogue.files(str(own)) == [own / "corpus.jsonl", own / "queries.jsonl", own / "qrels" / "test.tsv"]


def test_a_task_names_its_repositories(mirror: str) -> None:
    assert catalogue.load("mair/dd-15", mirror).about == {
        "repositories": {published.MAIR_QUERIES: None, published.MAIR_DOCS: None}
    }
