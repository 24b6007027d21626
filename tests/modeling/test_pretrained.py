"""Loading what others trained: their code never runs, and no weight is left at random or not finite."""

import ast
import io
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import infembed_ray
from infembed_ray.config.training import ExportSettings, Lora, TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.modeling import adapters, checkpoint, onnx, pretrained
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.planning import backbones as planned
from tests.evaluation.retrievers import models as tiny
from tests.modeling import backbones

WEIGHTS = "model.safetensors"
CLASSES = {
    "AutoConfig": "odd.Config",
    "AutoModel": "odd.Model",
    "AutoModelForCausalLM": "odd.Model",
    "AutoModelForSequenceClassification": "odd.Model",
}
LOADERS = {
    "locate": lambda path: checkpoint.locate(path, "model"),
    "encoder": InstructionEncoder.from_pretrained,
    "encoder without weights": lambda path: InstructionEncoder.from_pretrained(path, device="meta"),
    "train": lambda path: planned.load(TrainSettings(records="r", model=path, output="o")),
    "export": lambda path: onnx.run(ExportSettings(model=path, output=f"{path}-exported")),
    "causal": lambda path: retriever(path, kind="causal", pair="{query} {passage}", answers=["a", "b"]),
    "classifier": lambda path: retriever(path, kind="classifier"),
}
FORMATS = {"instructed_query": "{instruction} {query}", "plain_query": "{query}", "passage": "{passage}"}


def retriever(path, **settings):
    return baselines.load(baselines.resolve("x", {"model": path, **FORMATS, **settings}))


def edit(path, **changes):
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ------------------------------------------------------------------------------------------------------------ remote code


@pytest.fixture
def answers_yes(monkeypatch):
    """Somebody answers yes to whatever is asked on the terminal."""
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))


@pytest.fixture
def model(tmp_path):
    """A model with code that leaves a mark where it runs."""
    path = tmp_path / "model"
    backbones.write("qwen2", path)
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n"
    (path / "odd.py").write_text(code)
    (path / "custom_generate").mkdir()
    (path / "custom_generate" / "generate.py").write_text(code)
    yield path
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("loader", [name for name in LOADERS if name != "locate"])
@pytest.mark.parametrize("where", ["config", "model", "tokenizer", "all"])
@pytest.mark.parametrize("kind", ["qwen2", "odd"])
def test_code_of_a_model_never_runs(model, answers_yes, capsys, loader, where, kind):
    entries = {
        "config": {"AutoConfig": CLASSES["AutoConfig"]},
        "model": {name: c for name, c in CLASSES.items() if name != "AutoConfig"},
        "tokenizer": {},
        "all": CLASSES,
    }
    edit(model / "config.json", model_type=kind, auto_map=entries[where])
    if where in ("tokenizer", "all"):
        edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "odd.Model"]})
    with pytest.raises(InputError) as refused:
        LOADERS[loader](str(model))
    assert "\n" not in str(refused.value)
    assert str(model) in str(refused.value)
    if kind == "qwen2" or where in ("config", "all"):  # otherwise the type is unknown, and no code for it is named
        assert "needs remote code" in str(refused.value)
        assert "serve it behind" in str(refused.value)


@pytest.mark.parametrize("kind", ["qwen2", "odd"])
def test_the_check_before_a_run_runs_no_code_either(model, answers_yes, kind):
    edit(model / "config.json", model_type=kind, auto_map=CLASSES)
    if kind == "qwen2":  # whether the class of transformers will do is known once the settings are
        checkpoint.locate(str(model), "model")
    else:
        with pytest.raises(InputError, match=r"^model=.*: needs remote code"):
            checkpoint.locate(str(model), "model")


def test_a_user_who_knows_the_attention_gets_the_class_of_transformers(model, answers_yes, tmp_path):
    expected = InstructionEncoder.from_pretrained(model).state_dict()
    edit(model / "config.json", auto_map=CLASSES)
    with pytest.raises(InputError, match=r"set bidirectional=true or false, as its model card says"):
        InstructionEncoder.from_pretrained(model)
    encoder = InstructionEncoder.from_pretrained(model, bidirectional=False)
    torch.testing.assert_close(encoder.state_dict(), expected, rtol=0, atol=0)
    encoder.save_pretrained(tmp_path / "trained")
    assert "auto_map" not in json.loads((tmp_path / "trained" / "config.json").read_text())
    InstructionEncoder.from_pretrained(tmp_path / "trained")


def test_no_kernel_is_fetched_from_the_hub(model):
    texts = ["how is aspirin dosed"], [None]
    expected = InstructionEncoder.from_pretrained(model).encode_queries(*texts)
    edit(model / "config.json", attn_implementation="org/kernel")
    assert (InstructionEncoder.from_pretrained(model).encode_queries(*texts) == expected).all()


def test_only_one_module_loads_what_others_trained():
    """`from_pretrained` of anything else but our encoder, and the classes that have it."""
    root = Path(infembed_ray.__file__).parent
    for file in root.rglob("*.py"):
        if file == Path(pretrained.__file__):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config"):
                assert ast.unparse(node.value) == "InstructionEncoder", f"{file}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and node.module:
                library = node.module.split(".")[0]
                names = {alias.name for alias in node.names}
                loaders = {name for name in names if name.startswith(("Auto", "Peft", "pipeline"))}
                assert library != "sentence_transformers", f"{file}:{node.lineno}"
                assert library not in ("transformers", "peft") or not loaders, f"{file}:{node.lineno}"


