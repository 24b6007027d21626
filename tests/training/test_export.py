"""Export of a training checkpoint: read and written file by file, with the files that a whole model would have."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infembed_ray.config.training import Lora, TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling import checkpoint_writer
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.backbone import load_encoder
from infembed_ray.training.deepspeed_compat import WHOLE_STATE
from infembed_ray.training.export import export
from tests.modeling import backbones


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("modernbert", {"share_encoder": False}),
        ("qwen2", {"interaction": "cross_attention"}),
        ("qwen2", {"lora": Lora(rank=4)}),
        ("modernbert", {"lora": Lora(rank=4, target_modules=("Wo",)), "share_encoder": False}),
        ("gemma4", {}),
    ],
)
def test_exported_files_are_those_of_the_whole_model(family, changes, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    model = backbones.write(family, tmp_path / "model")
    settings = TrainSettings(records="-", model=model, output="-", **changes)
    trained = load_encoder(settings)
    torch.manual_seed(1)
    for parameter in trained.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    frozen = {name for name, parameter in trained.named_parameters() if not parameter.requires_grad}
    state = {name: w.clone() for name, w in trained.state_dict().items() if name not in frozen}
    trained.save_pretrained(tmp_path / "expected")
    (tmp_path / "step").mkdir()
    torch.save({"module": state}, tmp_path / "step" / WHOLE_STATE)

    monkeypatch.setattr(checkpoint_writer, "_SHARD", "20KB")
    export(tmp_path / "step", settings, tmp_path / "exported")
    for expected in sorted((tmp_path / "expected").rglob("*")):
        found = tmp_path / "exported" / expected.relative_to(tmp_path / "expected")
        if expected.name == "model.safetensors":
            assert_same_tensors(found.parent, load_file(expected))
        elif expected.suffix == ".json":
            assert json.loads(found.read_text()) == json.loads(expected.read_text())
        elif expected.is_file():
            assert found.read_bytes() == expected.read_bytes()
    loaded = InstructionEncoder.from_pretrained(tmp_path / "exported").state_dict()
    assert loaded.keys() == trained.state_dict().keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in trained.state_dict().items())


@pytest.mark.parametrize("changes", [{}, {"share_encoder": False}, {"interaction": "cross_attention"}])
def test_interpolated_weights_lie_between_those_of_the_model_and_the_trained_ones(changes, tmp_path):
    model = backbones.write("modernbert", tmp_path / "model")
    settings = TrainSettings(records="-", model=model, output="-", interpolation=0.6, **changes)
    trained = load_encoder(settings)
    before = {name: weight.double() for name, weight in trained.state_dict().items()}
    torch.manual_seed(1)
    for parameter in trained.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    (tmp_path / "step").mkdir()
    torch.save({"module": trained.state_dict()}, tmp_path / "step" / WHOLE_STATE)
    export(tmp_path / "step", settings, tmp_path / "exported")
    exported = InstructionEncoder.from_pretrained(tmp_path / "exported").state_dict()
    assert exported.keys() == before.keys()
    for name, weight in trained.state_dict().items():
        share = 1.0 if name.startswith("interaction.") else 0.6
        expected = before[name] + share * (weight.double() - before[name])
        torch.testing.assert_close(exported[name].double(), expected, rtol=1e-6, atol=1e-6, msg=name)


def assert_same_tensors(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Compare several files, with their index, with the tensors of one."""
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 1
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    listed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert listed == {name: file.name for file in files for name in load_file(file)}


@pytest.mark.parametrize("changes", [{}, {"lora": Lora(rank=4)}, {"interaction": "cross_attention"}])
def test_weights_that_are_not_finite_are_not_exported(changes, tmp_path):
    model = backbones.write("qwen2", tmp_path / "model")
    settings = TrainSettings(records="-", model=model, output="runs/x", **changes)
    state = {name: p for name, p in load_encoder(settings).named_parameters() if p.requires_grad}
    list(state.values())[-1].data.view(-1)[1] = torch.inf
    (tmp_path / "step").mkdir()
    torch.save({"module": state}, tmp_path / "step" / WHOLE_STATE)
    message = rf"^output=runs/x: weights are infinite or NaN: {re.escape(list(state)[-1])}; "
    with pytest.raises(InputError, match=message):
        export(tmp_path / "step", settings, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
