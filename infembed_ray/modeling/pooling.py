"""From token states to one vector a text."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from infembed_ray.modeling.layout import Layout

PoolingMode = Literal["last", "mean", "cls"]


def pool(states: Tensor, layout: Layout, mode: PoolingMode) -> Tensor:
    """Pool token states over the tokens of each text.

    Args:
        states: (rows, width, d) last hidden states of the layout, in any precision.
        layout: where each text's tokens are.
        mode: `last` token, `mean` of the tokens, or `cls`, the first token.

    Returns:
        (texts, d) in fp32 at least: a sum over hundreds of tokens has no place in bf16. Not normalised.
    """
    flat = states.flatten(0, 1)
    ends = layout.lengths.cumsum(0)
    wide = torch.promote_types(states.dtype, torch.float32)
    if mode == "last":
        return flat[layout.tokens[ends - 1]].to(wide)
    if mode == "cls":
        return flat[layout.tokens[ends - layout.lengths]].to(wide)
    text = torch.repeat_interleave(torch.arange(len(ends), device=ends.device), layout.lengths)
    sums = flat.new_zeros(len(ends), flat.shape[1], dtype=wide).index_add(0, text, flat[layout.tokens].to(wide))
    return sums / layout.lengths.unsqueeze(1)


def truncate(embeddings: Tensor, dimensions: int) -> Tensor:
    """The first `dimensions` components of embeddings, as unit vectors (Matryoshka Representation Learning, Eq. 1).

    Args:
        embeddings: (..., d), of any length. Of a unit vector as of the vector before it was normalised.
        dimensions: at most d.
    """
    return nn.functional.normalize(embeddings[..., :dimensions], dim=-1)
