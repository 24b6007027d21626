"""The machine: names, versions and the two rates that bound every other figure."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

import torch

from benchmarks.gpu import measure
from benchmarks.gpu.suite import Context, Result

_PACKAGES = ("torch", "transformers", "triton", "peft", "deepspeed", "bitsandbytes", "sentence-transformers")
_PACKAGES += ("faiss-gpu", "faiss-cpu", "pydantic")


def machine(context: Context) -> Iterator[Result]:
    """Name the device and its software; measure a bf16 matrix product and a copy on random data."""
    cuda = context.device == "cuda"
    figures: dict[str, float | str] = {
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "Python": platform.python_version(),
    }
    if cuda:
        figures |= {"CUDA": torch.version.cuda or "", "GiB": torch.cuda.get_device_properties(0).total_memory / 2**30}
    for package in _PACKAGES:
        try:
            figures[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield Result("versions", figures)
    size = 256 if context.tiny else 8192
    a, b = (torch.randn(size, size, device=context.device, dtype=measure.dtype_of(context)) for _ in range(2))
    taken = measure.seconds(lambda: a @ b, context, rounds=10, warm_up=3)
    yield Result(f"matrix product {size}", {"TFLOP/s": 2e-12 * size**3 / taken})
    source = torch.randn(size * size, device=context.device)
    target = torch.empty_like(source)
    taken = measure.seconds(lambda: target.copy_(source), context, rounds=20, warm_up=3)
    yield Result("copy", {"TB/s, read and written": 2e-12 * source.nbytes / taken})
