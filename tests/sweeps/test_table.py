"""Table of a sweep against figures computed by hand."""

import statistics

from infembed_ray.sweeps.distributed import TrialFigures, as_markdown, measures_of

MEASURES = ("p-MRR x100", "nDCG@10 (I+,Q+)", "nDCG@10 (I-,Q+)", "nDCG@10 (I+,Q-)", "MAP@1000")


def outcome(row, model, seed, value, failure=None):
    return TrialFigures(row, model, seed, {} if failure else dict.fromkeys(MEASURES, value), failure)


OUTCOMES = [
    outcome("base", "A", None, 0.5),
    outcome("base", "B", None, 0.25),
    *(outcome("uni{P}", "A", seed, 0.1 * seed) for seed in (1, 2, 3)),
    outcome("uni{P}", "B", 1, 0.7),
    outcome("uni{P}", "B", 2, 0.0, "OSError: disk full"),
    outcome("multi{P,I}", "A", 1, 0.0, "OSError: disk full"),
]


def test_cells_show_mean_deviation_and_failures():
    text = as_markdown(OUTCOMES)
    spread = statistics.stdev([0.1, 0.2, 0.3])
    assert f"0.200 ± {spread:.3f}" in text
    assert "0.700 (1 of 2 failed)" in text
    assert "| multi{P,I} | failed |" in text
    assert "- uni{P}, B, seed 2: OSError: disk full" in text
    overview = text.split("\n\n")[0].splitlines()
    assert overview[2] == "| base | 0.500 | 0.5 | 0.250 | 0.2 |"
    assert "over seeds 1, 2, 3" in text


def test_measures_come_from_evaluation_figures():
    figures = dict(zip(["p-MRR", *MEASURES[1:]], [0.25, 0.1, 0.2, 0.3, 0.4], strict=True))
    assert measures_of({"records": figures}) == dict(zip(MEASURES, [25.0, 0.1, 0.2, 0.3, 0.4], strict=True))
    assert MEASURES[0] not in measures_of({"records": figures | {"p-MRR": None}})


def test_measures_of_several_tasks_have_task_names():
    figures = {"followir/core17": {"MAP@1000": 0.2, "p-MRR": 0.05}, "followir/news21": {"nDCG@5": 0.3, "p-MRR": None}}
    assert measures_of(figures) == {
        "followir/core17 MAP@1000": 0.2,
        "followir/core17 p-MRR x100": 5.0,
        "followir/news21 nDCG@5": 0.3,
    }
