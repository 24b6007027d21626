"""Trials of a sweep, its identity, and rejected settings."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from infembed_ray.cli.help import as_yaml
from infembed_ray.config.sweeps import SweepSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.sweeps.distributed import BASE, trials
from tests.evaluation import published
from tests.modeling import backbones
from tests.training.test_collate import record


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    root = tmp_path_factory.mktemp("sweep")
    (root / "model").mkdir()
    (root / "records.jsonl").write_text(json.dumps(vars(record(0))) + "\n")
    return {
        "train": {"records": str(root / "records.jsonl"), "learning_rate": 1e-4},
        "evaluate": {"records": str(root / "records.jsonl")},
        "models": {"one": backbones.write("llama", root / "model"), "two": str(root / "model")},
        "objectives": ["uni{P}", "multi{P,I}"],
        "seeds": [1, 2, 3],
        "output": str(root / "output"),
    }


def test_every_row_has_a_trial_per_seed_and_the_base_row_one(values):
    made = trials(SweepSettings.from_mapping(values | {"variants": {"short": {"epochs": 1}}}))
    assert len(made) == 2 * (1 + (2 + 1) * 3)
    assert [made[n].row for n in (0, 1, 4, 7)] == [BASE, "uni{P}", "multi{P,I}", "short"]
    assert made[0].train is None
    short = next(t for t in made if t.row == "short" and t.seed == 2 and t.model == "two")
    assert (short.train.epochs, short.train.seed, short.train.learning_rate) == (1, 2, 1e-4)
    assert short.train.model.endswith("model")


def test_a_printed_config_makes_the_same_trials(values):
    settings = SweepSettings.from_mapping(values)
    assert trials(SweepSettings.from_mapping(yaml.safe_load(as_yaml(settings)))) == trials(settings)


def test_trials_have_own_folders_that_do_not_depend_on_other_rows(values):
    made = trials(SweepSettings.from_mapping(values))
    folders = {t.evaluate.output for t in made}
    assert len(folders) == len(made)
    wider = trials(SweepSettings.from_mapping(values | {"seeds": [1, 2, 3, 4], "variants": {"short": {"epochs": 1}}}))
    assert folders < {t.evaluate.output for t in wider}
    other = trials(SweepSettings.from_mapping(values | {"train": values["train"] | {"learning_rate": 2e-4}}))
    trained = {t.evaluate.output for t in other if t.train is not None}
    assert not folders & trained


def test_tasks_are_expanded_and_own_ones_are_absolute(values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    published.followir_like(tmp_path / "data")
    mine = published.beir_like(tmp_path / "mine")
    settings = SweepSettings.from_mapping(values | {"evaluate": {"tasks": ["followir", "./mine"], "data": "data"}})
    asked = trials(settings)[0].evaluate
    assert asked.tasks == ("followir/robust04", "followir/news21", "followir/core17", str(mine))
    assert asked.data == str(tmp_path / "data")


def test_relative_paths_are_resolved_by_the_driver(values, monkeypatch):
    here = Path(values["train"]["records"]).parent
    monkeypatch.chdir(here)
    evaluate = {"records": "records.jsonl", "distractors": "records.jsonl"}
    relative = {"train": {"records": "records.jsonl"}, "evaluate": evaluate, "output": "output"}
    made = trials(SweepSettings.from_mapping(values | relative | {"models": {"one": "model"}}))
    for trial in made:
        assert Path(trial.evaluate.records) == Path(trial.evaluate.distractors) == here / "records.jsonl"
        assert Path(trial.evaluate.output).is_relative_to(here)
        assert Path((trial.untrained or trial.train).model) == here / "model"
        assert Path(trial.evaluate.embeddings) == here / "output" / "embeddings"
    assert Path(made[1].train.records) == here / "records.jsonl"


def test_base_row_uses_the_text_format_of_the_trainings(values):
    """The oracle is the encoder that a training without steps would export."""
    reads = {"query_prefix": "query: ", "passage_prefix": "passage: ", "pooling": "mean", "query_length": 12}
    train = values["train"] | reads | {"template": "query_first"}
    base, *_ = trials(SweepSettings.from_mapping(values | {"train": train}))
    untrained = baselines.load(baselines.resolve("base", base.untrained), "cpu")
    expected = InstructionEncoder.from_pretrained(
        base.untrained.model,
        template="query_first",
        query_prefix="query: ",
        passage_prefix="passage: ",
        pooling="mean",
        query_length=12,
    )
    asked = [("how is aspirin dosed", "for children, in short words"), ("bread", None)]
    queries = untrained.encode_queries([Query("q", query, instruction) for query, instruction in asked])
    np.testing.assert_allclose(queries, expected.encode_queries(*map(list, zip(*asked, strict=True))), atol=1e-6)
    np.testing.assert_allclose(untrained.encode_passages(["a loaf"]), expected.encode_passages(["a loaf"]), atol=1e-6)
    plain, *_ = trials(SweepSettings.from_mapping(values))
    assert plain.evaluate.output != base.evaluate.output


def test_paths_that_a_row_changes_are_absolute(values, monkeypatch):
    here = Path(values["train"]["records"]).parent
    monkeypatch.chdir(here)
    rows = {"stopped": {"validation": {"records": "records.jsonl"}}}
    settings = SweepSettings.from_mapping(values | {"variants": rows, "seeds": [1]})
    made = {t.row: t.train for t in trials(settings) if t.model == "one"}
    assert made["stopped"].validation.records == str(here / "records.jsonl")
    assert made["uni{P}"].validation is None


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"models": {}}, "models"),
        ({"models": {"x": "/no/model"}}, "models.x"),
        ({"objectives": ["uni{Z}"]}, "objective"),
        ({"objectives": ["uni{P}", "uni{P}"]}, "objectives"),
        ({"variants": {"v": {"pooling": "median"}}}, "row v: pooling"),
        ({"variants": {"v": {"poolin": "mean"}}}, "row v: poolin"),
        ({"variants": {"v": {"seed": 1}}}, "variants.v.seed"),
        ({"variants": {"base": {"epochs": 1}}}, "variants.base"),
        ({"variants": {"v": {"zero_stage": 0, "precision": "bf16"}}}, "row v"),
        ({"evaluate": {}}, "evaluate.tasks"),
        ({"evaluate": {"records": "/no/file"}}, "evaluate.records"),
        ({"train": {"records": "/no/file"}}, "train.records"),
        ({"train": {"records": "x", "seed": 3}}, "train.seed"),
        ({"evaluate": {"records": "x", "models": {"a": "b"}}}, "evaluate.models"),
        ({"variants": {"v": {"validation": {"records": "/no/file"}}}}, "row v: validation.records"),
        ({"train": {"record": "x"}}, "train.record"),
    ],
)
def test_bad_input_is_rejected_before_any_work(values, change, setting):
    with pytest.raises(InputError) as error:
        trials(SweepSettings.from_mapping(values | change))
    assert str(error.value.faults[0]).startswith(setting)
