"""What the CPU supports, as Linux says."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

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
