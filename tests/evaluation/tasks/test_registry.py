"""Published tasks by name."""

from __future__ import annotations

import pytest

from infembed_ray.evaluation.tasks import registry
from tests.evaluation import published


def test_the_benchmarks_have_the_tasks_that_they_were_published_with() -> None:
    sizes = {name: (len(of.tasks), len(of.others)) for name, of in registry.BENCHMARKS.items()}

    assert sizes == {"followir": (3, 0), "mair": (5, 121), "bright": (12, 0), "instructir": (1, 0)}
    assert len(registry.TASKS) == 142


@pytest.mark.parametrize(
    ("names", "expanded"),
    [
        (["followir"], ["followir/robust04", "followir/news21", "followir/core17"]),
        (["mair"], [f"mair/{task}" for task in published.MAIR]),
        (["mair/CAsT_*"], [f"mair/CAsT_{year}" for year in (2019, 2020, 2021, 2022)]),
        (
            ["instructir", "followir/core17", "followir"],
            ["instructir", "followir/core17", "followir/robust04", "followir/news21"],
        ),
    ],
)
def test_names_are_expanded_without_repetition(names: list[str], expanded: list[str]) -> None:
    assert registry.expand(names) == expanded
