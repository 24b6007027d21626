import pytest

from infembed_ray.analysis.funnel import Loss, Verdicts, funnel, verdicts
from infembed_ray.analysis.material import read
from infembed_ray.storage import resolve
from tests.analysis.samples import publish


@pytest.fixture
def material(tmp_path):
    return read(resolve(publish(tmp_path / "out")), "records")


def test_the_funnel_says_where_every_seed_went(material):
    found = funnel(material)
    assert (found.seeds, found.kept, found.rejected, found.dead_letter, found.unaccounted) == (7, 3, 3, 1, 0)
    assert found.rejections == [
        Loss("judge_positive", "the judge picked none", 2),
        Loss("query_negative", "equal to the positive it should poison", 1),
    ]
    assert found.errors == [Loss("instruction_positive", "refused: <b>no</b>", 1)]


def test_seeds_that_went_nowhere_are_counted(tmp_path):
    assert funnel(read(resolve(publish(tmp_path / "out", seeds=9)), "records")).unaccounted == 2


def test_verdicts_are_counted_by_scenario_over_kept_and_rejected_rows(material):
    assert verdicts(material) == [
        Verdicts("positive", judged=5, right=3, picks={"positive": 3, "none": 2}),
        Verdicts("negative_instruction", judged=3, right=3, picks={"negative_instruction": 3}),
        Verdicts("negative_query", judged=5, right=5, picks={"negative_query": 5}),
    ]
