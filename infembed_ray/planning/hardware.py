"""GPUs of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from infembed_ray.config.base import nearest
from infembed_ray.config.planning import PlannedGpus
from infembed_ray.errors import InputError
from infembed_ray.planning.memory import GIB
from infembed_ray.training.observability.flops import peak_flops

GPUS: Mapping[str, tuple[str, float]] = {
    "a100-80g": ("NVIDIA A100-SXM4-80GB", 79.1),
    "h100-80g": ("NVIDIA H100 80GB HBM3", 79.1),
    "h200-141g": ("NVIDIA H200", 139.8),
    "l40s-48g": ("NVIDIA L40S", 44.5),
}
"""Short name -> torch's name, and the GiB that the driver leaves to a process."""


@dataclass(frozen=True)
class PlannedGpu:
    """A GPU: bytes of memory, and peak FLOP/s in the run's precision."""

    name: str
    memory: float
    peak: float

    @classmethod
    def of(cls, settings: PlannedGpus, dtype: torch.dtype) -> PlannedGpu:
        """Return the GPU that the settings name; InputError if it is unknown."""
        if settings.gpu not in GPUS:
            raise InputError.of("gpu", settings.gpu, "unknown GPU", nearest(settings.gpu, GPUS))
        name, gib = GPUS[settings.gpu]
        peak = peak_flops(name, dtype)
        assert peak is not None, name
        return cls(settings.gpu, gib * GIB, peak)
