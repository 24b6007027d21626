"""Pooling: from token states to one vector per text."""

import torch
from torch import Tensor, nn

from infembed_ray.config.training import PoolingMode
from infembed_ray.modeling.layout import Layout, on_device


def pool(states: Tensor, layout: Layout, mode: PoolingMode) -> Tensor:
    """Pool token states over the tokens of each text.

    Args:
        states: (rows, width, d) last hidden states, in any precision.
        layout: the layout that the states belong to.
        mode: `last` token, `mean` of the tokens, or `cls`, the first token.

    Returns:
        (texts, d), not normalised, in fp32 at least, because bf16 is too coarse for sums over hundreds of tokens.
    """
    flat = states.flatten(0, 1)
    lengths = on_device(layout.lengths, flat.device)
    ends = lengths.cumsum(0)
    wide = torch.promote_types(states.dtype, torch.float32)
    if mode != "mean":
        return flat[layout.tokens[ends - (1 if mode == "last" else lengths)]].to(wide)
    texts = torch.arange(len(ends), device=flat.device)
    text = torch.repeat_interleave(texts, lengths, output_size=len(layout.tokens))  # the size saves reading it back
    sums = flat.new_zeros(len(ends), flat.shape[1], dtype=wide).index_add(0, text, flat[layout.tokens].to(wide))
    return sums / lengths.unsqueeze(1)


def truncate(embeddings: Tensor, dimensions: int) -> Tensor:
    """Keep the first components of embeddings, as unit vectors (Matryoshka Representation Learning, Eq. 1).

    Args:
        embeddings: (..., d), normalised or not; the result is the same.
        dimensions: number of components, at most d.
    """
    return nn.functional.normalize(embeddings[..., :dimensions], dim=-1)
