"""The table of a sweep against figures worked out by hand."""

import csv
import io
import statistics

import pytest

from infembed_ray.sweeps.table import MEASURES, Outcome, as_csv, as_markdown, as_plain, measures_of


def outcome(row, model, seed, value, failure=None):
    return Outcome(row, model, seed, {} if failure else dict.fromkeys(MEASURES, value), failure)


OUTCOMES = [
    outcome("base", "A", None, 0.5),
    outcome("base", "B", None, 0.25),
    *(outcome("uni{P}", "A", seed, 0.1 * seed) for seed in (1, 2, 3)),
    outcome("uni{P}", "B", 1, 0.7),
    outcome("uni{P}", "B", 2, 0.0, "OSError: disk full"),
    outcome("multi{P,I}", "A", 1, 0.0, "OSError: disk full"),
]


def test_cells_hold_mean_and_spread_over_seeds_and_say_what_failed():
    text = as_markdown(OUTCOMES)
    spread = statistics.stdev([0.1, 0.2, 0.3])
    assert f"0.200 ± {spread:.3f}" in text
    assert "0.700 (1 of 2 failed)" in text
    assert "| multi{P,I} | failed |" in text
    assert "- uni{P}, B, seed 2: OSError: disk full" in text
    overview = text.split("\n\n")[0].splitlines()
    assert overview[2] == "| base | 0.500 | 0.5 | 0.250 | 0.2 |"
    assert "over seeds 1, 2, 3" in text


def test_csv_has_a_line_a_trial_and_json_a_cell_each():
    rows = list(csv.DictReader(io.StringIO(as_csv(OUTCOMES))))
    assert [row["row"] for row in rows] == [o.row for o in OUTCOMES]
    assert rows[6]["failure"] == "OSError: disk full"
    cells = as_plain(OUTCOMES)
    cell = next(c for c in cells if (c["row"], c["model"]) == ("uni{P}", "A"))
    assert cell["measures"][MEASURES[0]]["values"] == pytest.approx([0.1, 0.2, 0.3])
    assert cell["seeds"] == [1, 2, 3]
    failed = next(c for c in cells if (c["row"], c["model"]) == ("uni{P}", "B"))
    assert failed["failures"] == {"2": "OSError: disk full"}
    assert failed["seeds"] == [1]


def test_figures_of_an_evaluation_become_measures():
    figures = {"p_mrr": 0.25, "ndcg_at_10": {"a": 0.1, "b": 0.2, "c": 0.3}, "map_at_1000": 0.4}
    assert measures_of(figures) == dict(zip(MEASURES, [25.0, 0.1, 0.2, 0.3, 0.4], strict=True))
    assert MEASURES[0] not in measures_of(figures | {"p_mrr": None})
