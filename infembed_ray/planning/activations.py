"""Activation memory: bytes per token that autograd saves, counted in one forward pass on the meta device.

With flash attention, everything that a backbone saves for its backward pass is linear in the tokens: attention saves
queries, keys, values, output and one number per token and head, never the weights (FlashAttention, arXiv 2205.14135).
So a pass over a few tokens, without weights or arithmetic, gives the bytes per token of any architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from infembed_ray.modeling.encoder import InstructionEncoder

_TOKENS = 64
_ATTENTION = "counted"


@dataclass(frozen=True)
class Saved:
    """Bytes per token that a backbone saves for its backward pass.

    Attributes:
        token, checkpointed: of all layers, without and with activation checkpointing.
        layer: of one layer, which checkpointing recomputes and a backward pass works on.
    """

    token: float
    checkpointed: float
    layer: float


class _FlashAttention(torch.autograd.Function):
    """Saves the tensors that a flash-attention kernel saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("only the forward pass is counted")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    return _FlashAttention.apply(query, key, value).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attention)


def saved(encoder: InstructionEncoder, dtype: torch.dtype) -> Saved:
    """Count what the backbone of an encoder on the meta device saves. Do not use the encoder afterwards."""
    backbone: Any = encoder.backbone.to(dtype)
    backbone.set_attn_implementation(_ATTENTION)
    backbone.train()
    plain = _count(backbone, dtype)
    encoder.checkpoint_activations()
    checkpointed = _count(backbone, dtype)
    return Saved(plain, checkpointed, plain / backbone.config.num_hidden_layers)


def _count(backbone: Any, dtype: torch.dtype) -> float:
    """Bytes per token of the saved storages, each counted once, without the model's own."""
    own = {t.untyped_storage()._cdata for t in [*backbone.parameters(), *backbone.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.zeros((1, _TOKENS), dtype=torch.long)
        caching = {"use_cache": False} if hasattr(backbone.config, "use_cache") else {}
        states = backbone(input_ids=ids, attention_mask=torch.ones_like(ids), **caching).last_hidden_state
    assert states.dtype == dtype
    return sum(storage.nbytes() for storage in storages.values()) / _TOKENS
