from dataclasses import replace

import pytest

from infembed_ray.evaluation.paper.collection import collect
from infembed_ray.evaluation.paper.results_report import figure_5, figure_6
from infembed_ray.evaluation.paper.sheets import TABLES
from tests.evaluation.paper import made

NAMED = {"trained": "InF-Embed (e5-base-v2)"}


BACKBONES = ["MiniLM", "E5"]


def rows(better, epochs=2):
    return {
        "uni{P}": (better, {"objective": "uni{P}", "epochs": epochs}),
        "uni{I}": (better / 2, {"objective": "uni{I}"}),
    }


@pytest.fixture(scope="module")
def collection():
    models = {"e5-base-v2": ("intfloat/e5-base-v2", 0), "trained": ("runs/x", 0.3), "new": ("runs/y", 0.6)}
    return collect(
        {
            "models": made.evaluation(made.benchmarks("followir", "mair"), models),
            "decoder": made.sweep(made.benchmarks("followir"), ["Qwen2.5-1.5B"], {"uni{P}": (0.3, {"epochs": 2})}, [1]),
            "filtered": made.sweep(made.records(), BACKBONES, rows(0.3), [1]),
            "raw": made.sweep(made.records(), BACKBONES, rows(0.1), [1], salt="raw"),
        }
    )


def test_figure_5_of_followir_has_the_papers_models_and_ours_by_size_and_p_mrr(collection):
    followir, records = figure_5(collection, NAMED)
    assert [chart.paper for chart in (followir, records)] == [True, False]
    assert [chart.title for chart in (followir, records)] == [
        "Figure 5: FollowIR, p-MRR and score",
        "records, p-MRR and nDCG@10 (I+,Q+)",
    ]
    groups = followir.groups
    assert list(groups) == [*dict.fromkeys(row.section for row in TABLES["5"].rows), "Ours"]
    at = TABLES["5"].columns.index("FollowIR p-MRR")
    expected = {row.name: row.numbers[at] for row in TABLES["5"].rows if row.numbers[at] is not None}
    every = [bars for group in groups.values() for bars in group]
    assert {bars.label: bars.estimates[0].value for bars in every if not bars.ours} == expected
    for group in groups.values():
        values = [bars.estimates[0].value for bars in group]
        assert values == sorted(values, reverse=True)
    own = {name: {bars.label for bars in group if bars.ours} for name, group in groups.items()}
    assert own["Base size: < 1B parameters"] == {"e5-base-v2", "trained"}
    assert own["Large size: 1-5B parameters"] == {"Qwen2.5-1.5B, base", "Qwen2.5-1.5B, uni{P}"}  # by their backbone
    assert own["Ours"] == {"new"}


def test_both_axes_of_figure_5_hold_zero_and_all_intervals(collection):
    for chart in figure_5(collection, NAMED):
        for column in range(2):
            estimates = [bars.estimates[column] for group in chart.groups.values() for bars in group]
            assert chart.scale(column).low == min(0, *(e.low for e in estimates))
            assert chart.scale(column).high == max(0, *(e.high for e in estimates))


def test_figure_6_compares_each_backbone_with_and_without_the_filter(collection):
    charts = figure_6(collection, ["raw"])
    means = collection.results.figures
    for chart, row in zip(charts, ("uni{P}", "uni{I}"), strict=True):
        assert chart.title == f"Figure 6: {row} with and without the quality filter, records"
        assert list(chart.groups) == BACKBONES
        for backbone, (filtered, raw) in chart.groups.items():
            for bars, suffix in ((filtered, ""), (raw, " (raw)")):
                mean = means[f"{backbone}, {row}{suffix}"]["records"]["p-MRR"]
                assert bars.estimates[0].value == pytest.approx(100 * mean)
    assert figure_6(collection, []) == []


def test_trainings_with_other_settings_are_not_compared_in_figure_6():
    filtered = made.sweep(made.records(), BACKBONES, rows(0.3), [1])
    raw = made.sweep(made.records(), BACKBONES, rows(0.1, epochs=3), [1], salt="raw")
    (chart,) = figure_6(collect({"filtered": filtered, "raw": raw}), ["raw"])
    assert chart.title.startswith("Figure 6: uni{I} with")


def test_a_figure_over_nothing_is_not_drawn():
    alone = made.evaluation(made.records(), {"only": ("runs/x", 0)})
    nothing = {"only": {"records": alone.scores["only"]["records"] | {"p-MRR": {}}}}
    assert figure_5(collect({"a": replace(alone, scores=nothing)}), {}) == []
