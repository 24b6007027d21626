"""Warning for precisions that the hardware does not support."""

from __future__ import annotations

import torch

from infembed_ray.progress import say

_BF16 = ("avx512_bf16", "amx_bf16", "bf16")
"""bfloat16 instructions of x86 and ARM CPUs, as `torch.cpu.get_capabilities` names them."""


def warn_of_slow_bf16(device: torch.device | str, setting: str, remedy: str) -> None:
    """Log a warning if a model computes in bfloat16 on a CPU without bfloat16 instructions.

    An older torch without `torch.cpu.get_capabilities` gives no warning.

    Args:
        device: device of the model.
        setting, remedy: the setting and its remedy, such as `dtype=bfloat16` and `dtype=float32`.
    """
    if torch.device(device).type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return
    capabilities = torch.cpu.get_capabilities()
    if not any(capabilities.get(name) for name in _BF16):
        say(
            f"warning: {setting}: this CPU has no bfloat16 instructions (AVX-512 BF16, AMX) and computes several times "
            f"slower than in float32; set {remedy}"
        )
