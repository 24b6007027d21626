"""From token states to one vector a text."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

PoolingMode = Literal["last", "mean", "cls"]


def pool(states: Tensor, mask: Tensor, mode: PoolingMode) -> Tensor:
    """Pool token states over the real tokens of each text.

    Args:
        states: (batch, tokens, d) last hidden states.
        mask: (batch, tokens) 1 for real tokens, 0 for padding, on either side.
        mode: `last` real token, `mean` of the real tokens, or `cls`, the first real token.

    Returns:
        (batch, d) in the dtype of `states`; not normalised.
    """
    if mode == "mean":
        weights = mask.to(states.dtype).unsqueeze(-1)
        return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
    first = mask.argmax(dim=1)
    position = first if mode == "cls" else first + mask.sum(dim=1) - 1
    return states[torch.arange(states.shape[0], device=states.device), position]
