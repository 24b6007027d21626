"""Linear layers in oneDNN, against products in float64."""

import copy

import pytest
import torch
from torch import nn

from infembed_ray.modeling import linear
from infembed_ray.modeling.linear import Linear, enable_onednn, onednn_pays


@pytest.fixture(autouse=True)
def measured_anew():
    onednn_pays.cache_clear()
    yield
    onednn_pays.cache_clear()


@pytest.fixture
def faster(monkeypatch):
    """Let oneDNN be the faster one, as on AMD processors."""
    monkeypatch.setattr(linear, "_seconds", lambda call, *_: 1.0 if call is nn.functional.linear else 0.5)


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


def test_without_a_gain_or_the_operator_layers_stay_as_they_are(monkeypatch):
    layer = nn.Sequential(nn.Linear(8, 8))
    monkeypatch.setattr(linear, "_seconds", lambda *_: 1.0)
    enable_onednn(layer)
    assert type(layer[0]) is nn.Linear

    onednn_pays.cache_clear()

    def missing(*_):
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(linear, "_onednn", missing)
    enable_onednn(layer)
    assert type(layer[0]) is nn.Linear


def test_an_operator_with_other_results_is_not_used(monkeypatch):
    monkeypatch.setattr(linear, "_seconds", lambda call, *_: 1.0 if call is nn.functional.linear else 0.5)
    monkeypatch.setattr(linear, "_onednn", lambda input, weight, bias: 1.01 * nn.functional.linear(input, weight, bias))
    assert not onednn_pays()
