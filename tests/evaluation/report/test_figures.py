from dataclasses import replace

import pytest

from infembed_ray.evaluation.report.collection import collect
from infembed_ray.evaluation.report.figures import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, figure_5, figure_6
from infembed_ray.evaluation.report.paper import TABLES
from tests.evaluation.report import made

NAMED = {"trained": "InF-Embed (e5-base-v2)"}


def epochs(better):
    return {f"uni{{P}}, epochs={n}": (better * n, {"objective": "uni{P}", "epochs": n}) for n in (1, 2)}


@pytest.fixture(scope="module")
def collection():
    models = {"e5-base-v2": ("intfloat/e5-base-v2", 0), "trained": ("runs/x", 0.3), "new": ("runs/y", 0.6)}
    return collect(
        {
            "models": made.evaluation(made.benchmarks("followir", "mair"), models),
            "decoder": made.sweep(made.benchmarks("followir"), ["Qwen2.5-1.5B"], {"uni{P}": (0.3, {"epochs": 2})}, [1]),
            "filtered": made.sweep(made.records(), ["MiniLM"], epochs(0.3), [1]),
            "raw": made.sweep(made.records(), ["MiniLM"], epochs(0.1), [1], salt="raw"),
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
    groups = dict(followir.groups)
    assert list(groups) == [*dict.fromkeys(row.section for row in TABLES["5"].rows), "Ours"]
    at = TABLES["5"].columns.index("FollowIR p-MRR")
    known = {row.name: row.numbers[at].value for row in TABLES["5"].rows if row.numbers[at].value is not None}
    shown = {m.label: float(m.p_mrr.text) for models in groups.values() for m in models if not m.ours}
    assert shown == known
    for models in groups.values():
        values = [float(model.p_mrr.text) for model in models]
        assert values == sorted(values, reverse=True)
    assert {m.label for m in groups["Base size: < 1B parameters"] if m.ours} == {"e5-base-v2", "trained"}
    large = {m.label for m in groups["Large size: 1-5B parameters"] if m.ours}
    assert large == {"Qwen2.5-1.5B, base", "Qwen2.5-1.5B, uni{P}"}  # by their backbone
    assert [m.label for m in groups["Ours"]] == ["new"]


def test_bars_begin_at_zero_and_are_as_long_as_their_values(collection):
    chart = figure_5(collection, NAMED)[0]
    zero = chart.zeros[0]
    bars = [model.p_mrr for _, models in chart.groups for model in models]
    longest = max(bars, key=lambda bar: float(bar.text))
    per_point = longest.length / float(longest.text)
    for bar in bars:
        assert zero == pytest.approx(bar.start if float(bar.text) >= 0 else bar.start + bar.length, abs=0.02)
        assert bar.length == pytest.approx(abs(float(bar.text)) * per_point, abs=0.4)
        assert bar.start >= 0
        assert bar.start + bar.length <= 100
    ours = [model for _, models in chart.groups for model in models if model.ours]
    assert all(0 <= m.p_mrr.low <= m.p_mrr.start + m.p_mrr.length <= m.p_mrr.high <= 100 for m in ours)


def test_figure_6_has_both_curves_from_the_backbone_on(collection):
    (panel,) = figure_6(collection, ["raw"])
    assert panel.title == "MiniLM, uni{P}, records"
    assert [curve.label for curve in panel.curves] == ["without filter", "with filter"]
    means = collection.results.figures
    for curve, suffix in zip(panel.curves, (" (raw)", ""), strict=True):
        keys = ["MiniLM, base", *(f"MiniLM, uni{{P}}, epochs={n}{suffix}" for n in (1, 2))]
        expected = [(n, f"{100 * means[key]['records']['p-MRR']:.1f}") for n, key in enumerate(keys)]
        assert list(curve.values) == expected
        for x, y, low, high in curve.points:
            assert LEFT <= x <= WIDTH - RIGHT
            assert TOP <= high <= y <= low <= HEIGHT - BOTTOM
    assert [label for _, label in panel.x] == ["0", "1", "2"]


def test_without_unfiltered_trainings_there_is_no_figure_6(collection):
    assert figure_6(collection, []) == []


def test_a_figure_over_nothing_is_not_drawn():
    found = made.evaluation(made.records(), {"only": ("runs/x", 0)})
    nothing = {"only": {"records": found.scores["only"]["records"] | {"p-MRR": {}}}}
    assert figure_5(collect({"a": replace(found, scores=nothing)}), {}) == []
