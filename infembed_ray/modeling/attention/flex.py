"""Attention along prefix trees by torch's FlexAttention, which computes only the blocks that tokens attend to.

Token q attends to token k if k <= q < ends[k]. A block of keys before a block of queries is therefore empty if all of its
subtrees end before the queries, and full if none ends within them. Rows are extended to a power of two, so that few shapes
are compiled; the additional tokens attend to themselves only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from infembed_ray.modeling.layout import on_device

BLOCK = 128
"""Tokens of a side of a block, FlexAttention's default."""
_SHAPES = 64
"""Limit of compiled shapes: widths are powers of two, each with and without gradient. The compiler's default is 8."""


@dataclass(frozen=True)
class FlexTreeAttention:
    """Attention along prefix trees in one row (an `Attend`), without dropout: the mask and width of the extended row."""

    mask: BlockMask
    width: int

    @classmethod
    def from_ends(cls, ends: Tensor, device: torch.device) -> FlexTreeAttention:
        """Build the block mask on a device from the layout's (tokens) ends, on the CPU."""
        width = max(BLOCK, 1 << (len(ends) - 1).bit_length())
        ends = torch.cat([ends, torch.arange(len(ends), width) + 1])
        by_block = ends.view(-1, BLOCK)
        block = torch.arange(len(by_block))
        before, first = block < block.unsqueeze(1), (block * BLOCK).unsqueeze(1)  # (query blocks, key blocks)
        full = before & (by_block.amin(dim=1) >= first + BLOCK)
        partial = before & (by_block.amax(dim=1) > first) & ~full | torch.eye(len(block), dtype=torch.bool)
        kv_blocks = *_indices(partial, device), *_indices(full, device)
        ends = on_device(ends, device)

        def ancestor(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key])

        return cls(BlockMask.from_kv_blocks(*kv_blocks, BLOCK_SIZE=BLOCK, mask_mod=ancestor), width)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, **options: Any
    ) -> Tensor:
        # Each thread has its own limit, and autograd's recomputes layers; torch.compile of torch 2.11 accepts none.
        dynamo.recompile_limit = max(dynamo.recompile_limit, _SHAPES)
        tokens, grouped = query.shape[2], query.shape[1] != key.shape[1]
        extended = (nn.functional.pad(states, (0, 0, 0, self.width - tokens)) for states in (query, key, value))
        attended: Tensor = _kernel(query.device.type)(
            *extended, block_mask=self.mask, scale=scaling, enable_gqa=grouped
        )
        return attended[:, :, :tokens].transpose(1, 2)


def flex_pays(device: torch.device) -> bool:
    """Return whether FlexAttention is faster than dense masks: on CUDA, from torch 2.7 on (the recompile limit's name)."""
    return device.type == "cuda" and hasattr(dynamo, "recompile_limit")


def _indices(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of True blocks of each row, and their indices first in the row, as FlexAttention reads them."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return on_device(blocks.sum(dim=1, dtype=torch.int32)[None, None], device), on_device(order[None, None], device)


@cache
def _kernel(device: str) -> Any:
    """Return the compiled kernel; on a CPU, where no backward pass compiles, the one that computes all scores.

    With `fullgraph`, more shapes than the limit are an error; without, all scores would be computed.
    """
    return flex_attention if device == "cpu" else torch.compile(flex_attention, fullgraph=True, dynamic=False)
