"""GPUs of a plan, and what is assumed of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from infembed_ray.config.base import nearest
from infembed_ray.config.planning import PlannedGpus
from infembed_ray.errors import InputError
from infembed_ray.planning.memory import GIB
from infembed_ray.training.observability.flops import peak_flops

GPUS: Mapping[str, tuple[str, float, float]] = {
    "a100-80g": ("NVIDIA A100-SXM4-80GB", 79.1, 3.4),
    "h100-80g": ("NVIDIA H100 80GB HBM3", 79.1, 6.9),
    "h200-141g": ("NVIDIA H200", 139.8, 7.9),
    "l40s-48g": ("NVIDIA L40S", 44.5, 3.8),
}
"""Short name -> torch's name, GiB that the driver leaves to a process, USD per hour: Amazon's on-demand list price in us-east-1
divided by the node's GPUs, rounded, as of 2026-11-21."""
FRAMEWORK_GIB = 2.5
"""CUDA context, NCCL and cuBLAS buffers per GPU."""
FRAGMENTATION = 0.05
"""Share of the tensors' bytes that the caching allocator loses."""


@dataclass(frozen=True)
class PlannedGpu:
    """A GPU: bytes of memory, peak FLOP/s in the run's precision, USD per hour."""

    name: str
    memory: float
    peak: float
    usd_per_hour: float

    @classmethod
    def of(cls, settings: PlannedGpus, dtype: torch.dtype) -> PlannedGpu:
        """Complete the settings by the figures of GPUS.

        Raises:
            InputError: the GPU is unknown.
        """
        if settings.gpu not in GPUS:
            raise InputError(f"gpu={settings.gpu}: unknown GPU; {nearest(settings.gpu, GPUS)}")
        name, gib, price = GPUS[settings.gpu]
        peak = peak_flops(name, dtype)
        assert peak is not None, name
        return cls(
            name=settings.gpu,
            memory=(settings.gpu_gib or gib) * GIB,
            peak=peak,
            usd_per_hour=price if settings.gpu_usd_per_hour is None else settings.gpu_usd_per_hour,
        )
