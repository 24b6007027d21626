"""Attention along prefix trees by torch's FlexAttention, which computes only the blocks that tokens attend to.

The block mask of a pass is built once, from the ends of the subtrees, and all layers share it. Token q attends to token
k if k <= q < ends[k]; so a block of keys before a block of queries is empty if all of its subtrees ended before the
queries, and full if none of them ends within the queries. Only what is between, and the diagonal, is masked by token.

Rows are extended to a power of two, so that few shapes are compiled; the additional tokens attend to themselves only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from infembed_ray.modeling.layout import on_device

BLOCK = 128
"""Tokens of a side of a block, FlexAttention's default."""
_SHAPES = 64
"""Limit of compiled shapes: widths are powers of two, each with and without gradient. The compiler's default is 8."""


@dataclass(frozen=True)
class FlexTreeAttention:
    """Attention along prefix trees in one row (an `Attend`), without dropout.

    Attributes:
        mask: block mask of the extended row.
        width: tokens of the extended row.
    """

    mask: BlockMask
    width: int

    @classmethod
    def from_ends(cls, ends: Tensor, device: torch.device) -> FlexTreeAttention:
        """Build the block mask.

        Args:
            ends: (tokens) end of each token's subtree, on the CPU.
            device: of the attention.
        """
        width = max(BLOCK, 1 << (len(ends) - 1).bit_length())
        added = torch.arange(len(ends), width)
        ends = torch.cat([ends, added + 1])
        return cls(_block_mask(ends, device), width)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, **options: Any
    ) -> Tensor:
        tokens = query.shape[2]
        extended = (nn.functional.pad(states, (0, 0, 0, self.width - tokens)) for states in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        _allow_shapes()
        attended = _kernel(query.device.type)(*extended, block_mask=self.mask, scale=scaling, enable_gqa=grouped)
        return cast(Tensor, attended)[:, :, :tokens].transpose(1, 2)


def _block_mask(ends: Tensor, device: torch.device) -> BlockMask:
    of_blocks = ends.view(-1, BLOCK)
    block = torch.arange(len(of_blocks))
    before = block < block.unsqueeze(1)  # (query blocks, key blocks)
    first = (block * BLOCK).unsqueeze(1)
    attended = before & (of_blocks.amax(dim=1) > first)
    full = before & (of_blocks.amin(dim=1) >= first + BLOCK)
    partial = (attended & ~full) | torch.eye(len(block), dtype=torch.bool)
    on = on_device(ends, device)

    def ancestor(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < on[key])

    parts = [on_device(part[None, None], device) for mask in (partial, full) for part in _indices(mask)]
    return BlockMask.from_kv_blocks(parts[0], parts[1], parts[2], parts[3], BLOCK_SIZE=BLOCK, mask_mod=ancestor)


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True blocks of each row, and their indices first in the row, as FlexAttention reads them."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1, dtype=torch.int32), order.to(torch.int32)


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    """Return the compiled kernel; on a CPU, where no backward pass compiles, the one that computes all scores.

    With `fullgraph`, more shapes than the limit are an error. Otherwise it would compute all scores then.
    """
    kernel: Callable[..., Any] = flex_attention
    if device == "cpu":
        return kernel
    return torch.compile(kernel, fullgraph=True, dynamic=False)


def _allow_shapes() -> None:
    """Raise the compiler's limit of shapes, which each thread has for itself; recomputed layers run in autograd's.

    `torch.compile` of torch 2.11 accepts no limit.
    """
    config: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # the earlier name
    setattr(config, limit, max(getattr(config, limit), _SHAPES))
