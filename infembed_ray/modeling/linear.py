"""Layers of transformers by faster operators of torch, in inference: norms on CUDA, and float32 linear layers on AMD processors.

An RMS norm of transformers is six operators, each of which reads and writes the states; torch has one.

torch multiplies float32 matrices by MKL, which does not use AVX-512 on AMD processors: half the speed of oneDNN, which
torch contains too. torch offers oneDNN's float32 multiplication as the operator that its compiler calls, and nowhere else.
"""

import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CPU_FACTS = Path("/proc/cpuinfo")
FUSING = {"cuda"}
"""Types of devices with a fused norm."""
_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}


class Linear(nn.Linear):
    """A linear layer that computes by oneDNN in inference mode; elsewhere, as in training or tracing, it is `nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out_features)."""
        # The compiler cannot read the mode.
        infers = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        if infers and input.dtype == torch.float32 and input.device.type == "cpu":
            return _onednn(input, self.weight, self.bias)
        return super().forward(input)


def enable_onednn(*models: nn.Module) -> None:
    """Turn the plain linear layers of models into `Linear`, in place, where oneDNN is faster."""
    plain = [module for model in models for module in model.modules() if type(module) is nn.Linear]
    if plain and plain[0].weight.device.type == "cpu" and onednn_pays():
        for module in plain:
            module.__class__ = Linear


def fuse_norms(*models: nn.Module) -> None:
    """Compute the RMS norms of the Llama family by one operator, in place, on CUDA in inference mode."""
    for module in (module for model in models for module in model.modules()):
        norm: Any = type(module)
        if norm.__name__ in _NORMS:
            module.__class__ = _fused(norm)


@cache
def _fused(norm: Any) -> Any:
    def forward(self: Any, states: Tensor) -> Any:
        if torch.compiler.is_compiling():  # it fuses the norm itself, and cannot read the mode
            return norm.forward(self, states)
        if states.device.type in FUSING and torch.is_inference_mode_enabled():
            return nn.functional.rms_norm(states, states.shape[-1:], self.weight, self.variance_epsilon)
        return norm.forward(self, states)

    return type(f"Fused{norm.__name__}", (norm,), {"forward": forward})


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
