"""The public API: names of `infembed_ray`, and functions of stages without a command line."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import infembed_ray
from infembed_ray import InputError, api
from infembed_ray.config.evaluation import EvaluateSettings
from infembed_ray.config.training import Lora, TrainSettings, ValidationSettings
from infembed_ray.records.tables import Record
from tests.support.files import write_jsonl


def record(number: int) -> Record:
    texts = {f.name: f"{f.name} of number {number}" for f in fields(Record)}
    return Record(**texts | {"id": str(number), "topic": None, "split": None, "language": None})


HEAVY = {"torch", "ray", "transformers", "faiss", "numpy", "pyarrow", "pydantic", "deepspeed", "aiohttp", "rich"}


def test_importing_the_package_loads_none_of_its_requirements() -> None:
    code = "import sys, infembed_ray; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "infembed_ray" in loaded
    assert not HEAVY & set(loaded)


@pytest.mark.parametrize("name", infembed_ray.__all__)
def test_every_public_name_is_there_with_a_docstring(name: str) -> None:
    assert name in dir(infembed_ray)
    assert getattr(infembed_ray, name).__doc__


def test_records_are_loaded_from_a_file(tmp_path: Path) -> None:
    rows = [record(n) for n in range(2)]
    path = write_jsonl(tmp_path / "records.jsonl", [vars(row) for row in rows])
    assert infembed_ray.load_records(str(path)) == rows
    with pytest.raises(InputError, match="records=/nope: no such file"):
        infembed_ray.load_records("/nope")


REQUIRED = {"records": "r", "model": "m", "output": "o"}


@pytest.mark.parametrize("given", [None, {"epochs": 3}, TrainSettings(**REQUIRED, epochs=3), TrainSettings(**REQUIRED)])
def test_settings_are_keywords_over_a_mapping_or_an_object(given: Any) -> None:
    made = api._settings("train", given, REQUIRED | {"seed": 1})
    epochs = TrainSettings.model_fields["epochs"].default if given in (None, TrainSettings(**REQUIRED)) else 3
    assert made == TrainSettings(**REQUIRED, seed=1, epochs=epochs)
    assert api._settings("train", TrainSettings(**REQUIRED, epochs=3), {"epochs": 5}).epochs == 5


def test_nested_settings_are_mappings_or_objects_and_paths_may_be_path_objects() -> None:
    validation = {"records": Path("held.jsonl"), "every": 5}
    made = api._settings(
        "train", None, {**REQUIRED, "output": Path("o"), "lora": Lora(rank=4), "validation": validation}
    )
    assert made == TrainSettings(
        **REQUIRED, lora=Lora(rank=4), validation=ValidationSettings(records="held.jsonl", every=5)
    )
    models = {
        "a": Path("a"),
        "b": {"kind": "bm25", "instructed_query": "{instruction} {query}", "plain_query": "{query}"},
    }
    evaluated = api._settings("evaluate", {"models": models}, {"tasks": [Path("task")], "output": "o"})
    assert evaluated == EvaluateSettings(models=models | {"a": "a"}, tasks=["task"], output="o")


def test_settings_of_another_stage_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"^evaluate: settings of type TrainSettings; give EvaluateSettings or a mapping"
    ):
        infembed_ray.evaluate(TrainSettings(**REQUIRED))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"lora\.rank=0: "):
        infembed_ray.train(REQUIRED, lora={"rank": 0})
