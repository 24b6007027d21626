"""Which stages a pipeline may have, and what each takes from an earlier one."""

import pytest

from infembed_ray.config.pipeline import PipelineSettings
from infembed_ray.errors import InputError

TRAIN = {"model": "/m"}


def settings(**sections):
    return PipelineSettings.from_mapping({"output": "/out", **sections})


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        ({}, "no stage: give at least one of synthesize, "),
        ({"train": TRAIN}, "train.records is missing: set it, or add the stage analyze or synthesize"),
        ({"index": {"corpus": "/c"}}, "index.model is missing: set it, or add the stage train"),
        ({"serve": {}}, "serve.index is missing: set it, or add the stage index"),
        ({"train": TRAIN | {"record": "/r"}}, "train.record: unknown key; did you mean records?"),
        ({"evaluate": {"models": {"a": "/a", "b": "/b"}}}, "evaluate.gate=trained: not a label of evaluate.models"),
        (
            {"synthesize": {"seeds": "/s"}, "train": TRAIN, "evaluate": {"split": "test"}},
            "train.split=null: would train on the records of evaluate.split=test; set train.split to another split",
        ),
    ],
)
def test_a_fault_names_the_stage_and_the_remedy(sections, fault):
    with pytest.raises(InputError) as error:
        settings(**sections)
    assert fault in str(error.value)


def test_a_stage_takes_the_best_earlier_output_unless_its_own_settings_give_one():
    both = settings(synthesize={"seeds": "/s"}, analyze={"clean": True}, train=TRAIN)
    assert both.maker("train", "records") == "analyze"
    assert both.maker("analyze", "records") == "synthesize"
    assert settings(synthesize={"seeds": "/s"}, analyze={}, train=TRAIN).maker("train", "records") == "synthesize"
    assert settings(synthesize={"seeds": "/s"}, train=TRAIN).maker("train", "records") == "synthesize"
    own = settings(synthesize={"seeds": "/s"}, train=TRAIN | {"records": "/mine"})
    assert own.maker("train", "records") is None
    mixed = settings(synthesize={"seeds": "/s"}, train=TRAIN | {"sources": {"a": {"path": "/a"}}})
    assert mixed.maker("train", "records") is None


def test_records_of_the_pipeline_are_evaluated_on_only_by_their_split():
    stages = {"synthesize": {"seeds": "/s"}, "train": TRAIN | {"split": "train"}}
    assert settings(**stages, evaluate={"split": "test"}).maker("evaluate", "records") == "synthesize"
    assert settings(**stages, evaluate={"tasks": ["followir"]}).maker("evaluate", "records") is None
