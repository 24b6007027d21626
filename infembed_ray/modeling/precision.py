"""Precisions that the hardware does not have."""

from __future__ import annotations

import torch

from infembed_ray.progress import say

_BF16 = ("avx512_bf16", "amx_bf16", "bf16")
"""Instructions of x86 and of ARM CPUs, as `torch.cpu.get_capabilities` names them."""


def warn_of_slow_bf16(device: torch.device | str, setting: str, remedy: str) -> None:
    """Log one line if a model is to compute in bfloat16 on a CPU without instructions for it.

    Nothing is logged under an older torch without `torch.cpu.get_capabilities`.

    Args:
        device: of the model.
        setting, remedy: as written in the settings: `dtype=bfloat16`, `dtype=float32`.
    """
    if torch.device(device).type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return
    capabilities = torch.cpu.get_capabilities()
    if not any(capabilities.get(name) for name in _BF16):
        say(
            f"warning: {setting}: this CPU has no bfloat16 instructions (AVX-512 BF16, AMX) and computes several times "
            f"slower than in float32; set {remedy}"
        )
