"""Linear layers in oneDNN for float32 inference on AMD processors.

torch multiplies float32 matrices by MKL, which does not use AVX-512 on AMD processors: half the speed of oneDNN, which
torch contains too. torch offers oneDNN's float32 multiplication as the operator that its compiler calls, and nowhere else.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

CPU_FACTS = Path("/proc/cpuinfo")


class Linear(nn.Linear):
    """A linear layer that computes by oneDNN in inference mode; elsewhere, as in training or tracing, it is `nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out_features)."""
        if torch.is_inference_mode_enabled() and input.dtype == torch.float32 and input.device.type == "cpu":
            return _onednn(input, self.weight, self.bias)
        return super().forward(input)


def enable_onednn(*models: nn.Module) -> None:
    """Turn the plain linear layers of models into `Linear`, in place, where oneDNN is faster."""
    plain = [module for model in models for module in model.modules() if type(module) is nn.Linear]
    if plain and plain[0].weight.device.type == "cpu" and onednn_pays():
        for module in plain:
            module.__class__ = Linear


@cache
@torch.inference_mode()
def onednn_pays() -> bool:
    """Return whether this is an AMD processor and this torch has the operator, with the results of torch's default."""
    with suppress(OSError, AttributeError, RuntimeError):  # another system, version of torch, or one without oneDNN
        if "AuthenticAMD" in CPU_FACTS.read_text():
            draw = torch.Generator().manual_seed(0)
            texts, weight, bias = (torch.randn(shape, generator=draw) for shape in ((64, 384), (384, 384), (384,)))
            return torch.allclose(_onednn(texts, weight, bias), nn.functional.linear(texts, weight, bias), atol=1e-4)
    return False


def cpu_has_bf16() -> bool:
    """Return whether Linux lists bfloat16 instructions of this x86 or ARM CPU; False on other systems."""
    with suppress(OSError):
        return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", CPU_FACTS.read_text()) is not None
    return False


def _onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return product
