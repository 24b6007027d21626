import pytest

from infembed_ray.config.evaluation import EvaluateSettings, GateSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import obedience as gates
from infembed_ray.evaluation.obedience import AS_GIVEN, GENERIC, PARAPHRASED, SHUFFLED
from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.tasks.infir import FIGURES

BASE = {"p-MRR": 0.20, "nDCG@10 original": 0.90, "nDCG@10 changed": 0.80, "pairs reversed": 0.5}
GOOD = {"p-MRR": 0.40, "nDCG@10 original": 0.895, "nDCG@10 changed": 0.85, "pairs reversed": 0.75}


def results(own=None, **conditions):
    """Make results of a base and a trained model that passes, but for the given figures."""
    of_base = {AS_GIVEN: BASE, GENERIC: BASE | {"p-MRR": -0.03}, SHUFFLED: BASE | {"p-MRR": 0.01}, PARAPHRASED: BASE}
    of_trained = {
        AS_GIVEN: GOOD | (own or {}),
        GENERIC: GOOD | {"p-MRR": -0.025},
        SHUFFLED: GOOD | {"p-MRR": 0.015},
        PARAPHRASED: GOOD | (own or {}),
    }
    for condition, figures in conditions.items():
        of_trained[condition] = of_trained[condition] | figures
    obedience = {
        label: {"records": {c: {f: {"q": value} for f, value in figures.items()} for c, figures in of_model.items()}}
        for label, of_model in (("base", of_base), ("trained", of_trained))
    }
    return Results({"records": TaskSummary(FIGURES, {})}, {"base": {}, "trained": {}}, {}, 1000, obedience)


def failures(*args, limits=None, **conditions):
    return list(gates.failures(results(*args, **conditions), "trained", limits or GateSettings()))


def test_a_model_within_all_limits_passes():
    assert failures() == []


@pytest.mark.parametrize(
    ("own", "conditions", "line"),
    [
        ({"p-MRR": 0.2}, {}, "p-MRR above the base's is +0.0, must be > 0"),
        ({"nDCG@10 original": 0.88}, {}, "nDCG@10 original above the base's is -2.0, must be >= -1"),
        ({"nDCG@10 changed": 0.77}, {}, "nDCG@10 changed above the base's is -3.0, must be >= -1"),
        (
            {},
            {SHUFFLED: {"p-MRR": 0.03}},
            "p-MRR above the base's, shuffled instructions, is +2.0, must be within +- 1",
        ),
        ({}, {GENERIC: {"p-MRR": -0.05}}, "p-MRR above the base's, generic instructions, is -2.0, must be within +- 1"),
        ({"pairs reversed": 0.699}, {}, "labelled pairs reversed by the inverse is +69.9, must be >= 70"),
        (
            {},
            {PARAPHRASED: {"nDCG@10 original": 0.875}},
            "nDCG@10 original, change by a paraphrase, is -2.0, must be within +- 1",
        ),
    ],
)
def test_each_gate_fails_alone_and_names_figure_value_and_limit(own, conditions, line):
    assert failures(own, **conditions) == [f"gate=trained: records: {line}"]


def test_limits_are_settings_and_figures_without_values_have_no_gate():
    assert failures({"pairs reversed": 0.6}, limits=GateSettings(pairs_reversed=55)) == []
    evaluated = results({"pairs reversed": 0.1})
    for of_task in evaluated.obedience["trained"].values():
        del of_task[AS_GIVEN]["pairs reversed"]
    assert list(gates.failures(evaluated, "trained", GateSettings())) == []


def test_values_just_inside_and_just_outside_of_a_limit_differ():
    assert failures({"nDCG@10 original": 0.8901}) == []
    assert len(failures({"nDCG@10 original": 0.8899})) == 1


def test_a_gate_needs_controls_a_later_model_and_a_task_with_changed_instructions():
    def settings(**values):
        return EvaluateSettings(models={"base": "a/b", "trained": "c/d"}, output="out", **values)

    gates.check_gate(settings())
    gates.check_gate(settings(gate="trained"))
    for values, message in (
        ({"gate": "base"}, "gate=base: is the base itself"),
        ({"gate": "trainde"}, "gate=trainde: is not a label of models"),
        ({"gate": "trained", "controls": False}, "gate=trained: needs the controls"),
    ):
        with pytest.raises(InputError, match=message):
            gates.check_gate(settings(**values))
    with pytest.raises(InputError, match="gate=trained: no task has changed instructions"):
        list(gates.failures(Results({}, {"base": {}, "trained": {}}, {}, 10), "trained", GateSettings()))
