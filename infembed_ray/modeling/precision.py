"""Precisions that the hardware supports, and a warning for others."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from infembed_ray.progress import say

if TYPE_CHECKING:
    import torch

CPU_FACTS = Path("/proc/cpuinfo")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}
"""bfloat16 instructions of x86 and ARM CPUs, as Linux names them."""


def cpu_capabilities() -> list[str]:
    """Return the CPU's instruction sets as Linux names them, sorted; empty on other systems."""
    with suppress(OSError):
        for line in CPU_FACTS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):  # x86 and ARM
                return sorted(value.split())
    return []


def cpu_has_bf16() -> bool | None:
    """Return whether the CPU has bfloat16 instructions; None: unknown, on systems other than Linux."""
    capabilities = cpu_capabilities()
    return not _BF16.isdisjoint(capabilities) if capabilities else None


def warn_of_slow_bf16(device: torch.device | str, setting: str, remedy: str) -> None:
    """Log a warning if a model computes in bfloat16 on a CPU that is known to have no bfloat16 instructions.

    Args:
        device: device of the model.
        setting, remedy: the setting and its remedy, such as `dtype=bfloat16` and `dtype=float32`.
    """
    if str(device).partition(":")[0] == "cpu" and cpu_has_bf16() is False:
        say(
            f"warning: {setting}: this CPU has no bfloat16 instructions (AVX-512 BF16, AMX) and computes several times "
            f"slower than in float32; set {remedy}"
        )
