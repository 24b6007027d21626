"""Models loaded into ZeRO-3 partitions: equal to models that DeepSpeed partitions later, and small on every worker."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from infembed_ray.config.training import Lora, TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.training import zero_init
from infembed_ray.training.zero_init import load_for_training
from tests.evaluation.retrievers import models
from tests.modeling import backbones
from tests.support.workers import run_workers, share_process_group

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")


def settings_of(model, **changes):
    return TrainSettings(records="-", model=model, output="-", zero_stage=3, **changes)


def update_once(encoder, settings):
    """Return what a step of training gives: an embedding, the gradient norm, buffers, and fp32 weights after the update."""
    from deepspeed.utils import safe_get_full_fp32_param

    from infembed_ray.training.engine import Engine

    engine = Engine(encoder, settings)
    engine.train()
    query = engine.encode(encoder.tokenize_queries(["how is aspirin dosed"], ["For nurses; no brand names"]))
    passage = engine.encode(encoder.tokenize_passages(["a passage about bread"]))
    engine.backward((query * passage).sum())
    norm = engine.update(1e-2)
    named = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
    weights = {name: safe_get_full_fp32_param(p).clone() for name, p in named.items()}
    buffers = {name: b.clone() for name, b in encoder.named_buffers()}
    engine._deepspeed.destroy()
    return query.detach(), torch.tensor(norm), weights, buffers


def compare(rank, cases):
    """Train one step of both ways to load; return whether the model was partitioned when loaded."""
    from infembed_ray.training.backbone import load_encoder

    destroy = share_process_group()
    early = []
    for settings in cases:
        torch.manual_seed(0)
        encoder = load_for_training(settings, CPU)
        partitioned = all(hasattr(p, "ds_id") for p in encoder.backbone.get_input_embeddings().parameters())
        early.append(partitioned and all(p.numel() == 0 for p in encoder.parameters() if hasattr(p, "ds_id")))
        got = update_once(encoder, settings)
        torch.manual_seed(0)
        expected = update_once(load_encoder(settings), settings)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    destroy()
    return early


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return backbones.write("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def with_head(decoder, tmp_path_factory):
    """The same model as a language model stores it: several files, names with a prefix, and an output layer."""
    path = tmp_path_factory.mktemp("with_head")
    shutil.copytree(decoder, path, dirs_exist_ok=True)
    weights = {f"model.{name}": w for name, w in load_file(path / "model.safetensors").items()}
    weights["lm_head.weight"] = torch.zeros(3)
    (path / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({n: w for n, w in weights.items() if files[n] == file}, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return str(path)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_partitioned_model_trains_like_one_that_is_loaded_whole(workers, decoder, with_head, minilm, tmp_path):
    bert = backbones.write("modernbert", tmp_path / "bert")
    lacking = tmp_path / "lacking"
    shutil.copytree(minilm, lacking)
    change(lacking, lambda weights: {name: w for name, w in weights.items() if "pooler" not in name})
    gemma = backbones.write("gemma4", tmp_path / "gemma")
    cases = [
        settings_of(decoder),
        settings_of(gemma),
        settings_of(with_head, precision="bf16"),
        settings_of(bert, lora=Lora(rank=4, dropout=0.0)),
        settings_of(decoder, share_encoder=False),
        settings_of(decoder, interaction="cross_attention"),
        settings_of(str(lacking)),
        settings_of(models.bert(tmp_path / "trained", 1), head="score"),
        settings_of(models.llama(tmp_path / "classifier", 1), head="score"),
        settings_of(decoder, head="score"),  # its new head is in no file
    ]
    for early in run_workers(compare, workers, cases):
        assert early == [True] * 5 + [False] * 2 + [True] * 2 + [False]


def change(path, changed):
    file = path / "model.safetensors"
    save_file(changed(load_file(file)), file, metadata={"format": "pt"})


def refusals(rank, cases):
    """Return why each model is refused."""
    destroy = share_process_group()
    messages = []
    for settings in cases:
        with pytest.raises(InputError) as refused:
            load_for_training(settings, CPU)
        messages.append(str(refused.value))
    destroy()
    return messages


def told(rank, settings):
    """Return what worker 0 says while it loads a model."""
    destroy, said = share_process_group(), []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(zero_init, "say", said.append)
        load_for_training(settings, CPU)
    destroy()
    return said


def test_a_new_head_is_the_reason_for_which_a_model_is_loaded_whole(decoder):
    ((said,),) = run_workers(told, 1, settings_of(decoder, head="score"))
    assert said.endswith(
        ": its files do not have every parameter (a new head is in none), so each worker loads it whole"
    )


def test_every_worker_refuses_weights_that_are_missing_or_not_finite(decoder, tmp_path):
    broken = {name: tmp_path / name for name in ("lacking", "foreign", "nan")}
    for path in broken.values():
        shutil.copytree(decoder, path)
    change(broken["lacking"], lambda weights: {name: w for name, w in weights.items() if "layers.1." not in name})
    change(broken["foreign"], lambda weights: {f"foreign.{name}": w for name, w in weights.items()})
    change(broken["nan"], lambda weights: weights | {"norm.weight": weights["norm.weight"] * torch.nan})
    of_each = run_workers(refusals, 2, [settings_of(str(path)) for path in broken.values()])
    for lacking, foreign, nan in of_each:
        assert f"model={broken['lacking']}: has no weights for layers.1." in lacking
        assert f"model={broken['foreign']}: has no weights for embed_tokens.weight" in foreign
        assert f"model={broken['nan']}: weights are infinite or NaN: norm.weight; " in nan