# ---------------------------------------------------------------------------------------------------------------- weights


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return backbones.write("qwen2", tmp_path_factory.mktemp("qwen2"))


def changed(source, path, change, file=WEIGHTS):
    """Copy a model with changed weights."""
    shutil.copytree(source, path)
    weights = change(load_file(path / file))
    save_file(weights, path / file, {"format": "pt"})
    return str(path)


def without(part):
    return lambda weights: {name: w for name, w in weights.items() if part not in name}


def renamed(weights):
    return {f"foreign.{name}": w for name, w in weights.items()}


def reshaped(weights):
    name = next(name for name in weights if name.endswith("mlp.down_proj.weight"))
    return weights | {name: weights[name][:, :3].contiguous()}


def filled(value):
    def change(weights):
        name = next(name for name in weights if name.endswith("q_proj.weight"))
        weights[name][3, 3] = value
        return weights

    return change


FAULTS = {
    "a layer": (without("layers.1."), r"has no weights for layers\.1\.input_layernorm\.weight, layers\.1\.\S+, layers"),
    "a prefix": (renamed, r"has no weights for embed_tokens\.weight, .* and 2\d more, which would be random"),
    "a shape": (
        reshaped,
        r"has weights of another shape: layers\.0\.mlp\.down_proj\.weight \(32, 3\) instead of \(32, 64\)",
    ),
    "a norm": (without("layers.0.input_layernorm"), r"has no weights for layers\.0\.input_layernorm\.weight, which"),
    "NaN": (
        filled(math.nan),
        r"weights are infinite or NaN: (0\.model\.)?layers\.0\.self_attn\.q_proj\.weight; .*lower learning_rate",
    ),
    "infinity": (filled(-math.inf), r"weights are infinite or NaN: (0\.model\.)?layers\.0\.self_attn\.q_proj\.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_are_missing_or_wrong_are_named(qwen2, tmp_path, fault):
    change, message = FAULTS[fault]
    path = changed(qwen2, tmp_path / "model", change)
    with pytest.raises(InputError, match=rf"^model={path}: {message}") as refused:
        InstructionEncoder.from_pretrained(path)
    assert "\n" not in str(refused.value)


def sharded(source, path):
    shutil.copytree(source, path)
    (path / WEIGHTS).unlink()
    AutoModel.from_pretrained(source).save_pretrained(path, max_shard_size="20KB")
    return sorted(path.glob("model-*.safetensors"))


@pytest.mark.parametrize("fault", ["missing", "truncated"])
def test_a_shard_that_is_missing_or_truncated_is_an_error(qwen2, tmp_path, fault):
    _, shard, *_ = sharded(qwen2, tmp_path / "model")
    if fault == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(InputError, match=rf"^model={tmp_path / 'model'}: cannot be loaded") as refused:
        InstructionEncoder.from_pretrained(str(tmp_path / "model"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("part", "name"), [("classifier", r"classifier\.bias"), ("layer.0", r"bert\.encoder\.layer\.0")]
)
def test_a_classifier_needs_its_head_and_its_layers(tmp_path, part, name):
    path = changed(tiny.bert(tmp_path / "whole", 1), tmp_path / "model", without(part))
    with pytest.raises(InputError, match=rf"^kind=classifier, model={path}: has no weights for {name}"):
        LOADERS["classifier"](path)


@pytest.fixture(scope="module")
def adapter(qwen2, tmp_path_factory):
    """The directory of adapters over a model."""
    encoder = InstructionEncoder.from_pretrained(qwen2)
    adapters.add(encoder.backbones, Lora(rank=2))
    for name, parameter in encoder.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    path = tmp_path_factory.mktemp("adapter")
    adapters.save(encoder.backbones, path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layers.1."), r"no adapters of this model \(no weights for .*layers\.1\..* and 11 more\)"),
        (renamed, r"no adapters of this model \(no weights for "),
        (
            lambda weights: weights | {"base_model.model.more.lora_A.weight": torch.ones(2, 2)},
            r"weights of another model: .*more",
        ),
        (lambda weights: {n: w * math.inf for n, w in weights.items()}, "weights are infinite or NaN"),
    ],
)
def test_adapters_that_are_not_of_the_model_are_refused(qwen2, adapter, tmp_path, change, message):
    path = changed(adapter, tmp_path / "adapter", change, "adapter_model.safetensors")
    with pytest.raises(InputError, match=message):
        retriever(qwen2, kind="encoder", adapter=path)


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_a_model_that_is_not_finite_is_not_saved(qwen2, tmp_path, lora):
    encoder = InstructionEncoder.from_pretrained(qwen2)
    if lora is not None:
        adapters.add(encoder.backbones, lora)
    list(encoder.parameters())[-1].data.view(-1)[0] = math.nan
    with pytest.raises(InputError, match=rf"^path={tmp_path / 'saved'}: weights are infinite or NaN: backbone\.norm"):
        encoder.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
