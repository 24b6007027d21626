"""Linear layers in oneDNN, against products in float64."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from infembed_ray.modeling import linear
from infembed_ray.modeling.linear import Linear, enable_onednn, fuse_norms, onednn_pays


@pytest.fixture(autouse=True)
def asked_anew():
    onednn_pays.cache_clear()
    yield
    onednn_pays.cache_clear()


@pytest.fixture
def faster(monkeypatch, tmp_path):
    """Let this be an AMD processor."""
    (tmp_path / "cpuinfo").write_text("vendor_id\t: AuthenticAMD\n")
    monkeypatch.setattr(linear, "CPU_FACTS", tmp_path / "cpuinfo")


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (1, 37, 48), (3, 5, 48)])
def test_inference_gives_the_product(shape, bias):
    layer = nn.Sequential(nn.Linear(48, 31, bias=bias))
    enable_onednn(layer)
    assert isinstance(layer[0], Linear)
    texts = torch.randn(shape)
    expected = copy.deepcopy(layer).double()(texts.double())
    with torch.inference_mode():
        torch.testing.assert_close(layer(texts).double(), expected.detach(), atol=1e-5, rtol=1e-5)
        apart = torch.stack([texts, texts], dim=-1)[..., 0]  # not contiguous
        torch.testing.assert_close(layer(apart).double(), expected.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("faster")
def test_training_other_precisions_and_saved_weights_are_those_of_plain_layers():
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    layer = copy.deepcopy(plain)
    enable_onednn(layer)
    texts = torch.randn(5, 8)
    for model in (plain, layer):
        model(texts).square().sum().backward()
    for one, other in zip(plain.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=0, rtol=0)
    assert list(plain.state_dict()) == list(layer.state_dict())
    with torch.inference_mode():
        half = texts.bfloat16()
        torch.testing.assert_close(layer.bfloat16()(half), plain.bfloat16()(half), atol=0, rtol=0)


def test_on_another_processor_layers_stay_as_they_are(monkeypatch, tmp_path):
    layer = nn.Sequential(nn.Linear(8, 8))
    (tmp_path / "cpuinfo").write_text("vendor_id\t: GenuineIntel\n")
    for facts in ("cpuinfo", "missing"):
        monkeypatch.setattr(linear, "CPU_FACTS", tmp_path / facts)
        onednn_pays.cache_clear()
        enable_onednn(layer)
        assert type(layer[0]) is nn.Linear


@pytest.mark.usefixtures("faster")
def test_an_operator_that_is_missing_or_has_other_results_is_not_used(monkeypatch):
    def missing(*_):
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    for operator in (missing, lambda input, weight, bias: 1.01 * nn.functional.linear(input, weight, bias)):
        monkeypatch.setattr(linear, "_onednn", operator)
        onednn_pays.cache_clear()
        assert not onednn_pays()


@pytest.mark.parametrize("norm", [LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm])
def test_a_fused_norm_is_that_of_the_formula_in_inference_only(norm, monkeypatch):
    plain, states = nn.Sequential(norm(48, eps=1e-3)), torch.randn(3, 5, 48)
    nn.init.normal_(plain[0].weight)
    fused = copy.deepcopy(plain)
    fuse_norms(fused)
    torch.testing.assert_close(fused(states), plain(states), atol=0, rtol=0)
    monkeypatch.setattr(linear, "FUSING", {"cpu"})
    torch.testing.assert_close(fused(states), plain(states), atol=0, rtol=0)
    monkeypatch.setattr(norm, "forward", None)  # only the fused operator is left
    wide = states.double()
    expected = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-3).sqrt() * plain[0].weight.double()
    with torch.inference_mode():
        torch.testing.assert_close(fused(states).double(), expected.detach(), atol=1e-5, rtol=1e-5)
    assert list(fused.state_dict()) == list(plain.state_dict())
