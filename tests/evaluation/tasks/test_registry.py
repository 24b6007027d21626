"""Published tasks by name."""

from __future__ import annotations

import pytest

from infembed_ray.evaluation.tasks import catalogue
from tests.evaluation import published


def test_the_benchmarks_have_the_tasks_that_they_were_published_with() -> None:
    sizes = {name: (len(of.tasks), len(of.others)) for name, of in catalogue.BENCHMARKS.items() if "@" not in name}

    assert sizes == {"followir": (3, 0), "mair": (5, 121), "bright": (12, 0), "instructir": (1, 0)}
    assert len([name for name in catalogue.TASKS if "@" not in name]) == 142


def test_mair_has_an_average_of_each_of_its_six_domains() -> None:
    averages = catalogue.BENCHMARKS["mair"].averages
    sizes = {column.removesuffix(" nDCG@10"): len(tasks) for column, tasks in averages.items()}

    assert sizes == {
        "DD, FR": 5, "Web": 54, "Medical": 19, "Code": 18, "Legal": 11, "Finance": 8, "Academic": 16, "all 126": 126
    }  # fmt: skip
    of_domains = [task for column, tasks in averages.items() if column[:2] not in ("DD", "al") for task in tasks]
    assert sorted(of_domains) == sorted(averages["all 126 nDCG@10"]) == sorted(catalogue.expand(["mair/*"]))
    assert "mair/dd-15" in averages["Web nDCG@10"]


@pytest.mark.parametrize(
    ("names", "expanded"),
    [
        (["followir"], ["followir/robust04", "followir/news21", "followir/core17"]),
        (["mair"], [f"mair/{task}" for task in published.MAIR]),
        (["mair/CAsT_*"], [f"mair/CAsT_{year}" for year in (2019, 2020, 2021, 2022)]),
        (["mair/CAsT_202*@paper"], [f"mair/CAsT_{year}@paper" for year in (2020, 2021, 2022)]),
        (["followir@mteb1"], [f"followir/{task}@mteb1" for task in ("robust04", "news21", "core17")]),
        (
            ["instructir", "followir/core17", "followir"],
            ["instructir", "followir/core17", "followir/robust04", "followir/news21"],
        ),
    ],
)
def test_names_are_expanded_without_repetition(names: list[str], expanded: list[str]) -> None:
    assert catalogue.expand(names) == expanded
