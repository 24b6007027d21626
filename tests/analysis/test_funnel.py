from dataclasses import replace

import pytest

from infembed_ray.analysis.funnel import STEPS, Flow, Loss, Verdicts, funnel, verdicts
from infembed_ray.analysis.inputs import read
from infembed_ray.storage.steps import resolve
from infembed_ray.synthesis import pipeline
from tests.analysis.samples import ROWS, publish


@pytest.fixture
def material(tmp_path):
    return read(resolve(publish(tmp_path / "out")), "records")


def test_the_funnel_counts_every_seed(material):
    found = funnel(material)
    assert (found.seeds, found.kept, found.rejected, found.dead_letter, found.unaccounted) == (7, 3, 3, 1, 0)
    assert found.rejections == [
        Loss("judge_positive", "the judge picked none", 2),
        Loss("query_negative", "equal to the positive it should poison", 1),
    ]
    assert found.errors == [Loss("instruction_positive", "refused: <b>no</b>", 1)]


def test_unaccounted_seeds_are_counted(tmp_path):
    assert funnel(read(resolve(publish(tmp_path / "out", seeds=9)), "records")).unaccounted == 2


def test_verdicts_are_counted_by_scenario_over_kept_and_rejected_rows(material):
    assert verdicts(material) == [
        Verdicts("positive", judged=5, right=3, picks={"positive": 3, "none": 2}),
        Verdicts("negative_instruction", judged=3, right=3, picks={"negative_instruction": 3}),
        Verdicts("negative_query", judged=5, right=5, picks={"negative_query": 5}),
    ]


def test_the_steps_are_those_of_synthesis_in_their_order():
    assert ["seed", *(step for step in pipeline.STEPS if "complement" not in step)] == list(STEPS)


def test_each_step_passes_on_the_rows_that_it_does_not_lose(material):
    flow = funnel(material).steps
    assert flow[1] == Flow("instruction_positive", reached=7, rejected=0, dead_letter=1, passed=6)
    assert flow[3] == Flow("query_negative", reached=6, rejected=1, dead_letter=0, passed=5)
    assert flow[-1] == Flow("judge_positive", reached=5, rejected=2, dead_letter=0, passed=3)
    assert [one.passed for one in flow[:-1]] == [other.reached for other in flow[1:]]


def test_complements_are_counted_with_the_reasons_of_rejections(tmp_path, material):
    assert (funnel(material).complements, funnel(material).complement_faults) == (0, [])
    faults = ["the judge picked none", None, "the judge picked none", None, None, "fewer than 3 words"]
    rows = replace(ROWS, complements=tuple({"id": f"r{n}", "fault": fault} for n, fault in enumerate(faults)))
    found = funnel(read(resolve(publish(tmp_path / "with", rows)), "records"))
    assert (found.complements, found.complements_fit) == (6, 3)
    assert [(loss.why, loss.rows) for loss in found.complement_faults] == [
        ("the judge picked none", 2),
        ("fewer than 3 words", 1),
    ]
