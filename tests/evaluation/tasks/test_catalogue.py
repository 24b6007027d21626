"""Tasks load by name, your own by path."""

from __future__ import annotations

from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import catalogue, registry
from tests.evaluation import published


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("mirror")
    for write in (published.followir_like, published.mair_like, published.instructir_like):
        write(root)
    return str(published.bright_like(root, [entry.options["subset"] for entry in registry.BENCHMARKS["bright"].tasks]))


def test_every_default_task_loads_with_the_figures_that_tables_average(mirror: str) -> None:
    for benchmark in registry.BENCHMARKS.values():
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
        lambda: registry.expand([name]),
        lambda: catalogue.load(name, "mirror"),
        lambda: catalogue.files(name),
    ):
        with pytest.raises(InputError, match=f"tasks={name}: .*{message}"):
            use()


def test_a_task_whose_data_are_missing_says_which_command_fetches_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="infembed data fetch <directory> bright/pony"):
        catalogue.load("bright/pony")
    with pytest.raises(InputError, match=f"infembed data fetch {tmp_path} bright/pony$"):
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
