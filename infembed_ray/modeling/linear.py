"""Linear layers in oneDNN for float32 inference on CPUs.

torch multiplies float32 matrices by MKL, which does not use AVX-512 on AMD processors: half the speed of oneDNN, which
torch contains too. torch offers oneDNN's float32 multiplication as the operator that its compiler calls, and nowhere else.
So it is used where it exists, gives the same numbers and is faster, by measurement once per process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

MIN_GAIN = 1.2
"""Speed relative to MKL from which oneDNN is used."""


class Linear(nn.Linear):
    """A linear layer that computes by oneDNN in inference mode; elsewhere, as in training or tracing, it is `nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out_features)."""
        if torch.is_inference_mode_enabled() and input.dtype == torch.float32 and input.device.type == "cpu":
            return _onednn(input, self.weight, self.bias)
        return super().forward(input)


def enable_onednn(*models: nn.Module) -> None:
    """Turn the plain linear layers of models into `Linear`, in place, if oneDNN is faster on this machine."""
    plain = [module for model in models for module in model.modules() if type(module) is nn.Linear]
    if plain and plain[0].weight.device.type == "cpu" and onednn_pays():
        for module in plain:
            module.__class__ = Linear


@cache
@torch.inference_mode()
def onednn_pays() -> bool:
    """Return whether oneDNN multiplies float32 matrices faster than torch's default, with equal results."""
    draw = torch.Generator().manual_seed(0)
    texts, weight, bias = (torch.randn(shape, generator=draw) for shape in ((64, 384), (384, 384), (384,)))
    try:
        if not torch.allclose(_onednn(texts, weight, bias), nn.functional.linear(texts, weight, bias), atol=1e-4):
            return False
        seconds = [_seconds(call, texts, weight, bias) for call in (nn.functional.linear, _onednn)]
    except (AttributeError, RuntimeError):  # another version of torch, or one built without oneDNN
        return False
    return seconds[0] > MIN_GAIN * seconds[1]


def _onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return product


def _seconds(call: Callable[..., Any], *arguments: Tensor) -> float:
    taken = []
    for _ in range(10):
        start = time.perf_counter()
        call(*arguments)
        taken.append(time.perf_counter() - start)
    return min(taken)
