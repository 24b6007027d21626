from dataclasses import replace

import pytest

from infembed_ray.evaluation.paper.collection import collect
from infembed_ray.evaluation.paper.figures import figure_5, figure_6
from infembed_ray.evaluation.paper.published import TABLES
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
    assert (followir.benchmark, followir.paper, records.benchmark, records.paper) == (
        "FollowIR",
        True,
        "records",
        False,
    )
    groups = followir.groups
    assert list(groups) == [*dict.fromkeys(row.section for row in TABLES["5"].rows), "Ours"]
    at = TABLES["5"].columns.index("FollowIR p-MRR")
    known = {row.name: row.numbers[at].value for row in TABLES["5"].rows if row.numbers[at].value is not None}
    shown = {m.label: m.p_mrr.value for models in groups.values() for m in models if not m.ours}
    assert shown == known
    for models in groups.values():
        values = [model.p_mrr.value for model in models]
        assert values == sorted(values, reverse=True)
    assert {m.label for m in groups["Base size: < 1B parameters"] if m.ours} == {"e5-base-v2", "trained"}
    large = {m.label for m in groups["Large size: 1-5B parameters"] if m.ours}
    assert large == {"Qwen2.5-1.5B, base", "Qwen2.5-1.5B, uni{P}"}  # by their backbone
    assert [m.label for m in groups["Ours"]] == ["new"]


def test_both_axes_of_figure_5_hold_zero_and_all_intervals(collection):
    for chart in figure_5(collection, NAMED):
        models = [model for models in chart.groups.values() for model in models]
        for scale, estimates in zip(chart.scales, ([m.p_mrr for m in models], [m.score for m in models]), strict=True):
            assert scale.low == min(0, *(e.low for e in estimates))
            assert scale.high == max(0, *(e.high for e in estimates))


def test_figure_6_has_two_bars_for_every_backbone(collection):
    panels = figure_6(collection, ["raw"])
    assert [panel.title for panel in panels] == ["uni{P}, records", "uni{I}, records"]
    means = collection.results.figures
    for panel, row in zip(panels, ("uni{P}", "uni{I}"), strict=True):
        assert list(panel.groups) == BACKBONES
        for backbone, both in panel.groups.items():
            for estimate, suffix in zip(both, ("", " (raw)"), strict=True):
                mean = means[f"{backbone}, {row}{suffix}"]["records"]["p-MRR"]
                assert estimate.value == pytest.approx(100 * mean)
                assert panel.scale.low <= estimate.low <= estimate.value <= estimate.high <= panel.scale.high


def test_trainings_with_other_settings_are_not_compared_in_figure_6():
    filtered = made.sweep(made.records(), BACKBONES, rows(0.3), [1])
    raw = made.sweep(made.records(), BACKBONES, rows(0.1, epochs=3), [1], salt="raw")
    (panel,) = figure_6(collect({"filtered": filtered, "raw": raw}), ["raw"])
    assert panel.title == "uni{I}, records"


def test_without_unfiltered_trainings_there_is_no_figure_6(collection):
    assert figure_6(collection, []) == []


def test_a_figure_over_nothing_is_not_drawn():
    found = made.evaluation(made.records(), {"only": ("runs/x", 0)})
    nothing = {"only": {"records": found.scores["only"]["records"] | {"p-MRR": {}}}}
    assert figure_5(collect({"a": replace(found, scores=nothing)}), {}) == []
