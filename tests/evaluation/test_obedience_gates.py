from dataclasses import replace

import pytest

from infembed_ray.config.evaluation import EvaluateSettings, GateSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import obedience as gates
from infembed_ray.evaluation.obedience import AS_GIVEN, GENERIC, PARAPHRASED, SHUFFLED
from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.tasks.infir import FIGURES

BASE = {"p-MRR": 0.20, "nDCG@10 original": 0.90, "nDCG@10 changed": 0.80, "pairs reversed": 0.5}
GOOD = {"p-MRR": 0.40, "nDCG@10 original": 0.895, "nDCG@10 changed": 0.85, "pairs reversed": 0.75}


def results(own=None, spread=0.0, queries=40, **conditions):
    """Make results of a base and a trained model that passes, but for the given figures.

    The trained model's values are `spread` above and below their mean in turn.
    """
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
        label: {
            "records": {
                condition: {
                    figure: {f"q{n}": value + (-1) ** n * scale for n in range(queries)}
                    for figure, value in figures.items()
                }
                for condition, figures in of_model.items()
            }
        }
        for label, of_model, scale in (("base", of_base, 0.0), ("trained", of_trained, spread))
    }
    return Results({"records": TaskSummary(FIGURES, {})}, {"base": {}, "trained": {}}, {}, 1000, obedience)


def decided(*args, limits=None, **options):
    return [gate for _, gate in gates.decided(results(*args, **options), "trained", limits or GateSettings())]


def failures(*args, **options):
    return [str(gate) for gate in decided(*args, **options) if gate.fails]


def test_a_model_within_all_limits_passes():
    assert [gate.verdict.rpartition(": ")[2] for gate in decided()] == ["passes"] * 8


def test_a_model_equal_to_the_base_is_not_more_obedient():
    more, *foreign = failures(BASE, **{GENERIC: {"p-MRR": -0.03}, SHUFFLED: {"p-MRR": 0.01}, PARAPHRASED: BASE})
    assert more.startswith("p-MRR above the base's is +0.0 ")
    assert len(foreign) == 2  # no gain is no share of no gain


@pytest.mark.parametrize(
    ("own", "conditions", "line"),
    [
        ({"p-MRR": 0.26}, {SHUFFLED: {"p-MRR": 0.01}, GENERIC: {"p-MRR": 0.0}}, "generic instructions, is -1.2"),
        ({"p-MRR": 0.19}, {SHUFFLED: {"p-MRR": 0.0}, GENERIC: {"p-MRR": -0.04}}, "p-MRR above the base's is -1.0"),
        (
            {"nDCG@10 original": 0.88},
            {},
            "nDCG@10 original above the base's is -2.0 [-2.0, -2.0], must be > -1: fails",
        ),
        ({"nDCG@10 changed": 0.77}, {}, "nDCG@10 changed above the base's is -3.0 [-3.0, -3.0], must be > -1: fails"),
        (
            {},
            {SHUFFLED: {"p-MRR": 0.09}},
            "30 % of that gain, less the gain under shuffled instructions, is -2.0 [-2.0, -2.0], must be > 0: fails",
        ),
        ({"pairs reversed": 0.48}, {}, "labelled pairs reversed, above the base's, is -2.0 [-2.0, -2.0]"),
        (
            {},
            {PARAPHRASED: {"nDCG@10 original": 0.875}},
            "nDCG@10 original, move by a paraphrase above the base's, is -2.0 [-2.0, -2.0], must be > -1: fails",
        ),
    ],
)
def test_each_gate_fails_alone_and_names_figure_value_interval_and_limit(own, conditions, line):
    [failed] = failures(own, **conditions)
    assert line in failed


def test_a_gain_under_a_paraphrase_is_no_fault():
    assert failures(**{PARAPHRASED: {"nDCG@10 original": 0.93}}) == []


def test_few_and_scattered_values_are_undecided_and_many_decide():
    """The mean misses the limit by 0.5 points; its standard error is 10 / sqrt(n) points."""
    for queries, verdict in ((40, "undecided"), (4_000, "fails")):
        named = {gate.figure: gate.verdict for gate in decided({"nDCG@10 original": 0.885}, 0.1, queries)}
        assert named["nDCG@10 original above the base's"].endswith(verdict)


def test_queries_of_a_group_count_as_one_observation():
    evaluated = results({"nDCG@10 original": 0.885}, 0.1, 4_000)
    grouped = TaskSummary(FIGURES, {f"q{n}": f"g{n % 40}" for n in range(4_000)})
    found = gates.decided(replace(evaluated, tasks={"records": grouped}), "trained", GateSettings())
    assert not any(gate.fails for _, gate in found)


def test_limits_are_settings_and_figures_without_values_have_no_gate():
    assert failures(limits=GateSettings(foreign_share=41), **{SHUFFLED: {"p-MRR": 0.09}}) == []
    assert failures({"nDCG@10 original": 0.88}, limits=GateSettings(tolerance=3)) == []
    evaluated = results()
    for of_task in evaluated.obedience["trained"].values():
        del of_task[AS_GIVEN]["pairs reversed"]
    assert len(list(gates.decided(evaluated, "trained", GateSettings()))) == 7


def test_a_model_without_rankings_under_a_condition_fails():
    evaluated = results()
    del evaluated.obedience["trained"]["records"][SHUFFLED]
    [failed] = [gate for _, gate in gates.decided(evaluated, "trained", GateSettings()) if gate.fails]
    assert str(failed).endswith("shuffled instructions, is not measured: evaluate a model, not a run")


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
        list(gates.decided(Results({}, {"base": {}, "trained": {}}, {}, 10), "trained", GateSettings()))
