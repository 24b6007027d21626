"""Which attention kernels the passes of an encoder use, by measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from infembed_ray.modeling.layout import Layout
from infembed_ray.modeling.tokenizer import Tokens

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder

_TIMED = 3
"""Timed forward passes of a text side, after one to compile and warm up; the fastest counts."""


@dataclass(frozen=True)
class Kernels:
    """Kernels of an encoder's passes.

    Attributes:
        packed: pack texts into one row where `packing.packing_pays`; False: pad them.
        flex_trees: attend along prefix trees by FlexAttention; False: by SDPA with a dense mask of each tree.
    """

    packed: bool = True
    flex_trees: bool = False

    def __str__(self) -> str:
        return f"{'packed' if self.packed else 'padded'} rows, {'flex' if self.flex_trees else 'dense'} trees"


def measure(
    encoder: InstructionEncoder,
    forward: Callable[[Layout], Any],
    sides: Sequence[Sequence[Tokens]],
    batch_tokens: int,
    candidates: Sequence[Kernels],
) -> list[float]:
    """Time one forward pass of each side without gradient, in seconds per candidate; infinite for one that fails.

    Every worker must call it with as many sides. `encoder.kernels` is restored.

    Args:
        encoder: encoder in its training state.
        forward: runs a layout on the encoder's device.
        sides: texts of one side each.
        batch_tokens: tokens per pass.
        candidates: kernels to compare.
    """
    now, seconds = encoder.kernels, []
    for encoder.kernels in candidates:
        layouts = [next(encoder.layouts(side, batch_tokens))[1] for side in sides]
        try:
            seconds.append(sum(min(_seconds(forward, layout) for _ in range(1 + _TIMED)) for layout in layouts))
        except RuntimeError:  # FlexAttention needs Triton and a recent GPU
            seconds.append(torch.inf)
    encoder.kernels = now
    return seconds


@torch.no_grad()
def _seconds(forward: Callable[[Layout], Any], layout: Layout) -> float:
    began = time.perf_counter()
    forward(layout)
    if layout.input_ids.is_cuda:
        torch.cuda.synchronize(layout.input_ids.device)
    return time.perf_counter() - began
