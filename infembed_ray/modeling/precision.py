"""Precisions that the hardware supports, and a warning for others."""

from __future__ import annotations

import torch

from infembed_ray.progress import say

_BF16 = ("avx512_bf16", "amx_bf16", "bf16")
"""bfloat16 instructions of x86 and ARM CPUs, as `torch.cpu.get_capabilities` names them."""


def cpu_capabilities() -> dict[str, bool]:
    """Return the CPU's instruction sets as `torch.cpu.get_capabilities` names them; empty in versions of torch without it."""
    return dict(torch.cpu.get_capabilities()) if hasattr(torch.cpu, "get_capabilities") else {}


def cpu_has_bf16() -> bool | None:
    """Return whether the CPU has bfloat16 instructions; None: this version of torch cannot tell."""
    capabilities = cpu_capabilities()
    return any(capabilities.get(name) for name in _BF16) if capabilities else None


def warn_of_slow_bf16(device: torch.device | str, setting: str, remedy: str) -> None:
    """Log a warning if a model computes in bfloat16 on a CPU that is known to have no bfloat16 instructions.

    Args:
        device: device of the model.
        setting, remedy: the setting and its remedy, such as `dtype=bfloat16` and `dtype=float32`.
    """
    if torch.device(device).type == "cpu" and cpu_has_bf16() is False:
        say(
            f"warning: {setting}: this CPU has no bfloat16 instructions (AVX-512 BF16, AMX) and computes several times "
            f"slower than in float32; set {remedy}"
        )
