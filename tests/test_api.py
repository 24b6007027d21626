"""The public API: names of `infembed_ray`, and functions of stages without a command line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import infembed_ray
from infembed_ray import InputError
from infembed_ray.records import Record, columns_of
from infembed_ray.training.collate import flatten
from tests.modeling import backbones
from tests.support.files import write_jsonl


def record(number: int) -> Record:
    texts = {f.name: f"{f.name} of number {number}" for f in fields(Record)}
    return Record(**texts | {"id": str(number), "topic": None, "split": None, "language": None})


def test_importing_the_package_loads_neither_torch_nor_ray_nor_pydantic() -> None:
    code = (
        "import sys, infembed_ray; print(any(name in sys.modules for name in ('torch', 'ray', 'pydantic', 'pyarrow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("name", infembed_ray.__all__)
def test_every_public_name_is_there_with_a_docstring(name: str) -> None:
    assert name in dir(infembed_ray)
    assert getattr(infembed_ray, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = infembed_ray.nothing


def test_records_are_loaded_from_a_file(tmp_path: Path) -> None:
    rows = [record(n) for n in range(2)]
    path = write_jsonl(tmp_path / "records.jsonl", [columns_of(row) for row in rows])
    assert infembed_ray.load_records(str(path)) == rows
    with pytest.raises(InputError, match="records=/nope: no such file"):
        infembed_ray.load_records("/nope")


@pytest.mark.integration
def test_the_objective_of_texts_is_the_cross_entropy_of_their_embeddings_and_has_gradients(tmp_path: Path) -> None:
    encoder = infembed_ray.InstructionEncoder.from_pretrained(backbones.write("qwen2", tmp_path))
    records = [record(n) for n in range(3)]
    rows = [t for r in records for t in flatten(r)]
    queries = encoder.encode_queries([t.query for t in rows], [t.instruction for t in rows])
    logits = torch.from_numpy(queries @ encoder.encode_passages([t.passage for t in rows]).T) / 0.1
    loss = infembed_ray.objective_loss(encoder, records, "uni{P}", temperature=0.1)
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(logits, torch.arange(len(rows))), rtol=1e-4, atol=0
    )
    loss.backward()
    assert all(p.grad is not None for p in encoder.parameters())


def test_a_wrong_setting_of_a_stage_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"unknown key epoch: did you mean epochs\?"):
        infembed_ray.train(records="r", model="m", output="o", epoch=1)
