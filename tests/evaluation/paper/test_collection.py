from dataclasses import replace
from statistics import fmean, stdev

import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.paper.collection import collect
from infembed_ray.evaluation.tables import Column
from tests.evaluation.paper import made

P_MRR = Column("p-MRR", (("records", "p-MRR"),), 100, 1)
ROWS = {
    "uni{P}": (0.1, {"objective": "uni{P}", "epochs": 2}),
    "multi{P,I}": (0.4, {"objective": "multi{P,I}", "epochs": 2}),
}
SWEEP = made.sweep(made.records(), ["MiniLM", "tiny"], ROWS, [1, 2, 3])
EVALUATION = made.evaluation(made.records(), {"base": ("org/base", 0), "ours": ("runs/ours", 0.3)})


def test_seeds_of_a_row_are_one_model_of_their_mean_values_and_their_spread():
    combined = collect({"sweep": SWEEP})
    assert list(combined.models)[:3] == ["MiniLM, base", "MiniLM, uni{P}", "MiniLM, multi{P,I}"]
    model = combined.models["tiny, uni{P}"]
    runs = [SWEEP.figures[f"uni{{P}}, tiny, seed {seed}"]["records"]["p-MRR"] for seed in (1, 2, 3)]
    assert model.spread(P_MRR) == pytest.approx(stdev(runs))
    assert combined.cells(P_MRR)[model.key].mean.value == pytest.approx(fmean(runs))
    assert combined.models["tiny, base"].spread(P_MRR) is None


def test_models_are_compared_with_the_first_of_their_output_and_those_of_a_sweep_with_their_backbone():
    combined = collect({"sweep": SWEEP, "more": EVALUATION})
    assert {key: model.baseline for key, model in combined.models.items()} == {
        **{f"{b}, {row}": f"{b}, base" for b in ("MiniLM", "tiny") for row in ("base", *ROWS)},
        **{"base": "base", "ours": "base"},
    }
    cells, means = combined.cells(P_MRR), combined.results.figures
    for key, model in combined.models.items():
        apart = cells[key].difference
        if key == model.baseline:
            assert apart is None
        else:
            expected = means[key]["records"]["p-MRR"] - means[model.baseline]["records"]["p-MRR"]
            assert apart.value == pytest.approx(expected)


def test_the_same_model_in_two_outputs_is_one_with_the_tasks_of_both():
    other = made.evaluation(made.benchmarks("mair"), {"base": ("org/base", 0)})
    combined = collect({"a": EVALUATION, "b": other})
    assert list(combined.models) == ["base", "ours"]
    assert set(combined.results.scores["base"]) == {"records", *made.benchmarks("mair")}
    ndcg = Column("DD-15", (("mair/dd-15", "nDCG@10"),))
    assert list(combined.cells(ndcg)) == ["base"]


def test_another_model_of_the_same_label_gets_its_outputs_suffix():
    other = made.evaluation(made.records(), {"base": ("org/base", 0), "ours": ("runs/ours", 0.2)})
    combined = collect({"a": EVALUATION, "b": other})
    assert list(combined.models) == ["base", "ours", "ours (b)"]
    assert combined.models["ours (b)"].baseline == "base"
    assert (combined.models["ours (b)"].label, combined.models["ours (b)"].shown) == ("ours", "ours (b)")


def test_a_model_without_its_baseline_on_a_task_has_no_difference():
    combined = collect({"a": EVALUATION, "b": made.evaluation(made.benchmarks("mair"), {"ours": ("runs/ours", 0.3)})})
    assert combined.models["ours"].baseline == "base"
    cells = combined.cells(Column("DD-15", (("mair/dd-15", "nDCG@10"),)))
    assert list(cells) == ["ours"]
    assert cells["ours"].difference is None


def test_tasks_of_one_name_must_be_the_same():
    larger = replace(
        EVALUATION, tasks={"records": replace(EVALUATION.tasks["records"], about={"queries": 20, "passages": 99})}
    )
    other = replace(EVALUATION, tasks={"records": replace(EVALUATION.tasks["records"], content="another hash")})
    for changed in (larger, other):
        with pytest.raises(InputError, match=r"results\.b: its task 'records' has other texts.* results\.a"):
            collect({"a": EVALUATION, "b": changed})


def test_rankings_must_be_of_one_depth():
    with pytest.raises(InputError, match=r"results\.b: rankings hold 100 documents, those of results\.a 1000"):
        collect({"a": EVALUATION, "b": replace(EVALUATION, depth=100)})
